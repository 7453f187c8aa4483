"""Two stages of operand blocks through which groups of keys pass three kinds of warps.

Group n of a CTA takes stage n % 2. Gathering warps fill it (`ready`), scoring warps turn its keys
into the one block of weights (`scored`), and the warps that sum the values give both back, the
stage in SHARES shares of its keys (`free`). The query's blocks come before the stages in one run of
memory, so that their descriptors differ by whole blocks, and everything can be used for something
else once the sums are done.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Uint8, cute
from cutlass.memory import SmemAllocator

from . import barrier, memory, operand_blocks
from .wide_softmax import GROUP

COUNT = 2
"""Stages."""
SHARES = 4
"""Shares of a stage's keys, given back one by one."""
MASSES = 4
_HEADS = operand_blocks.ROWS
_WORD_BYTES = 4
_BARRIERS = (1 + SHARES) * COUNT + 3


def shared_bytes(blocks: int) -> int:
    """Shared memory of a CTA whose rows have that many blocks."""
    scales = COUNT * GROUP + (2 + MASSES) * _HEADS
    whole = ((1 + COUNT) * blocks + 1) * operand_blocks.BYTES
    return whole + scales * _WORD_BYTES + _BARRIERS * barrier.BYTES


@dataclass(frozen=True)
class Stages:
    """arena: u8 (block, byte), the query's blocks, the stages', that of the weights.

    key_scales: FP32 (stage, key). head_scales: FP32 (head), of the query. moves: FP32 (head), what
    the sums so far are to be multiplied by before those of a group are added. masses: FP32
    (head, MASSES): the maximum, the mass and what refers the sums to that maximum, of all groups;
    the fourth is unused.
    asked: the query lies in its blocks; done: the masses are there, and nobody reads the stages any
    more. Each happens once.
    """

    blocks: int
    arena: cute.Tensor
    key_scales: cute.Tensor
    head_scales: cute.Tensor
    moves: cute.Tensor
    masses: cute.Tensor
    ready: cute.Pointer
    free: cute.Pointer
    scored: cute.Pointer
    asked: cute.Pointer
    done: cute.Pointer

    @classmethod
    def allocate(cls, shared: SmemAllocator, blocks: int) -> Stages:
        """Room for rows of `blocks` blocks."""
        count = (1 + COUNT) * blocks + 1
        align = operand_blocks.ALIGN
        return cls(
            blocks=blocks,
            arena=memory.allocate(shared, Uint8, count, operand_blocks.BYTES, align=align),
            key_scales=memory.allocate(shared, Float32, COUNT, GROUP),
            head_scales=memory.allocate(shared, Float32, _HEADS),
            moves=memory.allocate(shared, Float32, _HEADS),
            masses=memory.allocate(shared, Float32, _HEADS, MASSES),
            ready=barrier.allocate(shared, COUNT),
            free=barrier.allocate(shared, COUNT * SHARES),
            scored=barrier.allocate(shared, 1),
            asked=barrier.allocate(shared, 1),
            done=barrier.allocate(shared, 1),
        )

    def initialise(self, gather_warps: int, score_warps: int, value_warps: int) -> None:
        """Sets up the barriers, an arrival a warp; one thread, a CTA barrier follows."""
        barrier.make_ready(self.ready, COUNT, gather_warps)
        barrier.make_ready(self.free, COUNT * SHARES, value_warps)
        barrier.make_ready(self.scored, 1, score_warps)
        barrier.make_ready(self.asked, 1, value_warps)
        barrier.make_ready(self.done, 1, score_warps + value_warps)
        barrier.fence_ready()

    def address(self, block):
        """Shared address of a block of the arena."""
        return self.arena.iterator.toint() + block * operand_blocks.BYTES

    @property
    def query(self):
        """Address of the query's blocks."""
        return self.address(0)

    def keys(self, group):
        """Address of the blocks of a group's keys."""
        return self.address(self.blocks) + group % COUNT * (self.blocks * operand_blocks.BYTES)

    @property
    def weights(self):
        """Address of the block of the weights."""
        return self.address((1 + COUNT) * self.blocks)

    def scales_of(self, group) -> cute.Tensor:
        """FP32 (key) of a group."""
        return self.key_scales[group % COUNT, None]

    def wait_ready(self, group) -> None:
        """Until the keys of a group lie in its stage."""
        barrier.wait_soon(self.ready + group % COUNT, group // COUNT % 2)

    def wait_scored(self, group) -> None:
        """Until the weights of a group are there."""
        barrier.wait_soon(self.scored, group % 2)

    def free_of(self, group) -> cute.Pointer:
        """The barriers of a group's stage at which its shares are given back, in their order."""
        return self.free + group % COUNT * SHARES

    def wait_free(self, group, share=SHARES - 1) -> None:
        """Until a share of a group's stage has been given back, the weights with the last one."""
        barrier.wait_soon(self.free_of(group) + share, group // COUNT % 2)
