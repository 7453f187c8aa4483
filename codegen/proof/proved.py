"""The proved plan, and proofs remembered between runs.

What a proof decides follows from the plan and from kpipe's own sources.  So a proof is kept under
the hash of both: the next run of an unchanged schedule takes the decided overlap from there and
spends its time elsewhere.  Failures are never remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kpipe.codegen.cache import cache_folder, tool_digest
from kpipe.codegen.plan.methods import name_methods
from kpipe.codegen.plan.model import Launch, Pdl, PipelinePlan, StepPlan

if TYPE_CHECKING:
    from kpipe.codegen.proof.program import Program
    from kpipe.codegen.proof.semantics import Table

_PDL = tuple(part.name for part in fields(Pdl))


@dataclass(frozen=True)
class ProvedPlan:
    """A plan whose every launch list is free of races by the documented semantics.

    `programs` are what was checked (empty where the proof was remembered); `assumes` are
    declarations of the spec that the proof rests on; `cites` says which table of measured
    semantics the reasons of held and plain launches cite, empty where none does.
    """

    pipeline: PipelinePlan
    programs: tuple[Program, ...] = field(repr=False)
    assumes: tuple[str, ...]
    cites: str = ""


def decided(
    pipeline: PipelinePlan, steps: dict[tuple, StepPlan], programs: tuple[Program, ...] = ()
) -> ProvedPlan:
    """The pipeline with the overlap that was decided for each launch list (by identity).

    Reasons of the proof get the rows that they rest on.  Raises SpecError KP801 or KP809 where
    some do and the table that the settings name cannot be used.
    """
    pdls = {identity: _pdls(step) for identity, step in steps.items()}
    cites = ""
    if any(pdl.attribute_rule or pdl.release_rule for given in pdls.values() for pdl in given):
        from kpipe.codegen.proof.tables import table_for

        choice = table_for(pipeline.path, pipeline.targets)
        cites = choice.note
        pdls = {key: [_cited(pdl, choice.table) for pdl in given] for key, given in pdls.items()}
    plans = tuple(_with_pdl(plan, pdls[plan.identity]) for plan in pipeline.plans)
    proved = replace(pipeline, plans=plans, methods=name_methods(plans), status="proved")
    assumes = (f"between_layers: {pipeline.environment['between_layers']}",)
    return ProvedPlan(proved, programs, assumes, cites)


def _cited(pdl: Pdl, table: Table) -> Pdl:
    from kpipe.codegen.proof.cite import cited

    for part in ("attribute", "release"):
        captured, _, rule = getattr(pdl, f"{part}_rule").rpartition(": ")
        if rule:
            reason = cited(getattr(pdl, f"{part}_reason"), rule, table, captured=bool(captured))
            pdl = replace(pdl, **{f"{part}_reason": reason})
    return pdl


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
    draft = place.with_suffix(f".{os.getpid()}")  # another run may keep the same at the same time
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
