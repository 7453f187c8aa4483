"""Results of the wide core: C fragments of sums, divided by their mass and stored as BF16.

Lane t of the quad that holds rows g and g + 8 of a warp's 16 heads has columns 2 t and 2 t + 1 of
every tile of 8 columns. A CTA that works alone trades them for 16 bytes a lane; what was merged is
stored as it lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float32, Uint32, cute

from . import half, memory, mma, quads, scalar, wgmma, wide_softmax
from .wide_sums import WideSums


@dataclass(frozen=True)
class WideResults:
    """Where the results of a row's tile of heads go.

    heads: of all tiles; first_head: of this one. first_tile: of these columns, whose sums hold the
    tiles from it on. result: BF16 (head, column). lse: FP32 (head), or
    None. count: keys of the row; without any, results are exactly 0 and the LSE is -inf. key_scale:
    what all sums are to be multiplied by.
    """

    heads: int
    first_head: cutlass.Int32
    first_tile: cutlass.Int32
    result: cute.Tensor
    lse: cute.Tensor | None
    count: cutlass.Int32
    key_scale: Float32

    def _places(self, warp, lane) -> list:
        """Heads of the lane's two rows, among those of the tile."""
        first = warp % wgmma.WARPS * mma.TILE_M + mma.fragment_place(lane)[0]
        return [first + side * mma.HALF_M for side in range(wide_softmax.SIDES)]

    def _target(self, head) -> cute.Tensor:
        """Results of a head; those past the end repeat the last one."""
        return self.result[cutlass.min(head, self.heads - 1), None]

    @cute.jit
    def store(self, total: cute.Tensor, masses: cute.Tensor, warp, lane):
        """Stores the fragments `total` of a warp whose CTA works alone.

        `masses`: FP32 (head, 2 or more), the maxima and masses.
        """
        group_lane = lane % mma.GROUP_LANES
        tiles = cute.size(total) // mma.FRAGMENT
        first_tile = self.first_tile + warp // wgmma.WARPS * tiles
        places = self._places(warp, lane)
        for side in cutlass.range_constexpr(wide_softmax.SIDES):
            head = self.first_head + places[side]
            target = self._target(head)
            highest, mass = masses[places[side], 0], masses[places[side], 1]
            factor = self.key_scale / mass
            for tile in cutlass.range_constexpr(0, tiles, mma.GROUP_LANES):
                # Each lane of a quad gets the eight columns of one of four tiles.
                words = []
                for place in cutlass.range_constexpr(mma.GROUP_LANES):
                    first = (tile + place) * mma.FRAGMENT + 2 * side
                    pair = total[first] * factor, total[first + 1] * factor
                    words.append(scalar.choose(self.count > 0, half.pack_bf16(*pair), Uint32(0)))
                words = quads.transposed(words, group_lane)
                if head < self.heads:
                    column_tile = first_tile + tile + group_lane
                    vector = memory.vector_at(target, column_tile, memory.BF16_VECTOR)
                    memory.store_words(cute.recast_tensor(vector, Uint32), words)
            if warp < wgmma.WARPS and self.first_tile == 0:
                self._store_lse(head, mass, highest, lane)

    @cute.jit
    def merge(self, sums: WideSums, rank, warps: int, warp, lane):
        """Merges and stores the tiles that CTA `rank` owns, shared among `warps` warps."""
        places = self._places(warp, lane)
        shares = [sums.shares(place) for place in places]
        factors = [
            [factor * (self.key_scale / mass) for factor in parts] for parts, mass, _ in shares
        ]
        groups = warps // wgmma.WARPS
        for tile in cutlass.range(warp // wgmma.WARPS, sums.present(rank), groups, unroll=1):
            owned_tile = rank * sums.owned + tile
            merged = sums.merge(factors, owned_tile, warp % wgmma.WARPS, lane)
            for side in cutlass.range_constexpr(wide_softmax.SIDES):
                values = merged[2 * side : 2 * side + 2]
                self._store_pair(places[side], self.first_tile + owned_tile, values, lane)
        if rank == 0 and warp < wgmma.WARPS and self.first_tile == 0:
            for side in cutlass.range_constexpr(wide_softmax.SIDES):
                _, mass, highest = shares[side]
                self._store_lse(self.first_head + places[side], mass, highest, lane)

    @cute.jit
    def _store_pair(self, place, tile, values: list, lane):
        """Stores the lane's two columns of a tile."""
        head = self.first_head + place
        target = self._target(head)
        pair = cute.make_rmem_tensor((2,), Float32)
        for index in cutlass.range_constexpr(2):
            pair[index] = scalar.select(self.count > 0, values[index], Float32(0.0))
        if head < self.heads:
            column = tile * (mma.TILE_N // 2) + lane % mma.GROUP_LANES
            memory.vector_at(target, column, 2).store(pair.load().to(BFloat16))

    @cute.jit
    def _store_lse(self, head, mass, highest, lane):
        """Stores the LSE of a head where it is wanted, one lane a row."""
        if cutlass.const_expr(self.lse is not None):
            value = cute.math.log2(mass) + highest
            if head < self.heads and lane % mma.GROUP_LANES == 0:
                self.lse[head] = scalar.select(self.count > 0, value, -Float32.inf)
