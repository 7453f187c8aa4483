"""The attention query of one head, by a cluster of CTAs.

    full     = BF16(q_c . Q_B^T)                     nope values, then pe values
    absorbed = BF16(full[:nope] . W_UK)              both with FP32 accumulation
    query    = absorbed | full[nope:], as it is or as E4M3 of value * q_scale_inv

Every CTA owns outputs / cluster rows of Q_B and kv_lora / cluster columns of W_UK. The nope values
travel between the CTAs: every CTA has an inbox for those of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import cutlass
from cutlass import BFloat16, Float32, cute

from . import bulk, cluster, fp8, inbox, memory, mma, reduce
from .split_product import SplitProduct, row_pitch

BF16_BYTES = 2


WIDTH = 4
"""Neighbouring outputs of a thread: a store of 8 bytes, or of 4 bytes of E4M3."""
HELD_REGISTERS = 120
"""Of a thread, for rows of Q_B: a CTA has a multiprocessor's to itself."""
BANK_PAD = 8
"""BF16 behind a row of W_UK: eight rows then begin in different banks."""


@dataclass(frozen=True)
class HeadQuery:
    """Dimensions of a head; all of them multiples of 32, or 16 for `pe`.

    q_lora: elements of a row of Q_B. nope, pe: rows of Q_B of a head. kv_lora: columns of W_UK.
    parts:  CTAs of a head at most. Rows of Q_B that are too many for a CTA's registers wait in
            shared memory.
    """

    q_lora: int
    nope: int
    pe: int
    kv_lora: int
    parts: int = cluster.MAX_PORTABLE

    @property
    def cluster(self) -> int:
        """CTAs of a head: every one gets whole tiles of Q_B and at least 64 columns of W_UK."""
        return gcd((self.nope + self.pe) // mma.TILE_N, self.kv_lora // 64, self.parts)

    @property
    def product(self) -> SplitProduct:
        """A CTA's share of Q_B."""
        outputs = (self.nope + self.pe) // self.cluster
        return SplitProduct(self.q_lora, outputs).within_registers(HELD_REGISTERS)

    @property
    def latents(self) -> int:
        """A CTA's columns of W_UK."""
        return self.kv_lora // self.cluster

    @property
    def threads(self) -> int:
        """Threads of a CTA that work on the query."""
        return self.product.warps * reduce.WARP

    def w_uk_layout(self) -> cute.Layout:
        """A CTA's share of W_UK: (row in the order of `mma.slice_row`, column)."""
        return cute.make_layout((self.nope, self.latents), stride=(self.latents + BANK_PAD, 1))

    def inbox_bytes(self, rows):
        """Bytes of the nope values of so many rows."""
        return rows * (self.nope * BF16_BYTES)

    def nope_layout(self, tokens: int) -> cute.Layout:
        """(token, nope value) of a head, BF16."""
        return cute.make_layout((tokens, self.nope), stride=(row_pitch(self.nope), 1))

    def shared_bytes(self, tokens: int, stages: int) -> int:
        """Shared memory of a CTA for so many rows, of which `stages` tiles are there at a time."""
        product = self.product
        rows = (stages * product.rows + product.staged) * product.pitch
        rows += tokens * row_pitch(self.nope)
        weights = self.nope * (self.latents + BANK_PAD) + self.q_lora  # W_UK and a norm's
        return product.partial_bytes + (rows + weights) * BF16_BYTES

    @property
    def w_uk_bytes(self) -> int:
        """Bytes of a CTA's share of W_UK."""
        return self.nope * self.latents * BF16_BYTES

    def request_w_uk(self, w_uk: cute.Tensor, part, target: cute.Tensor, barrier, lane) -> None:
        """Requests this CTA's columns of a head's W_UK, [nope, kv_lora]; a whole warp together."""
        for first in range(0, self.nope, reduce.WARP):
            row = first + lane
            source = cute.local_tile(w_uk[row, None], (self.latents,), (part,))
            place = cute.local_tile(target[mma.slice_row(row), None], (self.latents,), (0,))
            bulk.copy_run(source, place, barrier, once=True)

    @cute.jit
    def share(
        self,
        partial: cute.Tensor,
        nope: cute.Tensor,
        barrier: cute.Pointer,
        query: cute.Tensor,
        first,
        part,
        thread,
        q_scale_inv: Float32,
    ):
        """Rounds the outputs of one tile; nope values go to all CTAs, pe values to memory.

        partial: sums of `product`. nope: [TILE_M, nope] of the tile, in the inbox of `barrier`.
        query: this head's [rows, kv_lora + pe], of which the tile has the rows from `first` on.
        """
        pieces = self.product.outputs // WIDTH
        for before in cutlass.range_constexpr(0, mma.TILE_M * pieces, self.threads):
            row, piece = (before + thread) // pieces, (before + thread) % pieces
            if row < cutlass.min(query.shape[0] - first, mma.TILE_M):
                values = self.product.sums(partial, row, piece, WIDTH).to(BFloat16)
                place = part * pieces + piece
                if place < self.nope // WIDTH:
                    target = memory.vector_at(nope[row, None], place, WIDTH)
                    for cta in cutlass.range_constexpr(self.cluster):
                        inbox.send(values, target, barrier, cta)
                else:
                    place += (self.kv_lora - self.nope) // WIDTH
                    target = memory.vector_at(query[first + row, None], place, WIDTH)
                    self._store(values.to(Float32), target, q_scale_inv)

    def load_w_uk(self, w_uk: cute.Tensor, warp, lane) -> list[list]:
        """The words of this warp's tiles of columns: [tile][slice]."""
        return [
            [
                mma.load_columns(
                    cute.local_tile(w_uk, (mma.K_SLICE, mma.TILE_N), (step, tile)), lane
                )
                for step in range(self.nope // mma.K_SLICE)
            ]
            for tile in self._tiles(warp)
        ]

    @cute.jit
    def absorb(
        self,
        nope: cute.Tensor,
        w_uk: list,
        query: cute.Tensor,
        first,
        part,
        warp,
        lane,
        q_scale_inv: Float32,
    ):
        """Multiplies one tile of nope values with this warp's columns and stores the products.

        nope: [TILE_M, nope]. w_uk: of `load_w_uk`. query: as in `share`.
        """
        group, group_lane = mma.fragment_place(lane)
        sums = self._products(nope, w_uk, group, group_lane)
        tiles = self._tiles(warp)
        for number in cutlass.range_constexpr(len(tiles)):
            column = part * (self.latents // mma.TILE_N) + tiles[number]
            place = column * (mma.TILE_N // 2) + group_lane
            for half in cutlass.range_constexpr(2):
                row = first + group + half * mma.HALF_M
                values = mma.pair(sums[number], half).to(BFloat16).to(Float32)
                if row < query.shape[0]:
                    self._store(values, memory.vector_at(query[row, None], place, 2), q_scale_inv)

    def _tiles(self, warp) -> list:
        count = self.latents // mma.TILE_N // self.product.warps
        return [warp * count + number for number in range(count)]

    def _products(self, nope: cute.Tensor, w_uk: list, group, group_lane) -> list[list]:
        """Sums of every tile; even and odd slices are added up apart, then together."""
        slices = range(self.nope // mma.K_SLICE)
        rows = nope[group, None], nope[group + mma.HALF_M, None]
        words = [
            [memory.load_words(row, step * mma.GROUP_LANES + group_lane) for step in slices]
            for row in rows
        ]
        sums = []
        for tile in w_uk:
            chains = [mma.zero_accumulator(), mma.zero_accumulator()]
            for step in slices:
                chain = chains[step % 2]
                chains[step % 2] = mma.mma_slice(words[0][step], words[1][step], tile[step], chain)
            sums.append([one + other for one, other in zip(*chains, strict=True)])
        return sums

    def _store(self, values: cute.TensorSSA, target: cute.Tensor, q_scale_inv: Float32) -> None:
        """Stores FP32 `values` of BF16 precision as the query's dtype, which `target` has."""
        if target.element_type is BFloat16:
            target.store(values.to(BFloat16))
        else:
            fp8.store_e4m3(values * q_scale_inv, target)
