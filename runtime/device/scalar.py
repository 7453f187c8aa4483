"""Choices between scalars without a branch."""

from __future__ import annotations

from cutlass import Boolean, Float32, Uint32
from cutlass.cutlass_dsl import select_


def select(condition: Boolean, value: Float32, otherwise: Float32) -> Float32:
    """`value` where the condition holds, else `otherwise`; the other one may be a NaN."""
    return Float32(select_(condition, value, otherwise))


def choose(condition: Boolean, value: Uint32, otherwise: Uint32) -> Uint32:
    """`select` for 32-bit words."""
    return Uint32(select_(condition, value, otherwise))
