"""Where the ops of a stage may stand in a mode: every place tried out, planned and proved."""
