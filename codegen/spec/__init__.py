"""The specification language: positioned YAML, rows, shape expressions and the models on top."""
