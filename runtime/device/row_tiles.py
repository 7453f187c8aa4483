"""Tiles of rows in shared memory, on their way into a product.

A warp requests its rows of a tile, and norms them in place where they need it; what a lane has
copied it reads itself, so a tile needs no barrier before its rows are whole. With two stages the
next tile arrives while one is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import cute

from .rms import RmsNorm
from .split_product import SplitProduct

SPREAD_RUNS = 3
"""Runs of a row that a warp does one after another as fast as a whole row at once."""


@dataclass(frozen=True)
class RowTiles:
    """Tiles of the rows that `product` multiplies, for up to `rows` of them.

    rows: a multiple of those of the product, which a tile has.
    """

    norm: RmsNorm
    product: SplitProduct
    rows: int

    @property
    def stages(self) -> int:
        """Tiles that shared memory holds."""
        return min(self.rows // self.product.rows, 2)

    def layout(self) -> cute.Layout:
        """(stage, row, element), BF16."""
        rows, pitch = self.product.rows, self.product.pitch
        return cute.make_layout(
            (self.stages, rows, self.norm.width), stride=(rows * pitch, pitch, 1)
        )

    def stage(self, tiles: cute.Tensor, tile) -> cute.Tensor:
        """The stage of a tile."""
        return tiles[tile % self.stages, None, None]

    @cute.jit
    def request(self, source: cute.Tensor, stage: cute.Tensor, first, warp, lane):
        """Requests the rows of `source` from `first` on; rows past its end are left out."""
        for place in cutlass.range_constexpr(0, self.product.rows, self.product.warps):
            row = place + warp
            if first + row < source.shape[0]:
                self.norm.request(source[first + row, None], stage[row, None], lane)

    @cute.jit
    def normalise(self, stage: cute.Tensor, weight: cute.Tensor, rows, warp, lane):
        """Norms this warp's rows of a tile of `rows` rows, behind `copy_async.wait`."""
        last = cutlass.min(rows, self.product.rows)
        for row in cutlass.range(warp, last, self.product.warps, unroll=1):
            self.norm.normalise(stage[row, None], weight, lane)

    def sums_layout(self) -> cute.Layout:
        """(row, run) sums of squares of a tile whose runs are spread, FP32."""
        return cute.make_layout(
            (self.product.rows, self.norm.vectors), stride=(self.norm.vectors, 1)
        )

    def spreads(self, rows):
        """Whether a tile of so few rows is done sooner where all warps share each of them."""
        return rows * self.norm.vectors <= SPREAD_RUNS * self.product.warps

    @cute.jit
    def request_spread(self, source: cute.Tensor, stage: cute.Tensor, first, rows, warp, lane):
        """`request` of `rows` rows, their runs one after another dealt to the warps."""
        for run in cutlass.range(warp, rows * self.norm.vectors, self.product.warps, unroll=1):
            row, place = run // self.norm.vectors, run % self.norm.vectors
            self.norm.request_run(source[first + row, None], stage[row, None], place, lane)

    @cute.jit
    def sum_spread(self, stage: cute.Tensor, sums: cute.Tensor, rows, warp, lane):
        """Sums of squares of the runs that this warp has requested, behind `copy_async.wait`."""
        for run in cutlass.range(warp, rows * self.norm.vectors, self.product.warps, unroll=1):
            row, place = run // self.norm.vectors, run % self.norm.vectors
            squares = self.norm.run_squares(stage[row, None], place, lane)
            if lane == 0:
                sums[row, place] = squares

    @cute.jit
    def normalise_spread(
        self, stage: cute.Tensor, sums: cute.Tensor, weight: cute.Tensor, rows, warp, lane
    ):
        """Norms these runs in place, behind a barrier that all warps' sums lie ahead of."""
        for run in cutlass.range(warp, rows * self.norm.vectors, self.product.warps, unroll=1):
            row, place = run // self.norm.vectors, run % self.norm.vectors
            self.norm.normalise_run(stage[row, None], weight, sums[row, None], place, lane)

    @cute.jit
    def copy(self, stage: cute.Tensor, target: cute.Tensor, first, part, parts, warp, lane):
        """Stores this warp's rows whose number is `part` modulo `parts` into `target`."""
        for place in cutlass.range_constexpr(0, self.product.rows, self.product.warps):
            row = first + place + warp
            if row < target.shape[0] and row % parts == part:
                self.norm.copy(stage[place + warp, None], target[row, None], lane)
