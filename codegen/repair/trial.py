"""An edit tried out: applied to the texts in memory, then resolved, planned and proved again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kpipe.codegen.diagnostics import Diagnostic, Edit, SpecError
from kpipe.codegen.edits import edited
from kpipe.codegen.plan.api import resolve_spec
from kpipe.codegen.plan.build import build_plan, refuse_unbuilt
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.proof.mailboxes import mailboxes_proved
from kpipe.codegen.proof.prove import race_findings, synthesise_all

_UNSAFE = Diagnostic("KP702", "a mailbox protocol is not safe", None)


@dataclass(frozen=True)
class Outcome:
    """What is found with an edit; `pipeline` is None where it cannot be planned.

    `steps` are the plans of the modes that were asked for, with their overlap as decided.
    """

    found: tuple[Diagnostic, ...]
    pipeline: PipelinePlan | None = None
    steps: tuple[StepPlan, ...] = ()


def tried(
    path: str, texts: Mapping[str, str], edits: Iterable[Edit], modes: tuple[str, ...] | None
) -> Outcome:
    """The spec at `path` with these edits of its texts; files are not touched.

    `modes` are those whose launch lists are proved, None for all: an edit of one mode leaves the
    others as they are.  A mode that the table does not select is tried for every step.
    """
    given = dict(texts)
    for name in dict.fromkeys(edit.span.path for edit in edits):
        given[name] = edited(given[name], [edit for edit in edits if edit.span.path == name])
    try:
        pipeline = planned(path, given)
        selected = {name for plan in pipeline.plans for name in (plan.mode, plan.asked_mode)}
        if modes is not None and not selected & set(modes):
            pipeline = planned(path, given, modes[0])
        asked = [
            plan
            for plan in pipeline.plans
            if modes is None or {plan.mode, plan.asked_mode} & set(modes)
        ]
        return proved_outcome(pipeline, asked)
    except SpecError as error:
        return Outcome(error.diagnostics)


def proved_outcome(pipeline: PipelinePlan, asked: Sequence[StepPlan]) -> Outcome:
    """What the proof finds in the launch lists of these steps of a plan.

    Raises SpecError where findings cannot cite the table that the settings name.
    """
    wanted = {plan.identity for plan in asked}
    methods = tuple(m for m in pipeline.methods if m.plan.identity in wanted)
    proved = synthesise_all(pipeline, methods)
    found = race_findings(pipeline, proved)
    if not found and not mailboxes_proved(replace(pipeline, methods=methods)):
        found = [_UNSAFE]  # which word is lost, and how, does not matter here
    decided = {identity: synthesis.step.items for identity, synthesis in proved.items()}
    steps = tuple(replace(plan, items=decided[plan.identity]) for plan in asked)
    return Outcome(tuple(found), pipeline, steps)


def planned(path: str, given: Mapping[str, str], only: str = "") -> PipelinePlan:
    """The plan of a spec with these texts, of one mode where `only` names it.  Raises SpecError."""
    resolved = resolve_spec(path, {}, given)
    refuse_unbuilt(resolved)
    return build_plan(resolved, Report(resolved.source), only)
