"""Sums over parts of a row's keys, as C fragments, merged across a cluster's shared memory.

Every CTA lays its sums down as its lanes hold them, 16 bytes each, so that a warp's stores and
loads are runs; next to them lie its maxima (what the sums refer to) and masses (sums of its
weights). Tiles of 8 columns are shared out: CTA r of a cluster owns tiles r * owned and on, loads
every CTA's sums of them and adds them in the order of the CTAs. Loads, because stores that count
their bytes on a barrier (st.async) pass between SMs at a fraction of that rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, cute

from . import cluster, mma, reduce, wgmma

TILE = mma.TILE_N
_FP32_BYTES = 4
TILE_BYTES = wgmma.WARPS * reduce.WARP * mma.FRAGMENT * _FP32_BYTES
"""Of one CTA's sums of a tile."""


def owned_tiles(tiles: int, splits: int) -> int:
    """Tiles of a CTA; the last CTAs of a cluster may have fewer."""
    return -(-tiles // splits)


@dataclass(frozen=True)
class WideSums:
    """sums: FP32 (tile, warp, lane, element). masses: FP32 (head, 2 or more), maximum and mass.

    Both in this CTA's shared memory; the same place in its peers' holds theirs.
    """

    tiles: int
    splits: int
    sums: cute.Tensor
    masses: cute.Tensor

    @classmethod
    def over(cls, tiles: int, splits: int, sums: cute.Pointer, masses: cute.Tensor) -> WideSums:
        """Lays the sums over memory whose first use is over before they are stored."""
        shape = (tiles, wgmma.WARPS, reduce.WARP, mma.FRAGMENT)
        layout = cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape)))))
        memory = cute.make_tensor(cute.recast_ptr(sums, dtype=Float32), layout)
        return cls(tiles=tiles, splits=splits, sums=memory, masses=masses)

    @property
    def owned(self) -> int:
        """Tiles of a CTA, but for the last ones."""
        return owned_tiles(self.tiles, self.splits)

    def present(self, rank):
        """Tiles that CTA `rank` owns; none or less for the last ones of some clusters."""
        return cutlass.min(self.owned, self.tiles - rank * self.owned)

    def store(self, total: cute.Tensor, warp, lane) -> None:
        """Stores the C fragments of a warp's tiles; a barrier of the cluster follows."""
        tiles = cute.size(total) // mma.FRAGMENT
        first = warp // wgmma.WARPS * tiles
        for place in range(tiles):
            vector = cute.make_rmem_tensor((mma.FRAGMENT,), Float32)
            for element in range(mma.FRAGMENT):
                vector[element] = total[place * mma.FRAGMENT + element]
            self.sums[first + place, warp % wgmma.WARPS, lane, None].store(vector.load())

    def shares(self, head) -> tuple[list[Float32], Float32, Float32]:
        """(factor a CTA, mass, maximum) of a head over all CTAs, behind their barrier.

        Without any key the maximum is -inf and the factors are NaN.
        """
        place = self.masses[head, None]
        pairs = [cluster.load_floats(place, 2, source) for source in range(self.splits)]
        highest = pairs[0][0]
        for top, _ in pairs[1:]:
            highest = cute.arch.fmax(highest, top)
        mass, factors = Float32(0.0), []
        for top, part in pairs:
            factors.append(cute.arch.exp2(top - highest))
            mass = cute.math.fma(factors[-1], part, mass)
        return factors, mass, highest

    def merge(self, factors: list, tile, warp, lane) -> list[Float32]:
        """The lane's fragment of a tile over all CTAs; a list of factors a side."""
        place = self.sums[tile, warp, lane, None]
        parts = [cluster.load_floats(place, mma.FRAGMENT, cta) for cta in range(self.splits)]
        merged = [Float32(0.0)] * mma.FRAGMENT
        for source, part in enumerate(parts):
            merged = [
                cute.math.fma(part[element], factors[element // 2][source], merged[element])
                for element in range(mma.FRAGMENT)
            ]
        return merged
