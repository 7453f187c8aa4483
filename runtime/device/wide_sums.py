"""Sums over parts of a row's keys, as C fragments, on their way through a cluster's shared memory.

Tiles of 8 columns are shared out: CTA r of a cluster owns tiles r * owned and on, receives every
CTA's sums of them and adds them in the order of the CTAs. They travel and lie as the lanes hold
them, 16 bytes each, so that a warp's stores and loads are runs. Next to the sums every CTA
receives every CTA's maxima (what its sums refer to) and masses (sums of its weights).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, cute
from cutlass.memory import SmemAllocator

from . import barrier, inbox, mma, reduce, wgmma

HEADS = wgmma.ROWS
TILE = mma.TILE_N
_FP32_BYTES = 4
_FRAGMENT_BYTES = mma.FRAGMENT * _FP32_BYTES
TILE_BYTES = wgmma.WARPS * reduce.WARP * _FRAGMENT_BYTES
"""Of one CTA's sums of a tile."""
_MASS_BYTES = 2 * _FP32_BYTES


def owned_tiles(tiles: int, splits: int) -> int:
    """Tiles of a CTA; the last CTAs of a cluster may have fewer."""
    return -(-tiles // splits)


def received_bytes(tiles: int, splits: int) -> int:
    """Memory of the received sums."""
    return splits * owned_tiles(tiles, splits) * TILE_BYTES


def mass_bytes(splits: int) -> int:
    """Memory of the received masses."""
    return splits * HEADS * _MASS_BYTES


@dataclass(frozen=True)
class WideSums:
    """sums: FP32 (source, tile, warp, lane, element). masses: FP32 (source, head, 2), maximum and
    mass. arrived: the barrier that counts their bytes. All in this CTA's shared memory; the same
    place in its peers' is theirs.
    """

    tiles: int
    splits: int
    sums: cute.Tensor
    masses: cute.Tensor
    arrived: cute.Pointer

    @classmethod
    def over(
        cls,
        shared: SmemAllocator,
        tiles: int,
        splits: int,
        sums: cute.Pointer,
        masses: cute.Pointer,
    ) -> WideSums:
        """Lays them over memory whose first use is over before anything is sent."""
        owned = owned_tiles(tiles, splits)
        shape = (splits, owned, wgmma.WARPS, reduce.WARP, mma.FRAGMENT)
        return cls(
            tiles=tiles,
            splits=splits,
            sums=_row_major(sums, shape),
            masses=_row_major(masses, (splits, HEADS, 2)),
            arrived=barrier.allocate(shared, 1),
        )

    @property
    def owned(self) -> int:
        """Tiles that this CTA has room for."""
        return owned_tiles(self.tiles, self.splits)

    def present(self, rank):
        """Tiles that CTA `rank` owns; none or less for the last ones of some clusters."""
        return cutlass.min(self.owned, self.tiles - rank * self.owned)

    def expect(self, rank) -> None:
        """Sets up the barrier of CTA `rank`; one thread calls it ahead of the cluster's barrier."""
        present = cutlass.max(self.present(rank), 0)
        size = present * (TILE_BYTES * self.splits) + mass_bytes(self.splits)
        inbox.open_inbox(self.arrived, size)

    def wait(self) -> None:
        """Returns once all that this CTA merges has arrived."""
        inbox.receive(self.arrived)

    @cute.jit
    def send_masses(self, highest: cute.Tensor, mass: cute.Tensor, rank, warp, lane):
        """Sends a scoring warp's maxima and masses, (side), from CTA `rank` to every CTA.

        The lanes of a quad hold the same ones; each sends to a quarter of the CTAs.
        """
        group, group_lane = mma.fragment_place(lane)
        for side in cutlass.range_constexpr(mma.TILE_M // mma.HALF_M):
            head = warp * mma.TILE_M + group + side * mma.HALF_M
            for target in cutlass.range(group_lane, self.splits, mma.GROUP_LANES):
                self.send_mass(highest[side], mass[side], rank, head, target)

    def send_mass(self, highest: Float32, mass: Float32, rank, head, target) -> None:
        """Sends the maximum and mass of a head's weights from CTA `rank` to CTA `target`."""
        self._send(self.masses[rank, head, None], [highest, mass], target)

    def send(self, total: cute.Tensor, rank, warp, lane) -> None:
        """Sends the C fragments of a warp's tiles from CTA `rank` to the owners of the tiles."""
        tiles = cute.size(total) // mma.FRAGMENT
        first = warp // wgmma.WARPS * tiles
        for place in range(tiles):
            values = [total[place * mma.FRAGMENT + element] for element in range(mma.FRAGMENT)]
            tile = first + place
            target = self.sums[rank, tile % self.owned, warp % wgmma.WARPS, lane, None]
            self._send(target, values, tile // self.owned)

    def _send(self, place: cute.Tensor, values: list[Float32], target) -> None:
        vector = cute.make_rmem_tensor((len(values),), Float32)
        for index, value in enumerate(values):
            vector[index] = value
        inbox.send(vector.load(), place, self.arrived, target)

    def shares(self, head) -> tuple[list[Float32], Float32, Float32]:
        """(factor a CTA, mass, maximum) of a head over all CTAs; every CTA's have arrived.

        Without any key the maximum is -inf and the factors are NaN.
        """
        highest = self.masses[0, head, 0]
        for source in range(1, self.splits):
            highest = cute.arch.fmax(highest, self.masses[source, head, 0])
        mass, factors = Float32(0.0), []
        for source in range(self.splits):
            factors.append(cute.arch.exp2(self.masses[source, head, 0] - highest))
            mass = cute.math.fma(factors[-1], self.masses[source, head, 1], mass)
        return factors, mass, highest

    def merge(self, factors: list, tile, warp, lane) -> list[Float32]:
        """The lane's fragment of an owned tile over all CTAs; a list of factors a side."""
        merged = [Float32(0.0)] * mma.FRAGMENT
        for source in range(self.splits):
            part = self.sums[source, tile, warp, lane, None].load()
            merged = [
                cute.math.fma(part[place], factors[place // 2][source], merged[place])
                for place in range(mma.FRAGMENT)
            ]
        return merged


def _row_major(pointer: cute.Pointer, shape: tuple[int, ...]) -> cute.Tensor:
    layout = cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape)))))
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Float32), layout)
