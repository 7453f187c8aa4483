"""An explicit-state explorer of schedules: the independent oracle of the happens-before checker."""
