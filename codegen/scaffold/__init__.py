"""A project of a user's own, started from a shipped pipeline."""
