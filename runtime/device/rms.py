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
            self.request_run(row, target, run, lane)

    def request_run(self, row: cute.Tensor, target: cute.Tensor, run, lane) -> None:
        """`request` of one run of 32 vectors."""
        copy_async.copy(self._vector(row, run, lane), self._vector(target, run, lane))

    def normalise(self, row: cute.Tensor, weight: cute.Tensor, lane) -> None:
        """y in place of x: this lane's vectors of `row`, BF16; all lanes of the warp together."""
        total = Float32(0.0)
        for run in range(self.vectors):
            total = total + self.run_squares(row, run, lane)
        rr = self._factor(total)
        # The row is read again: kept in registers, it would drive weights out of them.
        cute.arch.sync_warp()
        for run in range(self.vectors):
            self._normalise_run(row, weight, run, lane, rr)

    def run_squares(self, row: cute.Tensor, run, lane) -> Float32:
        """The sum of squares of one run; all lanes of the warp together."""
        x = self._load(row, run, lane)
        return reduce.lanes_sum((x * x).reduce(cute.ReductionOp.ADD, Float32(0.0), 0))

    def normalise_run(
        self, row: cute.Tensor, weight: cute.Tensor, sums: cute.Tensor, run, lane
    ) -> None:
        """`normalise` of one run, with the `run_squares` of all runs of the row in `sums`."""
        total = Float32(0.0)
        for other in range(self.vectors):
            total = total + sums[other]
        self._normalise_run(row, weight, run, lane, self._factor(total))

    def copy(self, row: cute.Tensor, target: cute.Tensor, lane) -> None:
        """Stores this lane's vectors of `row` into `target`."""
        for run in range(self.vectors):
            self._vector(target, run, lane).store(self._vector(row, run, lane).load())

    def _factor(self, total: Float32) -> Float32:
        mean = total / Float32(self.width)
        return cute.math.rsqrt(mean + Float32(self.eps), fastmath=True)

    def _normalise_run(self, row: cute.Tensor, weight: cute.Tensor, run, lane, rr) -> None:
        y = (self._load(row, run, lane) * rr) * self._load(weight, run, lane)
        self._vector(row, run, lane).store(y.to(BFloat16))

    def _load(self, row: cute.Tensor, run, lane) -> cute.TensorSSA:
        return self._vector(row, run, lane).load().to(Float32)

    def _vector(self, row: cute.Tensor, run, lane) -> cute.Tensor:
        return memory.vector_at(row, lane + reduce.WARP * run, self.vector)
