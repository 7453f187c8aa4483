"""What a layer of a chain takes from the one ahead of it, in trials and on a device.

An engine puts a feed-forward layer and norms between two of our layers.  Trials leave them out:
without residual operands the next hidden states are the last ones plus the output; where the layer
adds to the residual stream, the stream is the next prefix and the output the next hidden states.
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

SAVED = 3
"""Saved blocks of a trial."""


@dataclass(frozen=True)
class Carried:
    """hidden and prefix [rows, hidden], saved [blocks, rows, hidden], all BF16.

    prefix is the residual stream, None where the layer does not add to it; saved are the blocks
    that AttnRes mixes it with, None without AttnRes.
    """

    hidden: Tensor
    prefix: Tensor | None = None
    saved: Tensor | None = None

    def step(self, step: Step) -> Step:
        """A step with copies of these tensors (several ranks may take the same ones)."""
        mixes = self.saved is not None
        return replace(
            step,
            hidden=self.hidden.cpu().clone(),
            prefix=None if self.prefix is None else self.prefix.clone(),
            saved=self.saved,
            new_prefix=torch.full_like(step.out, torch.nan) if mixes else None,
        )

    def behind(self, runs: Sequence[RankRun]) -> Carried:
        """What the next layer takes, once these ranks have run."""
        if self.prefix is None and self.saved is None:
            grown = self.hidden.float() + sum(run.out.float() for run in runs)
            return Carried(grown.bfloat16())
        stream = runs[0].out if self.saved is None else runs[0].new_prefix
        return Carried(runs[0].out, None if self.prefix is None else stream, self.saved)


def first_carried(hidden: Tensor, operands: Iterable[str], seed: int) -> Carried:
    """What the first layer takes: random streams and blocks where they are among the operands."""
    generator = torch.Generator().manual_seed(seed)

    def noise(name: str, *shape: int) -> Tensor | None:
        values = torch.empty(shape).normal_(generator=generator).bfloat16()
        return values if name in operands else None

    prefix = noise("prefix", *hidden.shape)
    return Carried(hidden, prefix, noise("saved", SAVED, *hidden.shape))


def hand_on(before: Step, step: Step) -> None:
    """`Carried.behind` on the device: fills the inputs of a layer from the step ahead of it."""
    if step.prefix is None and step.saved is None:
        step.hidden.copy_((before.hidden.float() + before.out.float()).bfloat16())
        return
    step.hidden.copy_(before.out)
    if step.prefix is not None:
        step.prefix.copy_(before.out if step.saved is None else before.new_prefix)
