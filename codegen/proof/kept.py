"""Results kept within one run, in a bounded number.

The launch lists of a pipeline, the pieces that synthesis gives back and the repairs that are tried
out put the same questions again and again, in other words: a key holds what the answer depends on,
and no names.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Value = TypeVar("Value")
_ALL: list[Kept] = []


class Kept(Generic[Value]):
    """Results by key; of more than `most`, the one that was not asked for longest goes first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.values: dict[tuple, Value] = {}
        _ALL.append(self)

    def get(self, key: tuple) -> Value | None:
        """The result kept under a key, or None."""
        value = self.values.pop(key, None)
        if value is not None:
            self.values[key] = value  # behind the others: the first one is the first to go
        return value

    def keep(self, key: tuple, value: Value) -> Value:
        """Keeps a result and returns it."""
        if key not in self.values and len(self.values) >= self.most:
            del self.values[next(iter(self.values))]
        self.values[key] = value
        return value


def forget() -> None:
    """Forget all results of this process, as a measurement of a first proof does."""
    for kept in _ALL:
        kept.values.clear()
