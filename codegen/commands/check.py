"""`kpipe check`: read, validate and plan; every finding of every spec."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import click

from kpipe.codegen.commands.common import (
    Progress,
    aligned,
    exit_code,
    expand_specs,
    show_findings,
    wrapped,
)
from kpipe.codegen.config import load_config
from kpipe.codegen.diagnostics import Diagnostic, SpecError, count_line, render_json
from kpipe.codegen.evidence import LaunchEvidence, evidence_of, summary
from kpipe.codegen.plan.api import resolve_spec
from kpipe.codegen.plan.build import build_plan, refuse_unbuilt
from kpipe.codegen.plan.model import PipelinePlan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.proof.prove import orders, prove
from kpipe.codegen.proof.proved import ProvedPlan
from kpipe.codegen.proof.replay import replay_warnings
from kpipe.codegen.proof.shared import prove_together
from kpipe.codegen.version import __version__

_BETWEEN = {
    "waits": "kernels that wait for their predecessor under PDL",
    "full": "a full dependency",
    "silent": "nothing known",
}


@dataclass(frozen=True)
class Verdict:
    """One checked spec."""

    path: str
    status: str  # ok, draft, findings
    facts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    found: tuple[Diagnostic, ...] = ()
    plan: PipelinePlan | None = field(default=None, repr=False)  # where it is proved
    targets: tuple[str, ...] = ()
    evidence: tuple[LaunchEvidence, ...] = ()


def run(specs: tuple[str, ...], form: str, color: str, *, fix: bool = False) -> int:
    """Check specs and print the result; returns the exit code.

    With `fix` the repairs that the findings carry are applied first; what is printed, and the
    exit code, is what is found after that.
    """
    started = time.perf_counter()
    paths = expand_specs(specs)
    texts: dict[str, str] = {}
    verdicts = _check_all(paths, texts)
    if fix and any(verdict.found for verdict in verdicts):
        from kpipe.codegen.commands.fix import apply_fixes

        for line in apply_fixes(((v.path, d) for v in verdicts for d in v.found), texts):
            click.echo(line, err=True)
        texts.clear()
        verdicts = _check_all(paths, texts)
    found = tuple(dict.fromkeys(d for verdict in verdicts for d in verdict.found))
    code = exit_code(found)
    if form == "json":
        click.echo(_as_json(verdicts, found, code), nl=False)
        return code
    show_findings(found, texts, form, color=color)
    fine = [verdict for verdict in verdicts if verdict.status != "findings"]
    if form == "text":
        if found and fine:
            click.echo()
        for line in _lines(fine):
            click.echo(line)
        cited = dict.fromkeys(note for v in verdicts if v.found for note in v.notes)
        for line in (line for note in cited for line in wrapped(note, "")):
            click.echo(line)
    plural = "" if len(paths) == 1 else "s"
    took = round(1000 * (time.perf_counter() - started))
    click.echo(f"{len(paths)} pipeline{plural} checked, {count_line(found)} in {took} ms", err=True)
    return code


def _check_all(paths: tuple[str, ...], texts: dict[str, str]) -> list[Verdict]:
    verdicts = []
    progress = Progress(len(paths))
    for number, path in enumerate(paths, 1):
        progress.step(number, path)
        verdicts.append(check_one(path, texts))
    progress.close()
    return _together(verdicts)


def _together(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts with what follows from buffers that pipelines of this run share."""
    plans = [verdict.plan for verdict in verdicts if verdict.plan is not None]
    if not any(plan.shares_memory for plan in plans):
        return list(verdicts)
    together = prove_together(plans)
    changed = []
    for verdict in verdicts:
        found = tuple(d for d in together.found if d.span and d.span.path == verdict.path)
        notes = (*verdict.notes, *together.notes.get(verdict.path, ()))
        if found:
            verdict = replace(verdict, status="findings", found=(*verdict.found, *found))
        changed.append(replace(verdict, notes=notes))
    listed = {d for verdict in changed for d in verdict.found}
    rest = tuple(d for d in together.found if d not in listed)  # at a file that a spec extends
    if rest:
        last = max(i for i, verdict in enumerate(changed) if verdict.plan is not None)
        changed[last] = replace(
            changed[last], status="findings", found=(*changed[last].found, *rest)
        )
    return changed


