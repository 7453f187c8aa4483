"""The groups of keys of a row's list, and which CTA takes which."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass

from .softmax import GROUP


@dataclass(frozen=True)
class KeyGroups:
    """CTA s of `splits` takes runs s, s + splits, ... of `run` keys, and `size` keys at a time: a
    group, one or more of its runs. `order` counts its own groups.
    """

    splits: int
    size: int = GROUP
    run: int = GROUP

    def of(self, count, split):
        """How many groups of a list of `count` keys CTA `split` takes."""
        runs = (count + (self.run - 1)) // self.run
        mine = cutlass.max((runs - split + (self.splits - 1)) // self.splits, 0)
        return (mine + (self._runs - 1)) // self._runs if self._runs > 1 else mine

    def most(self, keys: int) -> int:
        """Groups that a CTA takes at most of a list of up to `keys` keys."""
        mine = -(-keys // (self.run * self.splits))
        return -(-mine // self._runs)

    def first_key(self, order, split, key: int = 0):
        """Place in the list of the first key of a group, or of its key `key`."""
        if self._runs == 1:
            return (order * self.splits + split) * self.size + key
        run = (order * self._runs + key // self.run) * self.splits + split
        return run * self.run + key % self.run

    @property
    def _runs(self) -> int:
        return self.size // self.run
