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

    @cute.jit
    def copy(self, stage: cute.Tensor, target: cute.Tensor, first, part, parts, warp, lane):
        """Stores this warp's rows whose number is `part` modulo `parts` into `target`."""
        for place in cutlass.range_constexpr(0, self.product.rows, self.product.warps):
            row = first + place + warp
            if row < target.shape[0] and row % parts == part:
                self.norm.copy(stage[place + warp, None], target[row, None], lane)
