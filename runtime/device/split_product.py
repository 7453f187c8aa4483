"""Rows times weight rows by one CTA, with the columns split between its warps.

Every warp sums over its own run of columns, for TILE_M rows and all outputs of the CTA; the
warps' sums meet in shared memory and are added in the order of the warps. A weight is loaded by
one thread only, straight into the fragment in which the tensor cores take it. The last weight rows
may wait in shared memory in place of registers, where bulk copies bring them: that makes room for
another CTA, and changes no sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import cutlass
from cutlass import Uint32, cute

from . import bulk, memory, mma, reduce

MAX_WARPS = 8
MAX_WEIGHT_REGISTERS = 96
"""Weights of a thread that leave room for what else it does, without a trip to memory."""
BANKS = 32
BF16_BYTES = 2
FP32_BYTES = 4
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
    """The product of `rows` rows with `outputs` weight rows over `columns` columns.

    columns: a multiple of 32.
    outputs: of one CTA, a multiple of 8.
    rows:    TILE_M, or HALF_M where there are no more: the tensor cores then see zeros below.
    staged:  weight rows that wait in shared memory, the last ones, a multiple of 8.
    """

    columns: int
    outputs: int
    rows: int = mma.TILE_M
    staged: int = 0

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
        return (self.outputs - self.staged) // mma.TILE_N * self.slices * mma.SLICE_WORDS

    def within_registers(self, most: int) -> SplitProduct:
        """This product with so many rows in shared memory that weights take `most` registers."""
        fitting = most // (self.slices * mma.SLICE_WORDS) * mma.TILE_N
        return replace(self, staged=max(self.outputs - fitting, 0))

    @property
    def pitch(self) -> int:
        """Elements from one row of the operand to the next, in shared memory."""
        return row_pitch(self.columns)

    def partial_layout(self) -> cute.Layout:
        """(warp, row, output) sums, FP32 in shared memory; neighbouring rows lie 8 banks apart."""
        pitch = self.partial_pitch
        return cute.make_layout(
            (self.warps, self.rows, self.outputs), stride=(self.rows * pitch, pitch, 1)
        )

    @property
    def partial_pitch(self) -> int:
        """Sums from one row to the next."""
        return self.outputs + (mma.TILE_N - self.outputs) % BANKS

    @property
    def partial_bytes(self) -> int:
        """What the sums take."""
        return self.warps * self.rows * self.partial_pitch * FP32_BYTES

    def staged_layout(self) -> cute.Layout:
        """(weight row, column) of those that wait in shared memory, BF16."""
        return cute.make_layout((self.staged, self.columns), stride=(self.pitch, 1))

    @property
    def staged_bytes(self) -> int:
        """What their copies bring."""
        return self.staged * self.columns * BF16_BYTES

    @cute.jit
    def request_staged(
        self,
        matrix: cute.Tensor,
        first_output,
        staged: cute.Tensor,
        barrier: cute.Pointer,
        warp,
        lane,
    ):
        """Requests the last weight rows of the CTA, whose first one is `first_output`; by warp 0.

        Its thread 0 has told `barrier` of `staged_bytes`.
        """
        first = first_output + self.outputs - self.staged
        if warp == 0:
            cute.arch.sync_warp()
            for before in cutlass.range_constexpr(0, self.staged, reduce.WARP):
                row = before + lane
                if row < self.staged:
                    bulk.copy_run(matrix[first + row, None], staged[row, None], barrier, once=True)

    def load_weights(self, matrix: cute.Tensor, first_output, warp, lane) -> list[list]:
        """Requests this lane's words of the weight rows from `first_output` on: [tile][slice].

        Without those that wait in shared memory.
        """
        group, group_lane = mma.fragment_place(lane)
        return [
            self._slices_of(
                matrix[first_output + output + group, None],
                warp,
                group_lane,
                memory.load_words_once,
            )
            for output in range(0, self.outputs - self.staged, mma.TILE_N)
        ]

    def store_products(
        self,
        rows: cute.Tensor,
        weights: list[list],
        partial: cute.Tensor,
        warp,
        lane,
        staged: cute.Tensor | None = None,
    ) -> None:
        """Multiplies the warp's columns of `rows`, BF16 [rows, pitch], into `partial[warp]`.

        weights, staged: of `load_weights` and `request_staged`, whose copies are here.
        """
        group, group_lane = mma.fragment_place(lane)
        tiles = self.outputs // mma.TILE_N
        chains = 1 if tiles >= ENOUGH_TILES else 2
        sums = [[mma.zero_accumulator() for _ in range(tiles)] for _ in range(chains)]
        upper = self._slices_of(rows[group, None], warp, group_lane)
        lower = [[Uint32(0)] * mma.SLICE_WORDS] * self.slices
        if self.rows > mma.HALF_M:
            lower = self._slices_of(rows[group + mma.HALF_M, None], warp, group_lane)
        for step in range(self.slices):
            chain = sums[step % chains]
            for tile in range(tiles):
                if tile < len(weights):
                    words = weights[tile][step]
                else:
                    row = staged[(tile - len(weights)) * mma.TILE_N + group, None]
                    words = self._slice_of(row, warp, step, group_lane)
                chain[tile] = mma.mma_slice(upper[step], lower[step], words, chain[tile])
        for tile, parts in enumerate(zip(*sums, strict=True)):
            total = [sum(values[1:], values[0]) for values in zip(*parts, strict=True)]
            target = cute.local_tile(partial[warp, None, None], (self.rows, mma.TILE_N), (0, tile))
            mma.store_fragment_pairs(total, target, group, group_lane, self.rows // mma.HALF_M)

    def sums(self, partial: cute.Tensor, row, part, width: int) -> cute.TensorSSA:
        """FP32 sums of the `part`-th `width` outputs of one row, behind a barrier."""
        total = memory.load_float(partial[0, row, None], part, width)
        for warp in range(1, self.warps):
            total = total + memory.load_float(partial[warp, row, None], part, width)
        return total

    def _slices_of(self, row: cute.Tensor, warp, group_lane, load=memory.load_words) -> list:
        return [load(row, self._place(warp, step, group_lane)) for step in range(self.slices)]

    def _slice_of(self, row: cute.Tensor, warp, step: int, group_lane) -> cute.TensorSSA:
        return memory.load_words(row, self._place(warp, step, group_lane))

    def _place(self, warp, step: int, group_lane):
        """Which 16 bytes of a row a lane takes in a step."""
        return (warp * self.slices + step) * mma.GROUP_LANES + group_lane
