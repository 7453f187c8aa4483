"""Two warps that score the same keys, each over its part of the columns.

Each has sums over its columns for all heads of the tile. Warp 0 of a pair goes on with the heads
of side 0 of the fragments (rows g), warp 1 with those of side 1 (rows g + 8): each hands the other
side's sums over, and adds what it gets.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, cute
from cutlass.memory import SmemAllocator

from . import memory, reduce, softmax

PARTS = 2
"""Warps of a pair, and parts of the columns."""

_VECTOR = 4
_LANE_SCORES = 2 * softmax.OCTETS
_VECTORS = _LANE_SCORES // _VECTOR
_FP32_BYTES = 4
_THREADS = PARTS * reduce.WARP


def shared_bytes(pairs: int) -> int:
    """Shared memory of what `pairs` pairs hand over."""
    return pairs * PARTS * _LANE_SCORES * reduce.WARP * _FP32_BYTES


@dataclass(frozen=True)
class ScorePairs:
    """handed: FP32 (pair, part, vector, lane, element), what warp `part` of a pair gets.

    Pair p uses the named barrier first_barrier + p.
    """

    handed: cute.Tensor
    first_barrier: int

    @classmethod
    def allocate(cls, shared: SmemAllocator, pairs: int, first_barrier: int) -> ScorePairs:
        """Room for `pairs` pairs."""
        shape = (pairs, PARTS, _VECTORS, reduce.WARP, _VECTOR)
        return cls(memory.allocate(shared, Float32, *shape), first_barrier)

    def join(self, sums: list, pair, part: int, lane) -> list[Float32]:
        """This warp's side's whole sums for the keys of `softmax.lane_keys`.

        `sums` are the octets' C fragments over this warp's columns. Both warps of the pair call it
        together.
        """
        sides = [
            [octet[2 * side + column] for octet in sums for column in range(2)]
            for side in range(softmax.SIDES)
        ]
        self._meet(pair)  # what was handed over before has been read
        for vector in range(_VECTORS):
            place = self.handed[pair, 1 - part, vector, lane, None]
            given = sides[1 - part][vector * _VECTOR : (vector + 1) * _VECTOR]
            values = cute.make_rmem_tensor((_VECTOR,), Float32)
            for number, value in enumerate(given):
                values[number] = value
            place.store(values.load())
        self._meet(pair)
        received = []
        for vector in range(_VECTORS):
            values = self.handed[pair, part, vector, lane, None].load()
            received += [values[number] for number in range(_VECTOR)]
        return [own + other for own, other in zip(sides[part], received, strict=True)]

    def _meet(self, pair) -> None:
        cute.arch.barrier(barrier_id=self.first_barrier + pair, number_of_threads=_THREADS)
