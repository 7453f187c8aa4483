"""The residual stream behind the o-projection, in float64 at the declared rounding points."""

from __future__ import annotations

import torch

from .number_formats import round_bf16


def residual_stream(prefix: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
    """BF16(prefix + reduced) in float64; both [rows, hidden], `reduced` rounded already."""
    return round_bf16(prefix.double() + reduced.double())
