"""Which rank holds which token of a context, and where (decode context parallelism)."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from torch import Tensor

GRANULE = 64  # shards are sized in whole cache blocks of this many tokens

Position = int | Tensor


@dataclass(frozen=True)
class Shard:
    """One rank's share of every context: tokens are dealt in runs of `interleave`, round-robin.

    `ranks=1` means that contexts are not sharded.  Every method takes Python ints or integer
    tensors (element by element) and returns the same kind; positions and lengths must be >= 0.
    Raises ValueError for a rank outside `ranks` and for an interleave below 1.
    """

    rank: int = 0
    ranks: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"shard over {self.ranks} ranks; at least 1 is needed")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} is outside 0..{self.ranks - 1}")
        if self.interleave < 1:
            raise ValueError(f"interleave {self.interleave} must be at least 1")

    @property
    def period(self) -> int:
        """Tokens after which the deal begins again at rank 0."""
        return self.ranks * self.interleave

    def owner(self, token: Position) -> Position:
        """Rank that holds the global position `token`."""
        return (token // self.interleave) % self.ranks

    def local(self, token: Position) -> Position:
        """Position of the global position `token` within its owner's shard."""
        return (token // self.period) * self.interleave + token % self.interleave

    def global_position(self, position: Position, rank: int | None = None) -> Position:
        """Global position of local `position` on `rank` (default: this rank)."""
        rank = self.rank if rank is None else rank
        whole = (position // self.interleave) * self.period
        return whole + rank * self.interleave + position % self.interleave

    def local_length(self, length: Position, rank: int | None = None) -> Position:
        """How many of the first `length` global positions `rank` (default: this rank) holds.

        A causal bound of a query row is mapped with this as well: it is the length of the prefix
        that the row sees.  The new local length never follows from the old one by adding what was
        accepted; it is computed from the global length each time.
        """
        rank = self.rank if rank is None else rank
        rest = length % self.period - rank * self.interleave
        return (length // self.period) * self.interleave + _clip(rest, self.interleave)

    def local_max(self, context: int) -> int:
        """Upper bound of any rank's share of `context` tokens, a multiple of 64; sizes buffers."""
        granule = lcm(GRANULE, self.interleave)
        return -(-context // (self.ranks * granule)) * granule


def _clip(value: Position, upper: int) -> Position:
    """`value` limited to 0..upper."""
    if isinstance(value, Tensor):
        return value.clamp(0, upper)
    return max(0, min(value, upper))
