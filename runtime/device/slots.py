"""A ring of shared-memory slots through which groups of keys pass three kinds of warps.

Group n of a CTA takes slot n % count. A gathering warp fills it (`ready`), a scoring warp adds the
weights of its keys (`scored`), and the warps that sum the values give it back (`free`).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int64, Uint8, Uint32, cute
from cutlass.memory import SmemAllocator

from . import barrier, memory, mma, reduce, softmax

_WORDS = 4  # of an A fragment
_ALIGN = 128
_BARRIERS = 3
_WORD_BYTES = 4


def slot_bytes(pitch: int) -> int:
    """Shared memory of one slot whose rows lie `pitch` bytes apart, barriers included."""
    words = softmax.FRAGMENTS * reduce.WARP * _WORDS + mma.TILE_M
    return softmax.GROUP * pitch + words * _WORD_BYTES + _BARRIERS * barrier.BYTES


@dataclass(frozen=True)
class Slots:
    """keys: u8 (slot, key, byte). weights: u32 (slot, fragment, lane, word), as the lanes
    hold them. maxima: FP32 (slot, head), what the weights refer to. The rest: barriers, one a slot.
    """

    count: int
    keys: cute.Tensor
    weights: cute.Tensor
    maxima: cute.Tensor
    ready: cute.Tensor
    scored: cute.Tensor
    free: cute.Tensor

    @classmethod
    def allocate(cls, shared: SmemAllocator, count: int, pitch: int) -> Slots:
        """`count` slots of a group of keys each."""
        return cls(
            count=count,
            keys=memory.allocate(shared, Uint8, count, softmax.GROUP, pitch, align=_ALIGN),
            weights=memory.allocate(shared, Uint32, count, softmax.FRAGMENTS, reduce.WARP, _WORDS),
            maxima=memory.allocate(shared, Float32, count, mma.TILE_M),
            ready=memory.allocate(shared, Int64, count),
            scored=memory.allocate(shared, Int64, count),
            free=memory.allocate(shared, Int64, count),
        )

    @cute.jit
    def initialise(self, value_warps: cutlass.Constexpr, thread):
        """Sets up the barriers, one slot a thread; a CTA barrier follows.

        A slot is ready when every lane of its gathering warp has its copies, scored when its
        scoring warp says so, free when all `value_warps` have.
        """
        if thread < self.count:
            barrier.make_one_ready(self.ready.iterator + thread, reduce.WARP)
            barrier.make_one_ready(self.scored.iterator + thread, 1)
            barrier.make_one_ready(self.free.iterator + thread, value_warps)
            barrier.fence_ready()

    def wait_ready(self, group) -> None:
        """Until the keys of a group lie in its slot."""
        barrier.wait(self.ready.iterator + group % self.count, group // self.count % 2)

    def wait_scored(self, group) -> None:
        """Until the weights of a group lie in its slot, and so its keys."""
        barrier.wait(self.scored.iterator + group % self.count, group // self.count % 2)

    def wait_free(self, group) -> None:
        """Until the slot of a group, `count` or a later one, has been given back."""
        barrier.wait(self.free.iterator + group % self.count, (group // self.count - 1) % 2)
