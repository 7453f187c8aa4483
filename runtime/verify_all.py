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

from kpipe.runtime.case_report import Report, reported
from kpipe.runtime.evidence import document, file_name, kept_records, known_launches, text_of
from kpipe.runtime.layer import Layer
from kpipe.runtime.verify_suite import (
    Agreement,
    NamedCase,
    agreements,
    run_methods,
    suite,
)

Said = Callable[[str], None]


@dataclass(frozen=True)
class CaseReport:
    """A case of the suite: what was found, or the error that its layer raised instead."""

    named: NamedCase
    report: Report | None = None
    raised: str = ""

    @property
    def compared(self) -> int:
        """How many comparisons were made."""
        return len(self.report.checks) if self.report else 0

    @property
    def ok(self) -> bool:
        """True where something was compared and everything is within its bounds."""
        return self.report is not None and self.report.ok


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
    skipped: frozenset[str] = frozenset()  # launches with a record in a folder beside this one
    cases: list[CaseReport] = field(default_factory=list)
    agreements: tuple[Agreement, ...] = ()
    modes_raised: str = ""  # why modes could not be compared

    @property
    def ok(self) -> bool:
        """True where all of it is right."""
        parts = (not self.launch_failures, all(case.ok for case in self.cases))
        something = bool(self.cases or self.records or self.skipped)
        agreed = all(one.ok for one in self.agreements) and not self.modes_raised
        return all(parts) and agreed and something


def verify_all(
    layer_class: type[Layer],
    folder: Path,
    arch: str,
    backend: str,
    said: Said,
    *,
    again: bool,
    layers: bool = True,
    launched: Callable[[FullReport], object] = lambda report: None,
) -> FullReport:
    """Launches (on a GPU), cases and modes of a layer; `said` is told what comes next.

    A launch of a kernel that stands with the same bytes in a folder beside this one, and has a
    record there, is not run again, unless `again` says so.  Without `layers` launches alone are
    run, those of a layer that lacks kernels too.  `launched` gets the report ahead of whole
    layers on a GPU: they take minutes, and what ends them should not take the records.
    """
    report = FullReport(layer_class, arch, backend)
    if backend == "cuda":
        from kpipe.runtime.launch_check import LaunchCheck  # needs the compiler

        report.gpu = torch.cuda.get_device_name()
        torch.manual_seed(torch.seed() % 2**31)
        known = frozenset() if again else known_launches(folder, report.gpu)
        check = LaunchCheck(layer_class, arch, known)
        check.run(said)
        report.skipped = frozenset(check.skipped)
        report.records, report.launch_failures = check.records, check.failures
        report.without_case = tuple(sorted(check.without_case))
        if layers:
            launched(report)
    if not layers:
        return report
    for named in suite(layer_class, arch, backend):
        said(f"layers: {named.name}")
        report.cases.append(_run(layer_class, named))
        if not report.cases[-1].ok:
            said(f"  WRONG: {(_wrong(report.cases[-1]) or ['nothing compared'])[0]}")
    said("modes on the same inputs")
    try:
        report.agreements = agreements(layer_class, run_methods(layer_class, arch, backend))
    except (ValueError, RuntimeError, AssertionError) as error:  # what was found stays
        report.modes_raised = f"{type(error).__name__}: {error}"
    return report


def _run(layer_class: type[Layer], named: NamedCase) -> CaseReport:
    try:
        return CaseReport(named, reported(layer_class, named.case))
    except (ValueError, RuntimeError, AssertionError) as error:  # out of the layer's own ops
        return CaseReport(named, raised=f"{type(error).__name__}: {error}")


def write_evidence(report: FullReport, folder: Path, out: Path | None) -> Path:
    """Writes the GPU's evidence of a folder, by default beside its code; returns the path."""
    path = out or folder / "evidence" / file_name(report.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    layers = [_layer_record(report, case) for case in report.cases]
    kept = kept_records(folder, report.gpu, report.skipped)
    path.write_text(text_of(document(folder, report.gpu, [*report.records, *kept], layers)))
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
        "methods": list(dict.fromkeys(found.report.methods)) if found.report else [],
        "comparisons": found.compared,
        "out_error": found.report.out_error if found.report else 0.0,
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
        lines += ["", f"{len(report.skipped)} launches have a record in a folder beside this one"]
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
    if report.modes_raised:
        lines += ["", f"WRONG: modes on the same inputs: {report.modes_raised}"]
    return "\n".join([*lines, "", verdict(report)])


def _cells(found: CaseReport) -> tuple[str, ...]:
    case = found.named.case
    rows = str(len(case.lengths) * case.q)
    worst = found.report.worst if found.report else None
    if found.report is None or worst is None:
        return found.named.name, rows, str(case.q), str(case.layers), "-", "-", "NO"
    nearest = f"{worst.stage} {worst.what} {worst.error:.1e} of {worst.bound:.1e}"
    numbers = str(case.q), str(case.layers), f"{found.report.out_error:.1e}"
    return found.named.name, rows, *numbers, nearest, "yes" if found.ok else "NO"


def _wrong(found: CaseReport) -> list[str]:
    if found.report is None:
        return [found.raised]
    return [
        f"{e.stage} {e.what}, rank {e.rank}: {e.error:.1e} of {e.bound:.1e}"
        for _, e in found.report.failures
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
    counts += f", {len(report.skipped)} launches known" if report.skipped else ""
    counts += f", {len(report.agreements)} pairs of modes" if report.agreements else ""
    if report.ok:
        return f"ok: {counts}, all within their bounds"
    wrong = [
        f"{len(report.launch_failures)} launches" if report.launch_failures else "",
        f"{sum(not case.ok for case in report.cases)} cases",
        f"{sum(not one.ok for one in report.agreements)} pairs of modes",
        "the modes" if report.modes_raised else "",
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
            "modes_raised": report.modes_raised,
            "ok": report.ok,
        },
        indent=2,
    )
