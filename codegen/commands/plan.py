"""`kpipe plan`: the resolved plan, so that nothing is hidden; with an old side, what changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kpipe.codegen.commands.common import Progress, exit_code, expand_specs, show_findings
from kpipe.codegen.commands.measured import read_link, read_times
from kpipe.codegen.config import load_config
from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.plan.describe import check_declared
from kpipe.codegen.proof.api import prove_pipeline

if TYPE_CHECKING:
    from kpipe.codegen.plan.model import PipelinePlan, StepPlan
    from kpipe.codegen.plan.wire_report import WireReport


def run(
    specs: tuple[str, ...],
    rows: int | None,
    q: int | None,
    arch: str | None,
    form: str,
    link: str | None,
    timings: str | None,
    color: str,
) -> int:
    """Print the plan of one spec; returns the exit code.

    Raises click exceptions, exit code 2, for files of `--link` and `--timings` that cannot be used.
    """
    if len(specs) != 1:
        raise click.UsageError("name one SPEC; several are compared with `--against`")
    if form == "markdown":
        raise click.UsageError("`--format markdown` needs `--against`")
    texts: dict[str, str] = {}
    try:
        plan = prove_pipeline(specs[0], texts).pipeline
        if form == "json":
            from kpipe.codegen.plan.describe_json import describe_json as describe
        else:
            from kpipe.codegen.plan.describe import describe_text as describe
        check_declared(plan.rows, plan.targets, rows, q, arch)
        wire = _wire(plan, specs[0], (rows, q, arch), link, timings)
        click.echo(describe(plan, rows, q, arch, wire), nl=False)
    except SpecError as error:
        show_findings(error.diagnostics, texts, "text", color=color, err=True)
        return exit_code(error.diagnostics)
    return 0


def _wire(
    plan: PipelinePlan,
    spec: str,
    selection: tuple[int | None, int | None, str | None],
    link: str | None,
    timings: str | None,
) -> WireReport | None:
    """What travels between the ranks; None for a pipeline whose ranks exchange nothing."""
    from kpipe.codegen.plan.wire import ranks_of

    if ranks_of(plan) < 2 or not plan.mailboxes:
        if link or timings:
            raise click.UsageError(
                f"{plan.name} exchanges no words between ranks: drop --link and --timings"
            )
        return None
    from kpipe.codegen.plan.wire_report import Durations, wire_report
    from kpipe.codegen.review.timings import evidence_timings, measured_step

    rows, q, arch = selection
    arch = arch or plan.targets[0]
    folder = load_config(Path(spec)).output / plan.name
    known = (read_times(Path(timings)),) if timings else evidence_timings(folder)
    names = {method.plan.identity: method.name for method in plan.methods}

    def durations(step: StepPlan) -> Durations:
        found = measured_step(known, plan, step, names[step.identity], folder)
        return Durations(found.launches, found.gpu) if found else Durations()

    given = read_link(Path(link), arch) if link else None
    return wire_report(plan, rows, q, arch, given, durations)


def run_against(
    specs: tuple[str, ...],
    against: str,
    selection: tuple[int | None, int | None, str | None],
    form: str,
    color: str,
) -> int:
    """Print what differs from an old side; returns the exit code, that of the new side's findings.

    `selection` are rows, query length and architecture, None for all.
    """
    from kpipe.codegen.review.api import review

    texts: dict[str, str] = {}
    named = expand_specs(specs)
    bar = Progress(len(named))
    try:
        found = review(
            named, against, texts, selection, all_of_project=not specs, progress=bar.step
        )
    except SpecError as error:
        show_findings(error.diagnostics, texts, "text", color=color, err=True)
        return exit_code(error.diagnostics)
    finally:
        bar.close()
    code = exit_code(found.found)
    if form == "json":
        from kpipe.codegen.review.as_json import review_json

        click.echo(review_json(found, code), nl=False)
        return code
    if form == "markdown":
        from kpipe.codegen.review.markdown import render_markdown as render
    else:
        from kpipe.codegen.review.text import render_text as render
    click.echo(render(found), nl=False)
    if found.found and form == "markdown":  # the text itself has them without their excerpts
        show_findings(found.found, texts, "text", color=color, err=True)
    return code
