"""Sums, maxima and running sums over the lanes of a warp, and sums over a CTA."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, cute

from . import scalar

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


def lanes_exchange(
    first: Float32, second: Float32, wants_second: Boolean, distance: int
) -> Float32:
    """The one of two values that this lane wants, its own part and its partner's added.

    Lanes `distance` apart (a power of two) are partners; they want different ones. Half the
    shuffles of two sums over the pair. All 32 lanes of the warp must call it together.
    """
    kept = scalar.select(wants_second, second, first)
    given = scalar.select(wants_second, first, second)
    return kept + cute.arch.shuffle_sync_bfly(given, distance)


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
