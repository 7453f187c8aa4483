"""`kpipe verify-capture`: predicted graphs against captured ones, edge by edge.

Three steps, because the GPU is elsewhere: the plan is written here, captured there by
`python -m kpipe.runtime.verify_capture`, and judged here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kpipe.codegen.commands.common import aligned, exit_code, show_findings, wrapped
from kpipe.codegen.commands.measured import read_measured, wrong_document
from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.plan.api import resolve_spec
from kpipe.codegen.plan.build import build_plan, refuse_unbuilt
from kpipe.codegen.plan.report import Report
from kpipe.codegen.proof.capture import (
    CaptureList,
    Verdict,
    capture_lists,
    illegal_modes,
    judge,
)
from kpipe.codegen.proof.prove import prove

PLAN, CAPTURED = "kpipe.capture_plan/1", "kpipe.captured/1"
RESULT = "kpipe.capture_verdict/1"


def run(spec: str, plan: str | None, captured: str | None, form: str, color: str) -> int:
    """Write the plan, or judge what was captured; returns the exit code.

    Judging: 0 where every graph is the predicted one, 1 where one is not.
    """
    if (plan is None) == (captured is None):
        raise click.UsageError("give --plan FILE to write the plan, or --captured FILE to judge")
    texts: dict[str, str] = {}
    try:
        resolved = resolve_spec(spec, texts)
        refuse_unbuilt(resolved)
        proved = prove(build_plan(resolved, Report(resolved.source))).pipeline
        lists = capture_lists(resolved, proved)
        idle = illegal_modes(resolved, lists)
        if plan is not None:
            return _write(proved.name, spec, lists, idle, Path(plan))
        document = read_measured(str(captured), CAPTURED)
        if document.get("pipeline") != proved.name:
            shown = document.get("pipeline")
            raise wrong_document(str(captured), f"holds graphs of `{shown}`, not `{proved.name}`")
        try:
            verdicts = judge(lists, document)
        except (KeyError, TypeError, ValueError) as error:
            raise wrong_document(str(captured), f"cannot be read: {error!r}") from None
    except SpecError as error:
        show_findings(error.diagnostics, texts, "text", color=color, err=True)
        return exit_code(error.diagnostics)
    wrong = [verdict for verdict in verdicts if verdict.lines]
    machine = f"{document.get('gpu')}, driver {document.get('driver')}"
    if form == "json":
        click.echo(_as_json(proved.name, document, verdicts), nl=False)
    else:
        for line in _lines(proved.name, machine, verdicts, idle):
            click.echo(line)
    click.echo(f"{len(verdicts)} graphs compared, {len(wrong)} differ", err=True)
    return 1 if wrong else 0


def _write(
    name: str, spec: str, lists: Sequence[CaptureList], idle: Sequence[str], path: Path
) -> int:
    payload = {
        "schema": PLAN,
        "pipeline": name,
        "spec": spec,
        "lists": [one.as_json() for one in lists],
    }
    try:
        path.write_text(json.dumps(payload) + "\n")
    except OSError as error:
        raise click.UsageError(f"--plan {path}: {error.strerror or error}") from None
    modes = len({one.mode for one in lists})
    click.echo(f"{path}: {len(lists)} launch lists of {modes} modes", err=True)
    for mode in idle:
        click.echo(f"no step can take the mode `{mode}`", err=True)
    return 0


def _lines(name: str, machine: str, verdicts: Sequence[Verdict], idle: Sequence[str]) -> list[str]:
    rows = [("launch list", "captured", "nodes", "edges", "verdict")]
    for verdict in verdicts:
        said = "as predicted" if not verdict.lines else f"{len(verdict.lines)} differences"
        kind = "the layer" if verdict.layer else "stand-ins"
        rows.append((verdict.key, kind, str(verdict.nodes), str(verdict.edges), said))
    lines = [f"{name}: {machine}", *aligned(rows, "  ")]
    lines += [f"  no step can take the mode `{mode}`" for mode in idle]
    for verdict in verdicts:
        if verdict.lines:
            kind = ", the layer" if verdict.layer else ""
            lines += ["", f"{verdict.key}{kind}:"]
            lines += [line for one in verdict.lines for line in wrapped(one)]
    return lines


def _as_json(name: str, document: dict[str, Any], verdicts: Sequence[Verdict]) -> str:
    payload = {
        "schema": RESULT,
        "pipeline": name,
        "gpu": document.get("gpu"),
        "driver": document.get("driver"),
        "graphs": [
            {
                "key": verdict.key,
                "layer": verdict.layer,
                "nodes": verdict.nodes,
                "edges": verdict.edges,
                "differences": list(verdict.lines),
            }
            for verdict in verdicts
        ],
    }
    return json.dumps(payload, indent=2) + "\n"
