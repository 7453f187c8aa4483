"""Three sigmoids that differ in their last bits; a spec names the one that it wants."""

from __future__ import annotations

from cutlass import Float32, cute

from .scalar import select

MODES = ("refined", "exact", "fast")

_RECIPROCAL_LIMIT = 2.0**126
"""From here on the approximate reciprocal is flushed to zero."""


def sigmoid(value: Float32, mode: str) -> Float32:
    """1 / (1 + exp(-value)) in FP32.

    exact    accurate exponential, division rounded to nearest
    refined  fast exponential, approximate reciprocal and one Newton step (about 1 ulp)
    fast     fast exponential, approximate reciprocal

    A NaN stays a NaN, +-infinity gives 1 and 0. `mode` is one of MODES.
    """
    if mode == "exact":
        return Float32(1.0) / (Float32(1.0) + cute.math.exp(-value))
    denominator = Float32(1.0) + cute.math.exp(-value, fastmath=True)
    approximate = cute.arch.rcp_approx(denominator)
    if mode == "fast":
        return approximate
    # The Newton step turns an infinite denominator into a NaN; there the approximation is exact.
    error = cute.math.fma(-denominator, approximate, Float32(1.0))
    refined = cute.math.fma(approximate, error, approximate)
    return select(denominator < Float32(_RECIPROCAL_LIMIT), refined, approximate)
