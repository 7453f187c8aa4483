"""What a change of a specification does to its schedule, for the reviewer of a pull request."""
