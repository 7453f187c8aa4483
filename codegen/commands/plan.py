"""`kpipe plan`: the resolved plan, so that nothing is hidden; with an old side, what changed."""

from __future__ import annotations

import click

from kpipe.codegen.commands.common import Progress, exit_code, expand_specs, show_findings
from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.proof.api import prove_pipeline


def run(
    specs: tuple[str, ...], rows: int | None, q: int | None, arch: str | None, form: str, color: str
) -> int:
    """Print the plan of one spec; returns the exit code."""
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
        click.echo(describe(plan, rows, q, arch), nl=False)
    except SpecError as error:
        show_findings(error.diagnostics, texts, "text", color=color, err=True)
        return exit_code(error.diagnostics)
    return 0


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
