"""What every picture of a launch list says above it."""

from __future__ import annotations

import textwrap
from typing import NamedTuple

from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.review import svg

TEXT_WIDTH = 100  # columns of a terminal
COLOURS = 8  # of stages; with more stages they begin anew


class Caption(NamedTuple):
    """Names of pipeline, launch list and step, and the stages that give colours."""

    pipeline: str
    method: str
    step: str
    stages: tuple[str, ...]

    def colour(self, stage: str) -> int:
        """Number of a stage's colour, the same in every picture of the pipeline."""
        return self.stages.index(stage) % COLOURS


def caption_of(plan: PipelinePlan, step: StepPlan, method: str) -> Caption:
    """The caption of a step's pictures."""
    shown = f"rows {step.rows}, q {step.q}, {step.arch}, mode {step.mode}"
    return Caption(plan.name, method, shown, tuple(sorted(set(plan.stages.values()))))


def heading(
    caption: Caption, facts: str, label: str, top: float, width: float = svg.WIDTH
) -> list[str]:
    """Title, one line of facts, and a badge where `label` is given; `width` is the picture's."""
    pill = [svg.badge(width - svg.PAD, top + 28, label, "badge")] if label else []
    return [
        svg.text(svg.PAD, top + 30, f"{caption.pipeline}  {caption.method}", svg.HEAD, kind="b"),
        svg.text(svg.PAD, top + 50, f"{caption.step}: {facts}", svg.TEXT, kind="soft"),
        *pill,
    ]


def text_heading(caption: Caption) -> list[str]:
    """The same for a terminal."""
    return wrapped(f"{caption.pipeline} {caption.method}: {caption.step}")


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of at most 100 columns; `indent` stands in front of all but the first."""
    return textwrap.wrap(
        text, TEXT_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
