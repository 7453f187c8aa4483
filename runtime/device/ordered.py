"""Integers that compare as scores do, the best score the smallest: +0 above -0, NaN as -inf."""

from __future__ import annotations

from cutlass import Float32, Int32, Uint32, cute
from cutlass.cute.arch import inline_ptx

INFINITY = float("inf")
MAGNITUDE = 2**31 - 1
HALF_MAGNITUDES = 0x7FFF7FFF


def number(score: Float32) -> Float32:
    """The score, -inf for a NaN."""
    return cute.arch.fmax(score, Float32(-INFINITY))  # of two, the number


def descending(score: Float32) -> Uint32:
    """32 bits that are the smaller, the better the score."""
    bits = number(score).bitcast(Int32)
    return Uint32(bits ^ (~(bits >> 31) & Int32(MAGNITUDE)))


def descending_halves(low: Float32, high: Float32) -> Uint32:
    """Two scores cut to FP16 (towards zero), each as 16 bits that order as `descending`.

    Weakly: scores that differ may get equal bits, but never bits in the other order. What lies
    beyond the range of FP16 shares the outermost bits. 0xFFFF is no score.
    """
    halves = inline_ptx(
        "cvt.rz.f16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[number(low), number(high)],
    )
    signs = inline_ptx(  # the sign bit of each half, sixteen times
        "prmt.b32 {$w0}, {$r0}, {$r0}, 0xBB99;", write_only_types=[Uint32], read_only_args=[halves]
    )
    return halves ^ (~signs & Uint32(HALF_MAGNITUDES))
