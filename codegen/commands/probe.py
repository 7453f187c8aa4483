"""`kpipe probe --apply`: observations of a GPU become the table of semantics that findings cite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kpipe.codegen.commands.common import aligned, exit_code, show_findings, wrapped
from kpipe.codegen.commands.measured import read_measured, wrong_document
from kpipe.codegen.config import display
from kpipe.codegen.diagnostics import Diagnostic, SpecError
from kpipe.codegen.proof.observed import (
    MODES,
    Experiment,
    experiments,
    table_of,
    table_text,
)
from kpipe.codegen.proof.semantics import Table
from kpipe.codegen.proof.tables import read_table, shipped

OBSERVED = "kpipe.observed/1"


def run(observations: str, out: str | None, form: str, color: str) -> int:
    """Judge observations, print the table, write it; returns the exit code.

    1, and nothing is written, where a documented order was seen broken.
    """
    try:
        document = read_measured(observations, OBSERVED)
        try:
            found = experiments(document)
            template = _template(str(document["arch"]))
            table = table_of(document, found, template)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise wrong_document(observations, f"cannot be used: {_said(error)}") from None
        broken = [line for one in found for line in one.broken]
        if broken:
            raise SpecError([_finding(line) for line in broken])
    except SpecError as error:
        show_findings(error.diagnostics, {}, "text", color=color, err=True)
        return exit_code(error.diagnostics)
    path = Path(out or f"{table.arch}-{table.driver}.json")
    try:
        path.write_text(table_text(table))
    except OSError as error:
        raise click.UsageError(f"--table {path}: {error.strerror or error}") from None
    if form == "json":
        click.echo(table_text(table), nl=False)
    else:
        for line in _lines(document, found, table, template):
            click.echo(line)
    click.echo(f'{display(path)}: name it with [tool.kpipe] semantics = "{path.name}"', err=True)
    return 0


def _said(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _finding(line: str) -> Diagnostic:
    return Diagnostic(
        "KP821",
        line,
        None,
        help="measure again; where it stays, no schedule is proved for this machine: report it",
    )


def _template(arch: str) -> Table:
    """The shipped table of the architecture, or the first one: its sentences, readings, rules."""
    own = [path for path in shipped() if path.stem.partition("-")[0] == arch]
    return read_table((own or list(shipped()))[0])


def _lines(
    document: Mapping[str, Any], found: Sequence[Experiment], table: Table, template: Table
) -> list[str]:
    before = {row.id: row for row in template.rows}
    rows = [("row", "chain", "mode", "old data", "outcome", "promised", "")]
    outcomes = {row.id: row for row in table.rows}
    for one in found:
        known = before.get(one.row)
        said = ""
        if known is None:
            said = "new"
        elif one.mode in MODES:
            was = known.eager if one.mode == "eager" else known.captured
            is_now = outcomes[one.row]
            now = is_now.eager if one.mode == "eager" else is_now.captured
            said = "" if was == now else f"{template.title}: {was}"
        promised = "yes" if one.promised else "no"
        rows.append((one.row, one.chain, one.mode, one.how_often, one.outcome, promised, said))
    lines = [f"{document.get('gpu')}: {table.title}", *aligned(rows, "  "), "", "readings"]
    for reading in table.readings:
        holds = "holds" if reading.holds else "does not hold"
        lines += wrapped(f"{reading.id} {holds}: {reading.sentence} ({', '.join(reading.rows)})")
    if document.get("graph_trials"):
        lines += ["", "outside of the table", *_trials(document["graph_trials"])]
    return lines


def _trials(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [("trial", "the driver", "old data at start", "behind the wait", "edges")]
    for trial in trials:
        count = trial["repetitions"]
        edges = [
            "full" if kind == 0 else f"type {kind} port {port}" for kind, port in trial["edges"]
        ]
        rows.append(
            (
                trial["sentence"],
                trial["update"] or "-",
                f"{trial['early']} of {count}",
                f"{trial['stale']} of {count}",
                ", ".join(edges) or "none",
            )
        )
    return aligned(rows, "  ")
