"""What a stand-in does in each phase, as rows of numbers; see `schedules/kernel.py`."""

from __future__ import annotations

NOTHING, READ, WRITE, SLEEP = range(4)
COLUMNS = 8  # kind, first word, words, value, slot; the rest keeps rows 32 bytes apart
MAX_SLEEP_US = 2000

Row = tuple[int, int, int, int, int, int, int, int]


def row(kind: int, first: int = 0, count: int = 0, value: int = 0, slot: int = 0) -> Row:
    """One row of work."""
    return (kind, first, count, value, slot, 0, 0, 0)


def sleep(microseconds: int) -> Row:
    """A row that sleeps.  Raises ValueError beyond MAX_SLEEP_US."""
    if not 0 <= microseconds <= MAX_SLEEP_US:
        raise ValueError(f"a sleep of {microseconds} us; 0 to {MAX_SLEEP_US} are possible")
    return row(SLEEP, value=microseconds)
