"""Sums over parts of a row's keys, on their way through the shared memory of a cluster.

Columns go in windows of 16, QUAD columns a lane; CTA r of a cluster owns windows r * owned and
on, receives every CTA's sums of them and adds them in the order of the CTAs. Next to the sums
every CTA receives every CTA's maxima (what its sums refer to) and masses (sums of its weights).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, cute
from cutlass.memory import SmemAllocator

from . import barrier, inbox, memory, mma, scalar

WINDOW = 16
QUAD = 4
QUADS = WINDOW // QUAD

_FP32_BYTES = 4
_MASS_BYTES = 2 * _FP32_BYTES


def owned_windows(windows: int, splits: int) -> int:
    """Windows of a CTA; the last CTAs of a cluster may have fewer."""
    return -(-windows // splits)


def received_bytes(windows: int, splits: int, heads: int) -> int:
    """Shared memory of a CTA for what it receives."""
    sums = owned_windows(windows, splits) * WINDOW * _FP32_BYTES
    return splits * heads * (sums + _MASS_BYTES)


@dataclass(frozen=True)
class SplitSums:
    """sums: FP32 (source, window, head, column) of the owned windows. masses: FP32 (source, head,
    2), maximum and mass. arrived, weighed: the barriers that count the bytes of sums and masses.
    All in this CTA's shared memory; the same place in its peers' is theirs.
    """

    windows: int
    splits: int
    heads: int
    sums: cute.Tensor
    masses: cute.Tensor
    arrived: cute.Pointer
    weighed: cute.Pointer

    @classmethod
    def allocate(cls, shared: SmemAllocator, windows: int, splits: int, heads: int) -> SplitSums:
        """Room for `splits` CTAs' sums of `heads` rows of `windows` windows."""
        owned = owned_windows(windows, splits)
        return cls(
            windows=windows,
            splits=splits,
            heads=heads,
            sums=memory.allocate(shared, Float32, splits, owned, heads, WINDOW),
            masses=memory.allocate(shared, Float32, splits, heads, 2),
            arrived=barrier.allocate(shared, 1),
            weighed=barrier.allocate(shared, 1),
        )

    def expect(self, rank) -> None:
        """Sets up the barriers of CTA `rank`; one thread calls it ahead of the cluster's barrier.

        A CTA without windows still receives masses.
        """
        window_bytes = self.heads * WINDOW * _FP32_BYTES
        present = cutlass.max(self.present(rank), 0)
        inbox.open_inbox(self.arrived, present * window_bytes * self.splits)
        inbox.open_inbox(self.weighed, self.heads * _MASS_BYTES * self.splits)

    def wait(self) -> None:
        """Returns once all sums that this CTA merges have arrived."""
        inbox.receive(self.arrived)

    @property
    def owned(self) -> int:
        """Windows that this CTA has room for."""
        return owned_windows(self.windows, self.splits)

    def present(self, rank):
        """Windows that CTA `rank` owns; none or less for the last ones of some clusters."""
        return cutlass.min(self.owned, self.windows - rank * self.owned)

    def send_quad(self, values: list[Float32], rank, window, head, quad) -> None:
        """Sends this CTA's (`rank`) sums of QUAD columns to their owner."""
        row = self.sums[rank, window % self.owned, head, None]
        place = memory.vector_at(row, quad, QUAD)
        self._send(values, place, self.arrived, window // self.owned)

    @cute.jit
    def send_masses(self, masses: cute.Tensor, rank, thread, threads: cutlass.Constexpr):
        """Sends the maximum and mass of this CTA's (`rank`) weights of every head to every CTA.

        `masses` is FP32 (warp, head, 2), for TILE_M heads; the first `threads` threads call it.
        """
        head = thread % mma.TILE_M
        if head < self.heads:
            values = combine(masses, head)
            for target in cutlass.range(thread // mma.TILE_M, self.splits, threads // mma.TILE_M):
                self._send(values, self.masses[rank, head, None], self.weighed, target)

    def _send(
        self, values: list[Float32], place: cute.Tensor, barrier: cute.Pointer, target
    ) -> None:
        words = cute.make_rmem_tensor((len(values),), Float32)
        for number, value in enumerate(values):
            words[number] = value
        inbox.send(words.load(), place, barrier, target)

    def shares(self, head) -> tuple[list[Float32], Float32, Float32]:
        """(what each CTA's sums of a head are multiplied by, mass, maximum) of all CTAs.

        Waits for the masses. Without any key the maximum is -inf and the factors are NaN.
        """
        inbox.receive(self.weighed)
        highest = self.masses[0, head, 0]
        for source in range(1, self.splits):
            highest = cute.arch.fmax(highest, self.masses[source, head, 0])
        factors, mass = [], Float32(0.0)
        for source in range(self.splits):
            factors.append(cute.arch.exp2(self.masses[source, head, 0] - highest))
            mass = cute.math.fma(factors[source], self.masses[source, head, 1], mass)
        return factors, mass, highest

    def merge(self, window, head, quad, factors: list[Float32]) -> cute.TensorSSA:
        """FP32 sums of QUAD columns over all CTAs, whose sums have arrived."""
        merged = None
        for source, factor in enumerate(factors):
            part = memory.load_float(self.sums[source, window, head, None], quad, QUAD) * factor
            merged = part if merged is None else merged + part
        return merged


def combine(masses: cute.Tensor, head) -> list[Float32]:
    """Maximum and mass of a head over a CTA's warps, from their FP32 (warp, head, 2)."""
    warps = masses.shape[0]
    highest = masses[0, head, 0]
    for warp in range(1, warps):
        highest = cute.arch.fmax(highest, masses[warp, head, 0])
    mass = Float32(0.0)
    for warp in range(warps):
        share = cute.arch.exp2(masses[warp, head, 0] - highest) * masses[warp, head, 1]
        # A warp without keys has no maximum, and no mass to add.
        mass = mass + scalar.select(masses[warp, head, 1] == 0.0, Float32(0.0), share)
    return [highest, mass]
