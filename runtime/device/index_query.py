"""The quantised index query of one head, by a cluster of CTAs.

    q     = q_c . W^T                                  FP32, not rounded
    s     = power of two at or above max(amax(q), 1e-4) / 448, over the head
    codes = E4M3(q / s)

Every CTA owns outputs / cluster rows of W. The largest magnitude of its share goes to all CTAs of
the cluster, into the place of the sender: the inbox of a CTA holds one FP32 a row and sender.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, cute

from . import fp8, inbox, memory, mma, reduce
from .index_row import largest
from .split_product import MAX_WEIGHT_REGISTERS, SplitProduct

WIDTH = 4
"""Neighbouring outputs of a thread: a store of 4 bytes of E4M3."""
FP32_BYTES = 4


def shares(columns: int, outputs: int, held: int) -> tuple[int, ...]:
    """Rows of W that a CTA may have: a head's by a power of two, as far as registers hold what they
    have to hold of them, `held` rows at most."""
    parts = (part for part in (8, 4, 2, 1) if outputs % (part * mma.TILE_N) == 0)
    return tuple(
        outputs // part
        for part in parts
        if SplitProduct(columns, min(outputs // part, held)).weight_registers
        <= MAX_WEIGHT_REGISTERS
    )


@dataclass(frozen=True)
class IndexQuery:
    """A head of `outputs` rows of W over `columns` columns; a CTA has `share` of the rows.

    share: a multiple of 8 whose eighth is a power of two. rows: of its SplitProduct.
    held: rows of W of a CTA that registers hold at most, a multiple of 8; None for all.
    """

    columns: int
    outputs: int
    share: int
    rows: int = mma.TILE_M
    held: int | None = None

    @property
    def cluster(self) -> int:
        """CTAs of a head."""
        return self.outputs // self.share

    @property
    def staged(self) -> int:
        """Rows of W of a CTA that wait in shared memory."""
        return 0 if self.held is None else max(self.share - self.held, 0)

    @property
    def product(self) -> SplitProduct:
        """A CTA's share of W."""
        return SplitProduct(self.columns, self.share, self.rows, self.staged)

    @property
    def pieces(self) -> int:
        """Threads of a row."""
        return self.share // WIDTH

    def sums_layout(self, tokens: int) -> cute.Layout:
        """(token, output) of a CTA, FP32."""
        return cute.make_layout((tokens, self.share), stride=(self.share, 1))

    def inbox_layout(self, tokens: int) -> cute.Layout:
        """(token, sender), FP32."""
        return cute.make_layout((tokens, self.cluster), stride=(self.cluster, 1))

    def inbox_bytes(self, rows):
        """Bytes that come for so many rows."""
        return rows * (self.cluster * FP32_BYTES)

    @cute.jit
    def share_largest(
        self,
        partial: cute.Tensor,
        sums: cute.Tensor,
        amax: cute.Tensor,
        barrier: cute.Pointer,
        tile,
        rows,
        part,
        thread,
    ):
        """Keeps the outputs of a tile in `sums` and sends the largest of every row to all CTAs.

        partial: sums of `product`. rows: of all tiles. The barrier is that of the inbox `amax`.
        """
        items = self.rows * self.pieces
        for before in cutlass.range_constexpr(0, items, self.product.warps * reduce.WARP):
            item = before + thread
            place, piece = item // self.pieces, item % self.pieces
            row = tile * self.rows + place
            if item < items:
                values = self.product.sums(partial, place, piece, WIDTH)
                magnitude = largest(values, self.pieces)
                memory.vector_at(sums[row, None], piece, WIDTH).store(values)
                if piece < self.cluster and row < rows:
                    word = cute.make_rmem_tensor((1,), Float32)
                    word[0] = magnitude
                    target = memory.vector_at(amax[row, None], part, 1)
                    for cta in cutlass.range_constexpr(self.cluster):
                        if piece == cta % self.pieces:
                            inbox.send(word.load(), target, barrier, cta)

    @cute.jit
    def quantise(
        self, sums: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, row, piece, part
    ) -> Float32:
        """Stores one thread's codes of a row, of which `codes` has the head; returns the scale."""
        magnitude = amax[row, None].load().reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
        scale = fp8.power_of_two_scale(magnitude)
        values = memory.load_float(sums[row, None], piece, WIDTH)
        target = memory.vector_at(codes, part * self.pieces + piece, WIDTH)
        fp8.store_e4m3(values * fp8.inverse_of_power_of_two(scale), target)
        return scale
