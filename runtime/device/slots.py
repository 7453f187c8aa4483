"""A ring of shared-memory slots through which groups of keys pass three kinds of warps.

Group n of a CTA takes slot n % count. The gathering warps fill it together (`ready`), a team of
scoring warps adds the weights of its keys (`scored`), and the warps that sum the values give it
back (`free`). Whoever waits finds its data and may overwrite what was there before:

    scoring warps    the keys: every gathering warp has announced its bytes, and all have landed
    value warps      the keys, likewise; the weights: all of the team have arrived behind theirs
    gathering warps  a slot that nobody reads: the value warps have arrived behind their last load
                     of it, and the team's loads lay before the weights they waited for

A wait cannot tell a phase of a barrier from the one two ahead. Gathering and value warps wait for
every phase of a slot. Teams take groups in turn: so where slots are used again, one team serves
each of them, and has seen its phase before.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Uint8, Uint32, cute
from cutlass.memory import SmemAllocator

from . import barrier, memory, mma, reduce, softmax

TEAM = softmax.FRAGMENTS
"""Score warps that share a group: each makes one fragment of its weights."""

_WORDS = 4  # of an A fragment
_ALIGN = 128
_BARRIERS = 3
_WORD_BYTES = 4


def slot_bytes(pitch: int) -> int:
    """Shared memory of one slot whose rows lie `pitch` bytes apart, barriers included."""
    words = softmax.FRAGMENTS * (reduce.WARP * _WORDS + mma.TILE_M)
    return softmax.GROUP * pitch + words * _WORD_BYTES + _BARRIERS * barrier.BYTES


def ring_slots(room: int, groups: int, teams: int) -> int:
    """Slots of a ring with room for `room`, for CTAs that take at most `groups` groups.

    `teams` teams of warps score the slots in turn. Where there are fewer slots than groups their
    number is a multiple of the teams. Raises ValueError where no such ring fits.
    """
    if groups <= room:
        return groups
    if room < teams:
        raise ValueError(
            f"shared memory has room for {room} groups of keys, {teams} teams need one each"
        )
    return room // teams * teams


@dataclass(frozen=True)
class Slots:
    """keys: u8 (slot, key, byte). weights: u32 (slot, fragment, lane, word), as the lanes
    hold them. maxima: FP32 (slot, fragment, head), what the weights refer to. The rest: a barrier a
    slot.
    """

    count: int
    keys: cute.Tensor
    weights: cute.Tensor
    maxima: cute.Tensor
    ready: cute.Pointer
    scored: cute.Pointer
    free: cute.Pointer

    @classmethod
    def allocate(cls, shared: SmemAllocator, count: int, pitch: int) -> Slots:
        """`count` slots of a group of keys each."""
        return cls(
            count=count,
            keys=memory.allocate(shared, Uint8, count, softmax.GROUP, pitch, align=_ALIGN),
            weights=memory.allocate(shared, Uint32, count, softmax.FRAGMENTS, reduce.WARP, _WORDS),
            maxima=memory.allocate(shared, Float32, count, softmax.FRAGMENTS, mma.TILE_M),
            ready=barrier.allocate(shared, count),
            scored=barrier.allocate(shared, count),
            free=barrier.allocate(shared, count),
        )

    @cute.jit
    def initialise(self, gather_warps: cutlass.Constexpr, value_warps: cutlass.Constexpr):
        """Sets up the barriers, by one thread; a CTA barrier follows.

        A slot is ready when all `gather_warps` have announced their bytes and these have landed,
        scored when all of its team say so, free when all `value_warps` do.
        """
        barrier.make_ready(self.ready, self.count, gather_warps)
        barrier.make_ready(self.scored, self.count, barrier.WARP_ARRIVALS * TEAM)
        barrier.make_ready(self.free, self.count, barrier.WARP_ARRIVALS * value_warps)
        barrier.fence_ready()

    def wait_ready(self, group) -> None:
        """Until the keys of a group lie in its slot."""
        barrier.wait_soon(self.ready + group % self.count, group // self.count % 2)

    def wait_scored(self, group) -> None:
        """Until the weights of a group lie in its slot."""
        barrier.wait_soon(self.scored + group % self.count, group // self.count % 2)

    def wait_free(self, group) -> None:
        """Until the slot of a group, `count` or a later one, has been given back."""
        barrier.wait_soon(self.free + group % self.count, (group // self.count - 1) % 2)
