"""`kpipe verify FOLDER` on a GPU: every launch, every case of the suite, every mode; the evidence.

On a GPU the launches are judged one by one first, because a wrong kernel is found there with its
flags and rows; then whole layers run.  What was found is written beside the generated code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kpipe.runtime.compare import StageError, compare_trial
from kpipe.runtime.evidence import document, file_name, known_launches, text_of
from kpipe.runtime.layer import Layer
from kpipe.runtime.trial import run_case
from kpipe.runtime.verify_suite import (
    Agreement,
    NamedCase,
    agreements,
    run_methods,
    suite,
    worst_of,
)

Said = Callable[[str], None]


@dataclass(frozen=True)
class CaseReport:
    """A case that has run: its methods, how much was compared, what is beyond its bound."""

    named: NamedCase
    methods: tuple[str, ...] = ()
    compared: int = 0
    worst: StageError | None = None
    out_error: float = 0.0
    failures: tuple[StageError, ...] = ()
    raised: str = ""

    @property
    def ok(self) -> bool:
        """True where something was compared and everything is within its bounds."""
        return bool(self.compared) and not self.failures and not self.raised


@dataclass
class FullReport:
    """Everything that was found of one generated folder."""

    layer_class: type[Layer]
    arch: str
    backend: str
    gpu: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)
    launch_failures: list[str] = field(default_factory=list)
    without_case: tuple[str, ...] = ()
    skipped: int = 0  # launches with a record in a folder beside this one
    cases: list[CaseReport] = field(default_factory=list)
    agreements: tuple[Agreement, ...] = ()

    @property
    def ok(self) -> bool:
        """True where all of it is right."""
        parts = (not self.launch_failures, all(case.ok for case in self.cases))
        something = bool(self.cases or self.records or self.skipped)
        return all(parts) and all(one.ok for one in self.agreements) and something


def verify_all(
    layer_class: type[Layer],
    folder: Path,
    arch: str,
    backend: str,
    said: Said,
    *,
    again: bool,
    layers: bool = True,
) -> FullReport:
    """Launches (on a GPU), cases and modes of a layer; `said` is told what comes next.

    A launch of a kernel that stands with the same bytes in a folder beside this one, and has a
    record there, is not run again, unless `again` says so.  Without `layers` launches alone are
    run, those of a layer that lacks kernels too.
    """
    report = FullReport(layer_class, arch, backend)
    if backend == "cuda":
        from kpipe.runtime.launch_check import LaunchCheck  # needs the compiler

        report.gpu = torch.cuda.get_device_name()
        torch.manual_seed(torch.seed() % 2**31)
        known = frozenset() if again else known_launches(folder, report.gpu)
        check = LaunchCheck(layer_class, arch, known)
        check.run(said)
        report.skipped = check.skipped
        report.records, report.launch_failures = check.records, check.failures
        report.without_case = tuple(sorted(check.without_case))
    if not layers:
        return report
    for named in suite(layer_class, arch, backend):
        said(f"layers: {named.name}")
        report.cases.append(_run(layer_class, named))
    said("modes on the same inputs")
    report.agreements = agreements(layer_class, run_methods(layer_class, arch, backend))
    return report


def _run(layer_class: type[Layer], named: NamedCase) -> CaseReport:
    try:
        trials = run_case(layer_class, named.case)
        errors = tuple(compare_trial(trial) for trial in trials)
    except (ValueError, RuntimeError, AssertionError) as error:  # out of the layer's own ops
        return CaseReport(named, raised=f"{type(error).__name__}: {error}")
    every = [error for layer in errors for error in layer]
    return CaseReport(
        named,
        tuple(dict.fromkeys(trial.ranks[0].method for trial in trials)),
        len(every),
        worst_of(errors),
        max((error.error for error in every if error.what == "out"), default=float("inf")),
        tuple(error for error in every if not error.ok),
    )


def write_evidence(report: FullReport, folder: Path, out: Path | None) -> Path:
    """Writes the GPU's evidence of a folder, by default beside its code; returns the path."""
    path = out or folder / "evidence" / file_name(report.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    layers = [_layer_record(report, case) for case in report.cases]
    path.write_text(text_of(document(folder, report.gpu, report.records, layers)))
    return path


def _layer_record(report: FullReport, found: CaseReport) -> dict[str, Any]:
    case = found.named.case
    return {
        "case": found.named.name,
        "arch": report.arch,
        "q": case.q,
        "lengths": list(case.lengths),
        "layers": case.layers,
        "captured": case.captured,
        "methods": list(found.methods),
        "comparisons": found.compared,
        "out_error": found.out_error,
        "ok": found.ok,
    }


def as_text(report: FullReport) -> str:
    """The report for people; the verdict is the last line."""
    where = report.gpu or "this machine's CPU"
    lines = [f"{report.layer_class.NAME} on {report.arch}, {report.backend} backend, {where}"]
    if report.records:
        from kpipe.runtime.launch_check import summary

        lines += ["", "launches, eager and captured, against their oracles"]
        lines += [f"  {line}" for line in summary(report.records)]
        lines += [f"  WRONG: {text}" for text in report.launch_failures[:20]]
        lines += [f"  not judged, no case: {name}" for name in report.without_case]
    if report.skipped:
        lines += ["", f"{report.skipped} launches have a record in a folder beside this one"]
    lines += ["", "layers against the oracle"] if report.cases else []
    cells = [("case", "rows", "q", "layers", "out error", "nearest to its bound", "ok")]
    cells += [_cells(case) for case in report.cases]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells if report.cases else []:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(("  " + "  ".join(padded)).rstrip())
    for case in report.cases:
        lines += [f"  WRONG: {case.named.name}: {text}" for text in _wrong(case)]
    if report.agreements:
        lines += ["", "modes on the same inputs"]
        lines += [f"  {_agreement(one)}" for one in report.agreements]
    return "\n".join([*lines, "", verdict(report)])


def _cells(found: CaseReport) -> tuple[str, ...]:
    case = found.named.case
    rows = str(len(case.lengths) * case.q)
    if found.raised or found.worst is None:
        return found.named.name, rows, str(case.q), str(case.layers), "-", "-", "NO"
    worst = found.worst
    nearest = f"{worst.stage} {worst.what} {worst.error:.1e} of {worst.bound:.1e}"
    numbers = str(case.q), str(case.layers), f"{found.out_error:.1e}"
    return found.named.name, rows, *numbers, nearest, "yes" if found.ok else "NO"


def _wrong(found: CaseReport) -> list[str]:
    if found.raised:
        return [found.raised]
    return [
        f"{e.stage} {e.what}, rank {e.rank}: {e.error:.1e} of {e.bound:.1e}" for e in found.failures
    ]


def _agreement(one: Agreement) -> str:
    names = f"{one.second.lstrip('_')} against {one.first.lstrip('_')}"
    if one.same_ops:
        return f"{names}: the same ops, " + (
            "every bit of the output equal" if one.ok else f"WRONG: {one.error:.0f} values differ"
        )
    return f"{names}: other ops, output differs by {one.error:.1e} of {one.bound:.1e}" + (
        "" if one.ok else ", WRONG"
    )


def verdict(report: FullReport) -> str:
    """The last line: what all of it adds up to."""
    launches = f"{len(report.records)} launches, " if report.records else ""
    compared = sum(case.compared for case in report.cases)
    counts = f"{launches}{len(report.cases)} cases with {compared} comparisons"
    counts += f", {report.skipped} launches known" if report.skipped else ""
    counts += f", {len(report.agreements)} pairs of modes" if report.agreements else ""
    if report.ok:
        return f"ok: {counts}, all within their bounds"
    wrong = [
        f"{len(report.launch_failures)} launches" if report.launch_failures else "",
        f"{sum(not case.ok for case in report.cases)} cases",
        f"{sum(not one.ok for one in report.agreements)} pairs of modes",
    ]
    failed = ", ".join(text for text in wrong if text and not text.startswith("0 "))
    return f"FAILED: {failed} of {counts}"


def as_json(report: FullReport) -> str:
    """The report for programs, one object."""
    return json.dumps(
        {
            "pipeline": report.layer_class.NAME,
            "arch": report.arch,
            "backend": report.backend,
            "gpu": report.gpu,
            "launches": len(report.records),
            "launch_failures": report.launch_failures,
            "not_judged": list(report.without_case),
            "cases": [
                {**_layer_record(report, case), "wrong": _wrong(case)} for case in report.cases
            ],
            "modes": [
                {"first": a.first, "second": a.second, "same_ops": a.same_ops, "ok": a.ok}
                for a in report.agreements
            ],
            "ok": report.ok,
        },
        indent=2,
    )
