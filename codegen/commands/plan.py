"""`kpipe plan`: the resolved plan, so that nothing is hidden."""

from __future__ import annotations

import click

from kpipe.codegen.commands.common import exit_code, show_findings
from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.proof.api import prove_pipeline


def run(spec: str, rows: int | None, q: int | None, arch: str | None, form: str, color: str) -> int:
    """Print the plan; returns the exit code."""
    texts: dict[str, str] = {}
    try:
        plan = prove_pipeline(spec, texts).pipeline
        if form == "json":
            from kpipe.codegen.plan.describe_json import describe_json as describe
        else:
            from kpipe.codegen.plan.describe import describe_text as describe
        click.echo(describe(plan, rows, q, arch), nl=False)
    except SpecError as error:
        show_findings(error.diagnostics, texts, "text", color=color, err=True)
        return exit_code(error.diagnostics)
    return 0
