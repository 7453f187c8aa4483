"""Sums and maxima over the lanes of a warp, and sums over a CTA."""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

WARP = cute.arch.WARP_SIZE
"""Lanes of a warp."""


def lanes_sum(value: Float32, lanes: int = WARP) -> Float32:
    """Sum over groups of `lanes` neighbouring lanes (a power of two), the same in each of them.

    All 32 lanes of the warp must call it together; the order of additions is fixed.
    """
    return cute.arch.warp_reduction_sum(value, threads_in_group=lanes)


def lanes_max(value: Float32, lanes: int = WARP) -> Float32:
    """Maximum over groups of `lanes` neighbouring lanes, the same in each; a NaN is ignored.

    All 32 lanes of the warp must call it together.
    """
    return cute.arch.warp_reduction_max(Float32(value), threads_in_group=lanes)


@cute.jit
def running_sum(value):
    """Sum over the lanes of a warp up to and including this one; all 32 call it together."""
    lane = cute.arch.lane_idx()
    distance = 1
    for _ in cutlass.range_constexpr(WARP.bit_length() - 1):
        other = cute.arch.shuffle_sync_up(value, distance, mask_and_clamp=0)
        if lane >= distance:
            value = value + other
        distance = 2 * distance
    return value


@cute.jit
def block_sum(value: Float32, partial: cute.Tensor) -> Float32:
    """Sum over all threads of the CTA, the same in each, added in the order of the warps.

    `partial` is FP32 shared memory with one element a warp; it must not be in use, and a second
    call with the same memory needs a barrier in between. All threads must call it together.
    """
    total = lanes_sum(value)
    warp = cute.arch.warp_idx()  # a shuffle inside: every lane must take part
    if cute.arch.lane_idx() == 0:
        partial[warp] = total
    cute.arch.sync_threads()
    return partial.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
