"""`kpipe modes`: every legal place of a stage, and what blocks the others."""

from __future__ import annotations

import json

import click

from kpipe.codegen.commands.common import Progress, exit_code, expand_specs, show_findings
from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.places.describe import describe_json, describe_text, describe_yaml
from kpipe.codegen.places.survey import Survey, survey
from kpipe.codegen.places.words import check_name, words_of
from kpipe.codegen.plan.api import resolve_spec
from kpipe.codegen.plan.build import build_plan, refuse_unbuilt
from kpipe.codegen.plan.describe import matching_steps
from kpipe.codegen.plan.model import StepPlan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.resolve import Resolved


def run(
    name: str,
    spec: str | None,
    rows: int | None,
    q: int | None,
    arch: str | None,
    form: str,
    number: int | None,
    every: bool,
    color: str,
) -> int:
    """Print what was found, or schedule `number` as YAML; returns the exit code.

    1 where the spec is refused as it is, 2 for a name that it does not have.
    """
    path = _only(expand_specs((spec,) if spec else ()))
    texts: dict[str, str] = {}
    try:
        resolved = resolve_spec(path, texts)
        refuse_unbuilt(resolved)
        check_name(resolved, name)
        plan = build_plan(resolved, Report(resolved.source))
        steps = matching_steps(plan, rows, q, arch or plan.targets[0])
        surveys = _surveys(resolved, name, steps)
    except SpecError as error:
        show_findings(error.diagnostics, texts, "text", color=color, err=True)
        return exit_code(error.diagnostics)
    if number is not None:
        click.echo(_yaml(resolved, surveys, name, number), nl=False)
    elif form == "json":
        click.echo(json.dumps(describe_json(surveys, name), indent=2))
    else:
        click.echo(describe_text(surveys, name, every=every), nl=False)
        if any(survey.legal for survey in surveys):
            narrowed = _options(rows, q, arch)
            click.echo(f"as YAML: kpipe modes {name} {path}{narrowed} --yaml #", err=True)
    return 0


def _only(paths: tuple[str, ...]) -> str:
    if len(paths) > 1:
        raise click.UsageError(f"name one SPEC of {', '.join(paths)}")
    return paths[0]


def _options(rows: int | None, q: int | None, arch: str | None) -> str:
    given = (("rows", rows), ("q", q), ("arch", arch))
    return "".join(f" --{option} {value}" for option, value in given if value is not None)


def _surveys(resolved: Resolved, name: str, steps: tuple[StepPlan, ...]) -> list[Survey]:
    """One survey per mode that the steps take; those that launch nothing of a stage are named."""
    by_mode: dict[str, list[StepPlan]] = {}
    for step in steps:
        by_mode.setdefault(step.mode, []).append(step)
    progress = Progress()
    found = []
    for mode, group in by_mode.items():
        words = words_of(resolved, name, group)
        if not words:
            click.echo(f"mode {mode} launches nothing of stage `{name}`", err=True)
            continue
        found.append(
            survey(resolved, group, words, lambda n, total, m=mode: progress.step(n, m, total))
        )
    progress.close()
    return found


def _yaml(resolved: Resolved, surveys: list[Survey], name: str, number: int) -> str:
    numbered = [(survey, legal) for survey in surveys for legal in survey.legal]
    if not 1 <= number <= len(numbered):
        have = f"they go from 1 to {len(numbered)}" if numbered else "there is none"
        raise click.UsageError(f"no legal schedule has number {number}; {have}")
    return describe_yaml(resolved, *numbered[number - 1], name)
