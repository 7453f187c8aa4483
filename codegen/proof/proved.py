"""The proved plan, and proofs remembered between runs.

What a proof decides follows from the plan and from kpipe's own sources.  So a proof is kept under
the hash of both: the next run of an unchanged schedule takes the decided overlap from there and
spends its time elsewhere.  Failures are never remembered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kpipe.codegen.cache import cache_folder, tool_digest
from kpipe.codegen.plan.methods import name_methods
from kpipe.codegen.plan.model import Launch, Pdl, PipelinePlan, StepPlan

if TYPE_CHECKING:
    from kpipe.codegen.proof.program import Program

_PDL = ("attribute", "release", "attribute_reason", "release_reason")


@dataclass(frozen=True)
class ProvedPlan:
    """A plan whose every launch list is free of races by the documented semantics.

    `programs` are what was checked (empty where the proof was remembered); `assumes` are
    declarations of the spec that the proof rests on.
    """

    pipeline: PipelinePlan
    programs: tuple[Program, ...] = field(repr=False)
    assumes: tuple[str, ...]


def decided(
    pipeline: PipelinePlan, steps: dict[tuple, StepPlan], programs: tuple[Program, ...] = ()
) -> ProvedPlan:
    """The pipeline with the overlap that was decided for each launch list (by identity)."""
    plans = tuple(_with_pdl(plan, _pdls(steps[plan.identity])) for plan in pipeline.plans)
    proved = replace(pipeline, plans=plans, methods=name_methods(plans), status="proved")
    return ProvedPlan(
        proved, programs, (f"between_layers: {pipeline.environment['between_layers']}",)
    )


def _pdls(step: StepPlan) -> list[Pdl]:
    return [launch.pdl for launch in step.launches]


def _with_pdl(plan: StepPlan, pdls: list[Pdl]) -> StepPlan:
    following: Iterator[Pdl] = iter(pdls)
    items = tuple(
        replace(item, pdl=next(following)) if isinstance(item, Launch) else item
        for item in plan.items
    )
    return replace(plan, items=items)


def remembered(pipeline: PipelinePlan) -> ProvedPlan | None:
    """The proof of exactly this plan by exactly these sources, if an earlier run has made it."""
    place = _place(pipeline)
    try:
        lists = json.loads(place.read_text()) if place else None
    except (OSError, ValueError):
        return None
    if not isinstance(lists, list) or len(lists) != len(pipeline.methods):
        return None
    steps = {}
    for method, entries in zip(pipeline.methods, lists, strict=True):
        if len(entries) != len(method.plan.launches):
            return None
        pdls = [Pdl(**dict(zip(_PDL, entry, strict=True))) for entry in entries]
        steps[method.plan.identity] = _with_pdl(method.plan, pdls)
    return decided(pipeline, steps)


def remember(pipeline: PipelinePlan, steps: dict[tuple, StepPlan]) -> None:
    """Keep what was decided for the launch lists of a plan that has been proved."""
    place = _place(pipeline)
    if place is None:
        return
    lists = [
        [[getattr(pdl, name) for name in _PDL] for pdl in _pdls(steps[method.plan.identity])]
        for method in pipeline.methods
    ]
    draft = place.with_suffix(".new")
    draft.write_text(json.dumps(lists))
    draft.replace(place)


def _place(pipeline: PipelinePlan) -> Path | None:
    """The file of this plan's proof, under the hash of all that the proof looks at."""
    folder = cache_folder("proofs")
    if folder is None:
        return None
    text = repr(
        (
            [method.plan for method in pipeline.methods],
            pipeline.ops,
            pipeline.buffers,
            pipeline.mailboxes,
            pipeline.step,
            sorted(pipeline.environment.items()),
            tool_digest(),
        )
    )
    return Path(folder) / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
