"""RMS norm of a row by one warp, with the bits that a CTA of a warp per 256 elements gives.

    y = BF16((x * rsqrt(sum(x * x) / n + eps)) * weight)

FP32: the sum of each vector in its order, the lanes of a run of 32 vectors by halves, the runs in
their order; division to nearest, fast rsqrt, two products in this order. `rms_norm` adds in the
same order, so whoever normalises a row gets the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import BFloat16, Float32, cute

from . import copy_async, memory, reduce


@dataclass(frozen=True)
class RmsNorm:
    """Norm over `width` elements; `eps` is added to the mean square.

    vector: neighbouring elements of a lane, as wide as every row allows; 32 of them divide width.
    """

    width: int
    eps: float
    vector: int

    @property
    def vectors(self) -> int:
        """Vectors of a lane: number `lane` of each run of 32."""
        return self.width // reduce.WARP // self.vector

    def request(self, row: cute.Tensor, target: cute.Tensor, lane) -> None:
        """Requests this lane's vectors of a row into shared memory; see copy_async."""
        for run in range(self.vectors):
            copy_async.copy(self._vector(row, run, lane), self._vector(target, run, lane))

    def normalise(self, row: cute.Tensor, weight: cute.Tensor, lane) -> None:
        """y in place of x: this lane's vectors of `row`, BF16; all lanes of the warp together."""
        total = Float32(0.0)
        for run in range(self.vectors):
            x = self._load(row, run, lane)
            squares = (x * x).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            total = total + reduce.lanes_sum(squares)
        rr = cute.math.rsqrt(total / Float32(self.width) + Float32(self.eps), fastmath=True)
        # The row is read again: kept in registers, it would drive weights out of them.
        cute.arch.sync_warp()
        for run in range(self.vectors):
            y = (self._load(row, run, lane) * rr) * self._load(weight, run, lane)
            self._vector(row, run, lane).store(y.to(BFloat16))

    def copy(self, row: cute.Tensor, target: cute.Tensor, lane) -> None:
        """Stores this lane's vectors of `row` into `target`."""
        for run in range(self.vectors):
            self._vector(target, run, lane).store(self._vector(row, run, lane).load())

    def _load(self, row: cute.Tensor, run: int, lane) -> cute.TensorSSA:
        return self._vector(row, run, lane).load().to(Float32)

    def _vector(self, row: cute.Tensor, run: int, lane) -> cute.Tensor:
        return memory.vector_at(row, lane + reduce.WARP * run, self.vector)
