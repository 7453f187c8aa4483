"""Which steps a picture shows: those of the table, or every declared step under one mode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kpipe.codegen.diagnostics import SpecError, did_you_mean
from kpipe.codegen.plan.api import resolve_spec
from kpipe.codegen.plan.build import illegal, plan_mode, refuse_unbuilt
from kpipe.codegen.plan.describe import check_declared, select_plans, undeclared
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.proof.api import prove_pipeline


@dataclass(frozen=True)
class Chosen:
    """One step to show, with its overlap decided, and the name of its launch list."""

    step: StepPlan
    method: str


@dataclass(frozen=True)
class Selection:
    """A pipeline and what is shown of it, in the order of the plan."""

    plan: PipelinePlan
    chosen: tuple[Chosen, ...]


def select(
    path: str,
    texts: dict[str, str],
    rows: int | None,
    q: int | None,
    arch: str | None,
    mode: str | None,
) -> Selection:
    """The steps that the options name; without any of them one of each launch list.

    With `mode` every step takes that mode, whatever the table says, and its overlap is decided
    here.  Raises SpecError: what is wrong with the spec, KP808 for what it does not declare, KP104
    for a mode that is not legal in it, and the races of such a mode.
    """
    if mode is None:
        plan = prove_pipeline(path, texts).pipeline
    else:
        plan = _under(path, texts, mode, rows, q, arch)
    steps = select_plans(plan, rows, q, arch)
    if mode is not None:
        steps = _decided(plan, steps)
    names = {method.plan.identity: method.name for method in plan.methods}
    named = zip(steps, select_plans(plan, rows, q, arch), strict=True)
    return Selection(plan, tuple(Chosen(step, names[asked.identity]) for step, asked in named))


def distinct(selection: Selection, *, sizes: bool) -> tuple[Chosen, ...]:
    """The first step of each launch list; with `sizes` of each list, row count and query length."""
    found: dict[tuple, Chosen] = {}
    for one in selection.chosen:
        step = one.step
        found.setdefault((step.identity, *((step.rows, step.q) if sizes else ())), one)
    return tuple(found.values())


def _under(
    path: str,
    texts: dict[str, str],
    mode: str,
    rows: int | None,
    q: int | None,
    arch: str | None,
) -> PipelinePlan:
    """The plan of the selected steps under a mode: it need not suit the others."""
    resolved = resolve_spec(path, texts)
    refuse_unbuilt(resolved)
    near = did_you_mean(mode, resolved.modes)
    hint = f"did you mean `{near}`?" if near else ""
    unknown = undeclared("mode", mode, tuple(resolved.modes), hint)
    if unknown:
        raise SpecError(unknown)
    report = Report(resolved.source)
    reason = illegal(resolved, mode)
    if reason:
        span = resolved.source.span("overlap", "modes", mode, key=True)
        report.error("KP104", f"mode `{mode}` is not legal here: {reason}", span)
        report.stop_on_errors()
    check_declared(resolved.rows.items(), resolved.targets, rows, q, arch)
    steps = [
        (target, query, count)
        for target in resolved.targets
        for query, counts in resolved.rows.items()
        for count in counts
        if arch in (None, target) and q in (None, query) and rows in (None, count)
    ]
    return plan_mode(resolved, resolved.modes[mode], steps, report)


def _decided(plan: PipelinePlan, steps: Iterable[StepPlan]) -> tuple[StepPlan, ...]:
    from kpipe.codegen.proof.prove import race_findings, synthesise_all

    listed = tuple(steps)
    wanted = {step.identity for step in listed}
    proved = synthesise_all(plan, [m for m in plan.methods if m.plan.identity in wanted])
    races = race_findings(plan, proved)
    if races:
        raise SpecError(races)
    return tuple(replace(step, items=proved[step.identity].step.items) for step in listed)
