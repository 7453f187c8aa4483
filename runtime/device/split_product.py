"""Rows times weight rows by one CTA, with the columns split between its warps.

Every warp sums over its own run of columns, for TILE_M rows and all outputs of the CTA; the
warps' sums meet in shared memory and are added in the order of the warps. A weight is loaded by
one thread only, straight into the fragment in which the tensor cores take it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from cutlass import cute

from . import memory, mma

MAX_WARPS = 8
MAX_WEIGHT_REGISTERS = 96
"""Weights of a thread that leave room for what else it does, without a trip to memory."""
BANKS = 32
ENOUGH_TILES = 4
"""So many sums keep the tensor cores busy; fewer tiles sum even and odd slices apart."""


def row_pitch(columns: int) -> int:
    """Elements from one BF16 row in shared memory to the next, for a multiple of 32 columns.

    Rows g and g + 1 then begin half the banks apart, and eight lanes that load 16 bytes each of
    two rows meet no bank twice.
    """
    return columns + (mma.K_SLICE - columns) % (2 * mma.K_SLICE)


@dataclass(frozen=True)
class SplitProduct:
    """The product of TILE_M rows with `outputs` weight rows over `columns` columns.

    columns: a multiple of 32.
    outputs: of one CTA, a multiple of 8.
    """

    columns: int
    outputs: int

    @property
    def warps(self) -> int:
        """Warps that share the columns."""
        return gcd(self.columns // mma.K_SLICE, MAX_WARPS)

    @property
    def slices(self) -> int:
        """Slices of a warp."""
        return self.columns // mma.K_SLICE // self.warps

    @property
    def weight_registers(self) -> int:
        """Registers of a thread that hold weights."""
        return self.outputs // mma.TILE_N * self.slices * mma.SLICE_WORDS

    @property
    def pitch(self) -> int:
        """Elements from one row of the operand to the next, in shared memory."""
        return row_pitch(self.columns)

    def partial_layout(self) -> cute.Layout:
        """(warp, row, output) sums, FP32 in shared memory; neighbouring rows lie 8 banks apart."""
        pitch = self.outputs + (mma.TILE_N - self.outputs) % BANKS
        return cute.make_layout(
            (self.warps, mma.TILE_M, self.outputs), stride=(mma.TILE_M * pitch, pitch, 1)
        )

    def load_weights(self, matrix: cute.Tensor, first_output, warp, lane) -> list[list]:
        """Requests this lane's words of the weight rows from `first_output` on: [tile][slice]."""
        group, group_lane = mma.fragment_place(lane)
        return [
            self._slices_of(matrix[first_output + output + group, None], warp, group_lane)
            for output in range(0, self.outputs, mma.TILE_N)
        ]

    def store_products(
        self, rows: cute.Tensor, weights: list[list], partial: cute.Tensor, warp, lane
    ) -> None:
        """Multiplies the warp's columns of `rows`, BF16 [TILE_M, pitch], into `partial[warp]`."""
        group, group_lane = mma.fragment_place(lane)
        chains = 1 if len(weights) >= ENOUGH_TILES else 2
        sums = [[mma.zero_accumulator() for _ in weights] for _ in range(chains)]
        upper = self._slices_of(rows[group, None], warp, group_lane)
        lower = self._slices_of(rows[group + mma.HALF_M, None], warp, group_lane)
        for step in range(self.slices):
            chain = sums[step % chains]
            for tile, column in enumerate(weights):
                chain[tile] = mma.mma_slice(upper[step], lower[step], column[step], chain[tile])
        for tile, parts in enumerate(zip(*sums, strict=True)):
            total = [sum(values[1:], values[0]) for values in zip(*parts, strict=True)]
            target = cute.local_tile(partial[warp, None, None], (mma.TILE_M, mma.TILE_N), (0, tile))
            mma.store_fragment_pairs(total, target, group, group_lane)

    def sums(self, partial: cute.Tensor, row, part, width: int) -> cute.TensorSSA:
        """FP32 sums of the `part`-th `width` outputs of one row, behind a barrier."""
        total = memory.load_float(partial[0, row, None], part, width)
        for warp in range(1, self.warps):
            total = total + memory.load_float(partial[warp, row, None], part, width)
        return total

    def _slices_of(self, row: cute.Tensor, warp, group_lane) -> list[cute.TensorSSA]:
        first = warp * self.slices
        return [
            memory.load_words(row, (first + step) * mma.GROUP_LANES + group_lane)
            for step in range(self.slices)
        ]