def check_one(path: str, texts: dict[str, str]) -> Verdict:
    """The verdict on one spec; a draft is resolved, not planned."""
    targets: tuple[str, ...] = ()
    try:
        resolved = resolve_spec(path, texts)
        targets = resolved.targets
        if resolved.spec.draft is not None:
            missing = ", ".join(sorted(resolved.missing))
            return Verdict(
                path,
                "draft",
                _count(len(resolved.modes), "mode"),
                (f"no contract yet: {missing}",),
                targets=targets,
            )
        refuse_unbuilt(resolved)
        proved = prove(build_plan(resolved, Report(resolved.source)))
    except SpecError as error:
        return _refused(path, texts, error.diagnostics, targets)
    facts = _facts(proved, len(resolved.spec.stages))
    warnings = replay_warnings(proved.pipeline)
    evidence = _evidence(path, proved.pipeline)
    notes = (
        *_notes(proved.pipeline),
        *([proved.cites] if proved.cites else []),
        *summary(evidence),
    )
    return Verdict(path, "ok", facts, notes, warnings, proved.pipeline, targets, evidence)


def _evidence(path: str, pipeline: PipelinePlan) -> tuple[LaunchEvidence, ...]:
    """What has run of the generated folder, where there is one."""
    folder = load_config(Path(path)).output / pipeline.name
    return evidence_of(pipeline, folder) if folder.is_dir() else ()


def _refused(
    path: str,
    texts: dict[str, str],
    diagnostics: tuple[Diagnostic, ...],
    targets: tuple[str, ...],
) -> Verdict:
    """A spec with findings: their repairs, and the table that they cite."""
    from kpipe.codegen.repair.rank import with_repairs  # a clean check does without

    found = with_repairs(path, texts, diagnostics)
    notes: tuple[str, ...] = ()
    if any(finding.rests for finding in found):
        from kpipe.codegen.proof.tables import table_for

        notes = (table_for(path, targets).note,)
    return Verdict(path, "findings", notes=notes, found=found, targets=targets)


def _facts(proved: ProvedPlan, stages: int) -> tuple[str, ...]:
    plan = proved.pipeline
    return (
        *_count(stages, "stage"),
        *_count(len(plan.modes), "mode"),
        *_count(len(plan.plans), "step"),
        *_count(len(plan.methods), "launch list"),
        f"{orders(proved)} orders proved",
    )


def _count(number: int, noun: str) -> tuple[str]:
    return (f"{number} {noun}{'' if number == 1 else 's'}",)


def _notes(plan: PipelinePlan) -> tuple[str, ...]:
    between = plan.environment["between_layers"]
    notes = [f"assumes {_BETWEEN[between]} between two layers (between_layers: {between})"]
    notes += [f"{mode} -> {other}: {reason}" for mode, other, reason in plan.fallbacks]
    if plan.missing_kernels:
        notes.append(f"no kernel yet: {', '.join(plan.missing_kernels)}")
    return tuple(notes)


def _lines(verdicts: list[Verdict]) -> list[str]:
    width = max((len(verdict.facts) for verdict in verdicts), default=0)
    rows = [(v.path, v.status, *v.facts, *[""] * (width - len(v.facts))) for v in verdicts]
    lines = []
    for row, verdict in zip(aligned(rows), verdicts, strict=True):
        lines += [row, *(line for note in verdict.notes for line in wrapped(note))]
    return lines


def _as_json(verdicts: list[Verdict], found: tuple[Diagnostic, ...], code: int) -> str:
    reasons = {0: "fine", 1: "findings", 2: "unreadable"}
    payload = {
        "schema": "kpipe.check/1",
        "kpipe": __version__,
        "pipelines": [
            {
                "path": v.path,
                "status": v.status,
                "facts": list(v.facts),
                "notes": list(v.notes),
                "semantics": _semantics(v),
                "evidence": [asdict(one) for one in v.evidence],
            }
            for v in verdicts
        ],
        "findings": json.loads(render_json(sorted(found))),
        "exit": {"code": code, "reason": reasons[code]},
    }
    return json.dumps(payload, indent=2) + "\n"


def _semantics(verdict: Verdict) -> dict[str, object] | None:
    """The table of measured semantics that holds for the spec; None where it cannot be used."""
    from kpipe.codegen.proof.tables import table_for

    try:
        choice = table_for(verdict.path, verdict.targets)
    except SpecError:
        return None
    table = choice.table
    return {
        "arch": table.arch,
        "driver": table.driver,
        "version": table.version,
        "without": list(choice.without),
    }
