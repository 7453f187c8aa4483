"""A step with padding rows behind its own, up to a number of rows that a layer is declared for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kpipe.runtime.metadata import Step


def padded_step(step: Step, size: int) -> Step:
    """The step with `size` rows: what it adds has length 0, page 0, slot -1 and hidden rows of 0.

    Every tensor is a new one; outputs begin as what the step's hold.
    """
    requests = size // step.q
    return replace(
        step,
        hidden=_grown(step.hidden, size),
        out=_grown(step.out, size),
        lengths=_grown(step.lengths, requests),
        slots=_grown(step.slots, size, value=-1),
        block_table=_grown(step.block_table, requests),
        index_slots=_grown(step.index_slots, size, value=-1),
        index_table=_grown(step.index_table, requests),
        prefix=_grown(step.prefix, size),
        saved=_grown(step.saved, size, axis=1),
        new_prefix=_grown(step.new_prefix, size),
    )


def _grown(tensor: Tensor | None, rows: int, *, value: int = 0, axis: int = 0) -> Tensor | None:
    """A copy with `rows` along that axis, those behind the tensor's own filled with `value`."""
    if tensor is None:
        return None
    behind = (0, 0) * (tensor.dim() - 1 - axis)  # of each axis, from the last one on: none
    return torch.constant_pad_nd(tensor, (*behind, 0, rows - tensor.shape[axis]), value)
