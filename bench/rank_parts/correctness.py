"""Whole layers against the oracle, stage by stage, as virtual ranks run them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from kpipe.runtime.case_report import Report, report_of
from kpipe.runtime.generated_folder import geometry_of
from kpipe.runtime.trial import Case, run_case
from rank_parts.rank import Rank


def cases(rank: Rank) -> dict[str, Case]:
    """By name; every number of rows is a declared one, so that only its kernels are compiled.

    All have one seed: their weights are made once (trial.py keeps them).
    """
    top_k = geometry_of(rank.layer_class).top_k
    edges = (0, 1, 63, 64, 65, top_k - 1, top_k, top_k + 1)
    many = tuple((request * 977 + 3) % (2 * top_k) for request in range(64))
    found = {
        "edges, 4 layers": _case(rank, edges, layers=4, replays=3),
        "edges, 3 layers": _case(rank, edges, layers=3),
        "edges, eager": replace(_case(rank, edges), captured=False),
        "q 4, 4 layers": _case(rank, (4, top_k + 2, 0, top_k + 900), 4, layers=4),
        "q 4, 3 layers, eager": replace(
            _case(rank, (top_k - 1, 70, 5, 0), 4, layers=3), captured=False
        ),
        "empty shards": _case(rank, (1, 0, 1, 1), layers=3),
        "64 rows": _case(rank, many),
    }
    if rank.quick:
        names = ("edges, 3 layers", "q 4, 3 layers, eager", "empty shards")
        found = {name: replace(found[name], layers=2) for name in names}
    return found


def _case(rank: Rank, lengths: tuple[int, ...], q: int = 1, **more: Any) -> Case:
    cuda = rank.on_gpus
    fitting = tuple(length if length == 0 else max(length, q) for length in lengths)
    return Case(
        fitting,
        q,
        rank.arch,
        backend="cuda" if cuda else "reference",
        captured=cuda,
        processes=True,
        method=rank.layer_class.TABLE[(rank.arch, q)][len(lengths) * q],
        **more,
    )


def run(rank: Rank) -> dict[str, Any]:
    """Every case; what was found of the ones so far is kept where a later one fails."""
    found: list[dict[str, Any]] = []
    for name, case in cases(rank).items():
        started = time.monotonic()
        trials = run_case(rank.layer_class, case, rank.group)
        if trials:
            report = report_of(rank.layer_class, case, trials)
            found.append(_record(name, report, time.monotonic() - started))
            rank.save("correctness", {"complete": False, "cases": found})
        rank.barrier(name)
    lines = [
        f"{one['case']}: {one['comparisons']} comparisons, out {one['out_error']:.1e}, "
        f"{'ok' if one['ok'] else 'WRONG: ' + '; '.join(one['wrong'])}"
        for one in found
    ]
    return {"ok": all(one["ok"] for one in found), "cases": found, "text": lines}


def _record(name: str, report: Report, seconds: float) -> dict[str, Any]:
    case = report.case
    return {
        "case": name,
        "q": case.q,
        "lengths": list(case.lengths),
        "layers": case.layers,
        "captured": case.captured,
        "methods": list(dict.fromkeys(report.methods)),
        "comparisons": len(report.checks),
        "out_error": report.out_error,
        "wrong": [
            f"layer {number}, {e.stage} {e.what}, rank {e.rank}: {e.error:.1e} of {e.bound:.1e}"
            for number, e in report.failures
        ],
        "ok": report.ok,
        "seconds": round(seconds, 1),
    }
