"""One side of a counterexample: the ranks at once, with the fault or repaired, and what came of it.

Both times the rank that the explorer names is late at the launch that it names.  What they leave
is compared with the undelayed run, and that one with the oracle.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from kpipe.runtime.case_report import report_of
from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.comm.mailbox import MailboxTimeout
from kpipe.runtime.faults import Fault, Late, Unarmed, fewer_parities, install
from kpipe.runtime.generated_folder import geometry_of
from kpipe.runtime.late import HoldUp, Left, run_at_once, same_bits
from kpipe.runtime.layer import Layer
from kpipe.runtime.oracle.compare import declared_bounds, relative_error
from kpipe.runtime.prepared import Prepared, RankRun, rehearse_blank
from kpipe.runtime.trial import Case, Chain, at_once, run_case

LOG = logging.getLogger(__name__)  # where a run is: see watch.py

RIGHT, OTHER_BITS, WRONG, TIMEOUT, LOST = "right", "other bits", "wrong", "timeout", "lost"
"""Outcomes; `lost` is a run that did not come to its end."""

Entry = Mapping[str, Any]  # a trial as bench/counterexamples.py has written it
Result = dict[str, Any]


def lengths_of(top_k: int, rows: int, q: int) -> tuple[int, ...]:
    """Context lengths of the requests: four with more keys than top_k, the others short."""
    long = (2 * top_k + 60, top_k + 9, 2 * top_k + 1, top_k + 200)
    short = tuple(max(q, 7 * number % 71) for number in range(max(rows // q - len(long), 0)))
    return (*long, *short)[: rows // q]


def case_of(
    layer_class: type[Layer], entry: Entry, backend: str, build: Path | None = None
) -> Case:
    """What a trial runs, without its fault; `build` has its kernels, else they are compiled."""
    return Case(
        lengths_of(geometry_of(layer_class).top_k, entry["rows"], entry["q"]),
        entry["q"],
        entry["arch"],
        layers=entry["layers"],
        backend=backend,
        concurrent=backend == "cuda",
        build=build,
    )


@cache
def right_run(layer_class: type[Layer], case: Case) -> list[list[RankRun]]:
    """The undelayed run, [rank][layer]; ValueError where it is beyond the oracle's bounds."""
    trials = run_case(layer_class, case)
    report = report_of(layer_class, case, trials)
    if not report.ok:
        raise ValueError(f"the run without fault and delay is wrong: {report.worst}")
    return [list(of_rank) for of_rank in zip(*(trial.ranks for trial in trials), strict=True)]


def run_side(layer_class: type[Layer], entry: Entry, side: str, case: Case) -> Result:
    """The outcome of one side of a trial, and what shows it.

    Raises ValueError where the undelayed run is wrong, LayerError for what a layer refuses.
    """
    right = right_run(layer_class, case)
    fault, late = fault_of(entry[side]), Late(**entry["late"])
    # A store onto an unread word is what happens here, not an error of its own.
    group = at_once(layer_class, case, refuse_overwrite=False)
    for rank in range(group.ranks):
        fewer_parities(group.rank(rank), fault.parities)
    chain = Chain(layer_class, case)
    ready = chain.ready(chain.first(), group)
    install(ready, right, fault, late, HoldUp(group))
    result = {"id": entry["id"], "side": side}
    try:
        if isinstance(group, DeviceRanks):
            rehearse_blank(ready, group)
        left = run_at_once(ready, group)
    except MailboxTimeout as error:
        return {**result, "outcome": TIMEOUT, "said": str(error)}
    LOG.info("run, rank %d late at %s of layer %d", late.rank, late.op, late.layer)
    return {**result, **judged(left, ready, right)}


def fault_of(data: Mapping[str, Any]) -> Fault:
    """A fault as the file says it."""
    unarmed = tuple(Unarmed(**one) for one in data["unarmed"])
    return Fault(data["parities"], unarmed, tuple(data["left_out"]), tuple(data["given"]))


def judged(
    left: Left, ready: Sequence[Sequence[Prepared]], right: Sequence[Sequence[RankRun]]
) -> Result:
    """The outcome of a run that has come to its end.

    The undelayed run is within its bounds of the oracle, so what is twice a bound away from it is
    beyond that bound itself.  Of a wrong run also the first wrong layer, and the ranks that it is
    wrong on.
    """
    same, wrong = True, []
    bounds = declared_bounds()
    for rank, of_rank in enumerate(left):
        for number, (_, views) in enumerate(of_rank):
            kept, out = right[rank][number], ready[rank][number].step.out
            same &= same_bits(views, out, kept)
            pairs = {"gated": (views.gated, kept.views.gated), "out": (out, kept.out)}
            for what, (now, then) in pairs.items():
                error = relative_error(now.cpu(), then) / (2 * float(bounds[what]))
                if not error <= 1:
                    wrong.append((number, rank, what, error))
    if not wrong:
        return {"outcome": RIGHT if same else OTHER_BITS, "said": ""}
    layer = min(number for number, *_ in wrong)
    first = [one for one in wrong if one[0] == layer]
    ranks = sorted({rank for _, rank, *_ in first})
    _, rank, what, error = max(first, key=lambda one: one[-1])
    shown = f"{error:.1f} times what the bounds allow" if isfinite(error) else "not finite"
    said = f"{what} of layer {layer}, rank {rank}: {shown}"
    return {"outcome": WRONG, "said": said, "layer": layer, "ranks": ranks}


def as_it_must_be(result: Result) -> bool:
    """Whether a side came out as the explorer says."""
    if result["side"] == "control":
        return result["outcome"] == RIGHT
    return result["outcome"] in (WRONG, TIMEOUT)
