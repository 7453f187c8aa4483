"""The commands of the command line, one per file; each imports what it needs when it runs."""
