"""Checks of the scales of an FP8 latent cache, made once when a layer is prepared."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite


def check_scale(name: str, value: float) -> None:
    """Raises ValueError (SP-SCALE-VALUE) unless the scale is finite and above 0."""
    if not (isfinite(value) and value > 0):
        raise ValueError(f"SP-SCALE-VALUE: {name} is {value}; a scale is finite and above 0")


def check_latent_scales(k_scale: float, v_scale: float) -> None:
    """The latent is key and value at once, so both scales must be valid and equal.

    Raises ValueError: SP-SCALE-VALUE, or SP-MLA-SCALE with both numbers.
    """
    check_scale("k_scale", k_scale)
    check_scale("v_scale", v_scale)
    if k_scale != v_scale:
        raise ValueError(
            f"SP-MLA-SCALE: MLA latent has one scale; k_scale {k_scale} != v_scale {v_scale}"
        )


def check_rank_scales(name: str, values: Sequence[float]) -> None:
    """Partials of ranks merge after dequantisation, so every rank must use the same scale.

    Raises ValueError (SP-SCALE-RANK) naming the first rank that differs from rank 0.
    """
    for rank, value in enumerate(values):
        check_scale(f"{name} of rank {rank}", value)
        if value != values[0]:
            raise ValueError(
                f"SP-SCALE-RANK: {name} is {values[0]} on rank 0 and {value} on rank {rank}"
            )
