"""`kpipe tune`: what to measure, and the winners back into the spec.

Three steps, because the GPU is often elsewhere: `plan` here, `python -m kpipe.runtime.tune` there,
`apply` here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kpipe.codegen.commands.common import (
    Progress,
    aligned,
    exit_code,
    run_runtime,
    show_findings,
    wrapped,
)
from kpipe.codegen.config import display
from kpipe.codegen.diagnostics import SpecError

if TYPE_CHECKING:
    from kpipe.codegen.tune.apply import Applied
    from kpipe.codegen.tune.model import Options, Tuning
    from kpipe.codegen.tune.results import Results, Verdict

SCHEMA = "kpipe.tune_verdict/1"
PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class Shown:
    """How findings and verdicts are shown, and whether the spec is written."""

    form: str = "text"
    color: str = "auto"
    write: bool = True


def run_plan(spec: str, out: str, options: Options, color: str) -> int:
    """Write the plan and its code into a folder; returns the exit code."""
    texts: dict[str, str] = {}
    try:
        tuning = _planned(spec, texts, options)
    except SpecError as error:
        show_findings(error.diagnostics, texts, "text", color=color, err=True)
        return exit_code(error.diagnostics)
    if not tuning.steps:
        raise click.UsageError("nothing to measure: no step has two candidates")
    _write_plan(tuning, Path(out))
    for line in _plan_lines(tuning):
        click.echo(line)
    place = display(Path(out))
    where = "on the machine with the GPU: python3 -m kpipe.runtime.tune"
    click.echo(f"{where} {place} --out results.json", err=True)
    return 0


def _planned(spec: str, texts: dict[str, str], options: Options) -> Tuning:
    from kpipe.codegen.tune.plan import plan_tuning

    progress, done = Progress(), 0

    def tick(name: str) -> None:
        nonlocal done
        done += 1
        progress.step(done, name, done)

    try:
        return plan_tuning(spec, texts, options, tick)
    finally:
        progress.close()


def _write_plan(tuning: Tuning, folder: Path) -> None:
    """All files of the plan; a folder with anything but an earlier plan in it is refused."""
    if folder.exists() and not (folder / PLAN_FILE).is_file() and any(folder.iterdir()):
        raise click.UsageError(f"--out {folder}: holds other files than a plan; name a new folder")
    document = json.dumps(tuning.as_json(), indent=1) + "\n"
    try:
        for old in folder.glob("mode_*.py"):
            old.unlink()
        for name, text in {**tuning.files, PLAN_FILE: document}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise click.UsageError(f"--out {folder}: {error.strerror or error}") from None


def _plan_lines(tuning: Tuning) -> list[str]:
    rows = [("step", "stands for", "candidates, the present choice first")]
    for step in tuning.steps:
        counts = ", ".join(map(str, step.stands_for))
        rows.append((step.key, counts, "; ".join(one.name for one in step.candidates)))
    lines = [f"{tuning.pipeline}: {tuning.arch}, {tuning.context} keys a request"]
    lines += [line for note in tuning.notes for line in wrapped(note)]
    lines += aligned(rows, "  ")
    left = [(step.key, one) for step in tuning.steps for one in step.left_out]
    if left:
        lines += ["", "left out"]
        for key in dict.fromkeys(key for key, _ in left):
            by_reason: dict[str, list[str]] = {}
            for name, one in left:
                if name == key:
                    by_reason.setdefault(one.reason, []).append(one.name)
            listed = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())
            lines += wrapped(f"{key}: {listed}")
    found = [mode for mode in tuning.modes if not mode.declared]
    if found:
        lines += ["", "found by moving one stage, and proved"]
        lines += [line for mode in found for line in wrapped(f"{mode.name}: {mode.origin}")]
    return lines


def run_apply(spec: str, measured: str, shown: Shown) -> int:
    """Write the winners into the spec, or show what that would change; returns the exit code."""
    from kpipe.codegen.tune.apply import apply_results
    from kpipe.codegen.tune.results import read_results

    texts: dict[str, str] = {}
    try:
        results = read_results(measured)
        applied = apply_results(spec, results, texts)
    except SpecError as error:
        show_findings(error.diagnostics, texts, "text", color=shown.color, err=True)
        click.echo("nothing was written", err=True)
        return exit_code(error.diagnostics)
    if shown.write and applied.new != applied.old:
        from kpipe.codegen.commands.fix import replace_file

        replace_file(Path(spec), applied.new, spec)
    if shown.form == "json":
        click.echo(json.dumps(_as_json(spec, results, applied), indent=1))
    else:
        for line in _verdict_lines(results, applied.verdicts):
            click.echo(line)
        if not shown.write:
            click.echo(_diff(spec, applied), nl=False)
    _talk(spec, applied, shown)
    return 0


def _verdict_lines(results: Results, verdicts: Sequence[Verdict]) -> list[str]:
    rows = [("step", "present", "us", "best other", "us", "gain", "spread", "")]
    for one in verdicts:
        rows.append((one.step["key"], one.present, *_numbers(one), _said(one)))
    plan = results.plan
    head = f"{plan['pipeline']}: {plan['arch']}, {results.gpu}, {results.date}"
    lines = [head, *aligned(rows, "  ")]
    for one in verdicts:
        for name, error in one.failed.items():
            lines += wrapped(f"{one.step['key']}: {name} failed: {error}")
    return lines


def _numbers(one: Verdict) -> tuple[str, ...]:
    if one.missing:
        return "", "", "", "", ""
    present, best = one.us[one.present], one.us[one.best]
    gain = f"{100 * one.gain:+.1f} %"
    return f"{present:.1f}", one.best, f"{best:.1f}", gain, f"{100 * one.spread:.1f} %"


def _said(one: Verdict) -> str:
    if one.missing:
        return one.missing
    counts = ", ".join(map(str, one.step["stands_for"]))
    return f"-> {one.winner} for {counts}" if one.changes else ""


def _talk(spec: str, applied: Applied, shown: Shown) -> None:
    if applied.new == applied.old:
        click.echo(f"{spec}: nothing to change", err=True)
        return
    done = "changed" if shown.write else "would change"
    click.echo(f"{spec}: {done} {', '.join(applied.tables)}", err=True)
    if shown.write:
        click.echo(f"to bring the generated code up to date: kpipe generate {spec}", err=True)


def _diff(spec: str, applied: Applied) -> str:
    import difflib

    old, new = (text.splitlines(keepends=True) for text in (applied.old, applied.new))
    return "".join(difflib.unified_diff(old, new, f"a/{spec}", f"b/{spec}"))


def _as_json(spec: str, results: Results, applied: Applied) -> Mapping[str, Any]:
    return {
        "schema": SCHEMA,
        "spec": spec,
        "gpu": results.gpu,
        "date": results.date,
        "arch": results.plan["arch"],
        "tables": list(applied.tables),
        "steps": [
            {
                "key": one.step["key"],
                "stands_for": one.step["stands_for"],
                "present": one.present,
                "best": one.best,
                "winner": one.winner,
                "gain": round(one.gain, 5),
                "spread": round(one.spread, 5),
                "us": {name: round(us, 3) for name, us in one.us.items()},
                "failed": dict(one.failed),
                "missing": one.missing,
            }
            for one in applied.verdicts
        ],
    }


def run_all(spec: str, out: str, options: Options, minutes: float | None, shown: Shown) -> int:
    """Plan, measure on this machine's GPU, apply; returns the first exit code that is not 0."""
    folder = Path(out)
    code = run_plan(spec, out, options, shown.color)
    if code:
        return code
    results = folder / "results.json"
    limit = ["--minutes", str(minutes)] if minutes else []
    code = run_runtime("tune", [out, "--out", str(results), *limit])
    return code or run_apply(spec, str(results), shown)
