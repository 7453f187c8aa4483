"""AttnRes of a row: a softmax mixture of its vectors, and the mixture's RMS norm.

    share = softmax over i of (v_i . query) * rsqrt(mean(v_i * v_i) + eps)
    mix   = sum of share_i v_i, which may be rounded to BF16
    y     = (mix * rsqrt(mean(mix * mix) + eps)) * weight

The vectors are the saved blocks, any number up to MOST_SAVED, and the residual stream in the last
place; a block that is not there is zero and has no share. A row lies in the registers of a cluster
of `parts` CTAs, VECTOR columns a thread. One exchange between them is enough: it carries all dots,
and mean(mix * mix) is a quadratic form of the dots of pairs. Only a mixture that is rounded has to
be squared itself.

FP32: a thread's columns in their order, lanes by halves, warps and CTAs in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Float32, Uint32, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.metadata import MOST_SAVED

from . import cluster, memory, reduce, scalar

VECTOR = memory.BF16_VECTOR
"""Columns of a thread."""
VECTORS = MOST_SAVED + 1
"""Vectors of a row: the saved blocks, then the stream."""
PAIRS = [(one, other) for one in range(VECTORS) for other in range(one + 1)]
DOTS = VECTORS + len(PAIRS)
"""Dots with the query, then those of pairs; behind them the square of a rounded mixture."""
_LOG2_E = 1.4426950408889634


class Shared(NamedTuple):
    """Shared memory of a CTA, FP32. Two turns of `parts`: peers may be a row ahead."""

    warps: cute.Tensor  # (warp, dot)
    parts: cute.Tensor  # (turn * part * dot), flat: peers write into it
    totals: cute.Tensor  # (dot)


@dataclass(frozen=True)
class AttnRes:
    """AttnRes of rows of `width` columns; `eps` is added to every mean square.

    rounds: the mixture is rounded to BF16 ahead of its norm.
    """

    width: int
    eps: float
    rounds: bool = False

    @property
    def parts(self) -> int:
        """CTAs of a row's cluster: as many as give each whole warps; 0 where none do."""
        warps = self.width // VECTOR // reduce.WARP
        if self.width % (VECTOR * reduce.WARP):
            return 0
        return max(n for n in range(1, cluster.MAX_PORTABLE + 1) if warps % n == 0)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.width // VECTOR // self.parts

    def allocate(self) -> Shared:
        """Shared memory of a CTA; the cluster has to meet before the first row."""
        shared, columns = SmemAllocator(), DOTS + 1
        return Shared(
            memory.allocate(shared, Float32, self.threads // reduce.WARP, columns),
            memory.allocate(shared, Uint32, 2 * self.parts * columns),
            memory.allocate(shared, Float32, columns),
        )

    @cute.jit
    def mixed(self, vectors, query, weight, saved, shared: Shared, thread, part, turn):
        """y in this thread's columns, FP32; all threads of the cluster together.

        `vectors` are VECTORS lists of VECTOR columns, `saved` of them are blocks; `turn` is 0 and 1
        in turns.
        """
        dots = [_dot(vector, query) for vector in vectors]
        dots += [_dot(vectors[one], vectors[other]) for one, other in PAIRS]
        self._sum(dots, 0, shared, thread, part, turn)
        shares, square = self._shares(shared.totals, saved)
        mix = [Float32(0.0) for _ in range(VECTOR)]
        for number in cutlass.range_constexpr(VECTORS):
            vector = vectors[number]
            mix = [cute.math.fma(shares[number], x, m) for x, m in zip(vector, mix, strict=True)]
        if cutlass.const_expr(self.rounds):
            mix = [value.to(cutlass.BFloat16).to(Float32) for value in mix]
            self._sum([_dot(mix, mix)], DOTS, shared, thread, part, turn)
            square = shared.totals[DOTS]
        scale = self._rsqrt_mean(square)
        return [value * scale * factor for value, factor in zip(mix, weight, strict=True)]

    @cute.jit
    def _sum(self, values, first: cutlass.Constexpr, shared: Shared, thread, part, turn):
        """Sums over the row's threads into `totals`, from place `first` on."""
        columns = DOTS + 1
        warp, lane = thread // reduce.WARP, thread % reduce.WARP
        sums = [reduce.lanes_sum(value) for value in values]
        if lane == 0:
            for number in cutlass.range_constexpr(len(values)):
                shared.warps[warp, first + number] = sums[number]
        cute.arch.sync_threads()
        for place in cutlass.range(first + thread, first + len(values), self.threads, unroll=1):
            total = Float32(0.0)
            for one in cutlass.range_constexpr(self.threads // reduce.WARP):
                total = total + shared.warps[one, place]
            target = (turn * self.parts + part) * columns + place
            for peer in cutlass.range_constexpr(self.parts):
                cluster.store(shared.parts, target, total.bitcast(Uint32), peer)
        cluster.meet(self.parts)
        for place in cutlass.range(first + thread, first + len(values), self.threads, unroll=1):
            total = Float32(0.0)
            for one in cutlass.range_constexpr(self.parts):
                source = (turn * self.parts + one) * columns + place
                total = total + shared.parts[source].bitcast(Float32)
            shared.totals[place] = total
        cute.arch.sync_threads()

    def _shares(self, totals: cute.Tensor, saved) -> tuple[list[Float32], Float32]:
        """The vectors' shares, and the square of their mixture."""
        pairs = {pair: totals[VECTORS + place] for place, pair in enumerate(PAIRS)}
        powers = []
        for number in range(VECTORS):
            logit = totals[number] * self._rsqrt_mean(pairs[number, number])
            if number < MOST_SAVED:
                logit = scalar.select(number < saved, logit, -Float32.inf)
            powers.append(logit * Float32(_LOG2_E))
        top = powers[0]
        for power in powers[1:]:
            top = cute.arch.fmax(top, power)
        weights = [cute.math.exp2(power - top, fastmath=True) for power in powers]
        total = weights[0]
        for weight in weights[1:]:
            total = total + weight
        shares = [weight / total for weight in weights]
        square = Float32(0.0)
        for (one, other), dot in pairs.items():
            times = Float32(1.0 if one == other else 2.0)
            square = square + times * shares[one] * shares[other] * dot
        return shares, cute.arch.fmax(square, Float32(0.0))

    def _rsqrt_mean(self, square: Float32) -> Float32:
        """1 / sqrt(square / width + eps)."""
        mean = square * Float32(1.0 / self.width)
        return cute.math.rsqrt(mean + Float32(self.eps), fastmath=True)


def _dot(one: list[Float32], other: list[Float32]) -> Float32:
    """Sum of products over a thread's columns, in their order."""
    total = one[0] * other[0]
    for x, y in zip(one[1:], other[1:], strict=True):
        total = cute.math.fma(x, y, total)
    return total
