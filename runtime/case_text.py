"""The report of one case that `kpipe verify` has run, as text and as JSON."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

from kpipe.runtime.case_report import Report
from kpipe.runtime.compare import StageError


def as_text(report: Report) -> str:
    """The report for people: what ran, a table per layer, the verdict in the last line."""
    case, rows = report.case, len(report.case.lengths) * report.case.q
    ranks = ", ".join(map(str, report.ranks))
    graph = ", one CUDA graph" if case.captured else ""
    each = ", a process each" if case.processes else ""
    late = "" if case.late is None else f", late ranks of seed {case.late}"
    plural = "s" if len(report.ranks) > 1 else ""
    lines = [
        f"{report.layer_class.NAME} on {case.arch}, {case.backend} backend{graph}: rows {rows}, "
        f"q {case.q}, rank{plural} {ranks} of {report.layer_class.RANKS}{each}, seed {case.seed}"
        f"{late}",
        f"lengths {', '.join(map(str, case.lengths))}",
    ]
    for number, (method, errors) in enumerate(zip(report.methods, report.errors, strict=True)):
        lines += ["", f"layer {number}: {method}"]
        cells = [("stage", "what", "error", "bound", "rank", "ok"), *map(_cells, errors)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += [
            "  " + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
    return "\n".join([*lines, "", verdict(report)])


def verdict(report: Report) -> str:
    """The last line: what the comparisons add up to."""
    if not report.checks:
        return "FAILED: nothing was compared"
    if not report.failures:
        return f"ok: {len(report.checks)} comparisons, all within their bounds"
    named = [f"{e.stage} {e.what} (layer {n}, rank {e.rank})" for n, e in report.failures]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return (
        f"FAILED: {len(named)} of {len(report.checks)} comparisons beyond their bounds: "
        f"{', '.join(named[:3])}{more}"
    )


def as_json(report: Report) -> str:
    """The report for programs, one object; an error that is not finite is null."""
    case = report.case
    layers = [
        {"layer": number, "method": method, "checks": [_check(error) for error in errors]}
        for number, (method, errors) in enumerate(zip(report.methods, report.errors, strict=True))
    ]
    return json.dumps(
        {
            "pipeline": report.layer_class.NAME,
            "backend": case.backend,
            "captured": case.captured,
            "processes": case.processes,
            "arch": case.arch,
            "q": case.q,
            "lengths": list(case.lengths),
            "seed": case.seed,
            "stop_after": case.stop_after,
            "ranks": list(report.ranks),
            "of_ranks": report.layer_class.RANKS,
            "layers": layers,
            "ok": report.ok,
        },
        indent=2,
    )


def raised_text(error: Exception, form: str) -> str:
    """What is printed where the run ended with an error instead of a report."""
    text = f"{type(error).__name__}: {error}"
    text = "; ".join([text, *getattr(error, "__notes__", ())])
    return (
        json.dumps({"ok": False, "raised": text}, indent=2)
        if form == "json"
        else (f"FAILED: the layer raised {text}")
    )


def _cells(error: StageError) -> tuple[str, ...]:
    ok = "yes" if error.ok else "NO"
    numbers = f"{error.error:.1e}", f"{error.bound:.1e}"
    return error.stage, error.what, *numbers, str(error.rank), ok


def _check(error: StageError) -> dict[str, Any]:
    return {
        "stage": error.stage,
        "what": error.what,
        "error": error.error if isfinite(error.error) else None,
        "bound": error.bound,
        "rank": error.rank,
        "ok": error.ok,
        "reason": error.reason,
    }
