"""The groups of keys of a row's list, and which CTA takes which."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass

from .softmax import GROUP


@dataclass(frozen=True)
class KeyGroups:
    """CTA s of `splits` takes groups s, s + splits, ... of `size` keys; `order` counts its own."""

    splits: int
    size: int = GROUP

    def of(self, count, split):
        """How many groups of a list of `count` keys CTA `split` takes."""
        groups = (count + (self.size - 1)) // self.size
        return cutlass.max((groups - split + (self.splits - 1)) // self.splits, 0)

    def most(self, keys: int) -> int:
        """Groups that a CTA takes at most of a list of up to `keys` keys."""
        return -(-keys // (self.size * self.splits))

    def first_key(self, order, split):
        """Place in the list of the first key of a group."""
        return (order * self.splits + split) * self.size
