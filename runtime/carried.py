"""What a layer of a chain takes from the one ahead of it, in trials and on a device.

An engine puts a feed-forward layer and norms between two of our layers.  Trials leave them out:
without a residual operand the next hidden states are the last ones plus the output; with one the
output is the residual stream itself, so it is the next prefix and the next hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kpipe.runtime.metadata import Step

if TYPE_CHECKING:
    from kpipe.runtime.prepared import RankRun


@dataclass(frozen=True)
class Carried:
    """hidden [rows, hidden] BF16; prefix, the residual stream, alike where the layer adds to it."""

    hidden: Tensor
    prefix: Tensor | None = None

    def step(self, step: Step) -> Step:
        """A step with copies of these tensors (several ranks may take the same ones)."""
        prefix = None if self.prefix is None else self.prefix.clone()
        return replace(step, hidden=self.hidden.cpu().clone(), prefix=prefix)

    def behind(self, runs: Sequence[RankRun]) -> Carried:
        """What the next layer takes, once these ranks have run."""
        if self.prefix is not None:
            return Carried(runs[0].out, runs[0].out)
        return Carried((self.hidden.float() + sum(run.out.float() for run in runs)).bfloat16())


def first_carried(hidden: Tensor, operands: Iterable[str], seed: int) -> Carried:
    """What the first layer takes: a random residual stream where it is among the operands."""
    if "prefix" not in operands:
        return Carried(hidden)
    generator = torch.Generator().manual_seed(seed)
    return Carried(hidden, torch.empty(hidden.shape).normal_(generator=generator).bfloat16())


def hand_on(before: Step, step: Step) -> None:
    """`Carried.behind` on the device: fills the inputs of a layer from the step ahead of it."""
    if step.prefix is not None:
        step.hidden.copy_(before.out)
        step.prefix.copy_(before.out)
        return
    step.hidden.copy_((before.hidden.float() + before.out.float()).bfloat16())
