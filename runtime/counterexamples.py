"""Counterexamples of the mailbox explorer, run: with the fault they go wrong, repaired they do not.

    python -m kpipe.runtime.counterexamples FILE [--folder generated/dsa_dcp_d2] [--out F]

`bench/counterexamples.py` writes FILE.  Each trial runs the layer's ranks at once, once with the
fault and once repaired, and both times the rank that the explorer names is late at the launch that
it names.  With the fault the results must be beyond the oracle's bounds, or a poll must give up;
repaired, the bits must be those of the undelayed run, which is compared with the oracle.  On a GPU
trials run in processes of their own, since a poll that gives up takes the device along.  Without
one the CPU's reference runs.  Exit code 1 where a trial is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kpipe.runtime.case_report import report_of
from kpipe.runtime.comm.mailbox import MailboxTimeout
from kpipe.runtime.faults import Fault, Late, Unarmed, fewer_parities, install
from kpipe.runtime.generated_folder import geometry_of, load_layer
from kpipe.runtime.late import HoldUp, Left, rehearse_at_once, run_at_once, same_bits
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.oracle.compare import declared_bounds, relative_error
from kpipe.runtime.prepared import Prepared, RankRun
from kpipe.runtime.schedules.trial_file import (
    ENVIRONMENT,
    FINDINGS,
    FINE,
    USAGE,
    UsageError,
    read_document,
    write_document,
)
from kpipe.runtime.trial import Case, Chain, at_once, run_case

PLAN, RUN = "kpipe.counterexamples/1", "kpipe.counterexamples_run/1"
SIDES = ("control", "fault")
RIGHT, OTHER_BITS, WRONG, TIMEOUT, LOST = "right", "other bits", "wrong", "timeout", "lost"
PROCESS_S = 560
"""What a process may take on a GPU; what has not come to its end by then runs in the next one."""

Trial = Mapping[str, Any]
Result = dict[str, Any]


def lengths_of(top_k: int, rows: int, q: int) -> tuple[int, ...]:
    """Context lengths of the requests: four with more keys than top_k, the others short."""
    long = (2 * top_k + 60, top_k + 9, 2 * top_k + 1, top_k + 200)
    short = tuple(max(q, 7 * number % 71) for number in range(max(rows // q - len(long), 0)))
    return (*long, *short)[: rows // q]


def case_of(layer_class: type[Layer], trial: Trial, backend: str) -> Case:
    """What a trial runs, without its fault."""
    lengths = lengths_of(geometry_of(layer_class).top_k, trial["rows"], trial["q"])
    cuda = backend == "cuda"
    return Case(
        lengths,
        trial["q"],
        trial["arch"],
        layers=trial["layers"],
        backend=backend,
        method=layer_class.TABLE[trial["arch"], trial["q"]][trial["rows"]],  # compiles that alone
        concurrent=cuda,
    )


@cache
def right_run(layer_class: type[Layer], case: Case) -> list[list[RankRun]]:
    """The undelayed run, [rank][layer]; RuntimeError where it is beyond the oracle's bounds."""
    trials = run_case(layer_class, case)
    report = report_of(layer_class, case, trials)
    if not report.ok:
        raise RuntimeError(f"the run without fault and delay is wrong: {report.worst}")
    return [list(of_rank) for of_rank in zip(*(trial.ranks for trial in trials), strict=True)]


def run_item(layer_class: type[Layer], trial: Trial, side: str, backend: str) -> Result:
    """One side of a trial: its outcome, and what shows it."""
    case = case_of(layer_class, trial, backend)
    right = right_run(layer_class, case)
    fault, late = fault_of(trial[side]), Late(**trial["late"])
    # A store onto an unread word is what happens here, not an error of its own.
    group = at_once(layer_class, case, refuse_overwrite=False)
    for rank in range(group.ranks):
        fewer_parities(group.rank(rank), fault.parities)
    chain = Chain(layer_class, case)
    ready = chain.ready(chain.first(), group)
    install(ready, right, fault, late, HoldUp(group))
    result = {"id": trial["id"], "side": side}
    try:
        rehearse_at_once(ready, group)
        left = run_at_once(ready, group)
    except MailboxTimeout as error:
        return {**result, "outcome": TIMEOUT, "said": str(error)}
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


Item = tuple[str, str]  # a trial's id, and the side


def items_of(trials: Sequence[Trial]) -> list[Item]:
    """Everything to run: what may lose the device comes last."""
    last = [one["id"] for one in trials if one["expects"] == TIMEOUT]
    first = [one["id"] for one in trials if one["id"] not in last]
    every = [(name, "control") for name in (*first, *last)]
    return every + [(name, "fault") for name in (*first, *last)]


def run_here(
    folder: Path, trials: Sequence[Trial], items: Sequence[Item], backend: str, lines: Path
) -> None:
    """Runs items in this process and adds each result to the file, until the device is lost."""
    layer_class = load_layer(folder)
    by_id = {one["id"]: one for one in trials}
    for name, side in items:
        try:
            result = run_item(layer_class, by_id[name], side, backend)
        except LayerError as error:  # for example a cluster that finds no room beside what polls
            result = {"id": name, "side": side, "outcome": LOST, "said": str(error)}
        with lines.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(text_of(result), file=sys.stderr)
        if backend == "cuda" and result["outcome"] == TIMEOUT:
            return


def run_apart(file: Path, folder: Path, items: Sequence[Item], lines: Path) -> None:
    """Runs items in processes that follow each other; what ends without a result is `lost`."""
    left = list(items)
    while left:
        known = len(results_in(lines))
        words = [f"{name}/{side}" for name, side in left]
        command = [sys.executable, "-m", "kpipe.runtime.counterexamples", str(file)]
        command += ["--folder", str(folder), "--backend", "cuda", "--lines", str(lines)]
        said = ""
        try:
            done = subprocess.run([*command, "--items", ",".join(words)], timeout=PROCESS_S)
            said = f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            said = f"no end within {PROCESS_S} s"
        found = {(one["id"], one["side"]) for one in results_in(lines)}
        left = [item for item in left if item not in found]
        if len(found) == known and left:
            name, side = left.pop(0)
            with lines.open("a") as out:
                lost = {"id": name, "side": side, "outcome": LOST, "said": said}
                out.write(json.dumps(lost) + "\n")


def results_in(lines: Path) -> list[Result]:
    """The results so far."""
    return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []


def text_of(result: Result) -> str:
    """One line."""
    mark = "ok" if as_it_must_be(result) else "FAILED"
    said = f": {result['said']}" if result["said"] else ""
    return f"{mark:6}  {result['id']}, {result['side']}: {result['outcome']}{said}"


def main(argv: Sequence[str]) -> int:
    """See the top of the file."""
    options = _parser().parse_args(argv)
    # Before CUDA starts: a queue that waits may not stand in a rank's way.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    try:
        document = read_document(options.file, PLAN)
        folder = options.folder or Path("generated") / document["pipeline"]
        load_layer(folder)
    except (UsageError, LayerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    backend, trials = options.backend, document["trials"]
    if backend == "auto":
        backend = "cuda" if torch.cuda.is_available() else "reference"
    if backend == "cuda" and not torch.cuda.is_available():
        print("error: this machine has no CUDA device; --backend reference", file=sys.stderr)
        return ENVIRONMENT
    if backend == "reference":
        for one in (one for one in trials if one["apart"]):
            print(f"left out: {one['id']}: it takes streams that run apart", file=sys.stderr)
        trials = [one for one in trials if not one["apart"]]
    trials = [one for one in trials if options.only in one["id"]]
    if options.items:
        items = [tuple(word.rsplit("/", 1)) for word in options.items.split(",")]
        run_here(folder, trials, items, backend, options.lines)
        return FINE
    with TemporaryDirectory() as temporary:
        lines = options.lines or Path(temporary) / "results"
        known = {(one["id"], one["side"]) for one in results_in(lines)}
        items = [item for item in items_of(trials) if item not in known]
        if backend == "cuda":
            run_apart(options.file, folder, items, lines)
        else:
            run_here(folder, trials, items, backend, lines)
        results = results_in(lines)
    return _told(document["pipeline"], backend, results, options.out)


def _told(pipeline: str, backend: str, results: Sequence[Result], out: Path | None) -> int:
    for result in sorted(results, key=lambda one: (one["id"], SIDES.index(one["side"]))):
        print(text_of(result))
    failed = [result for result in results if not as_it_must_be(result)]
    count = len({result["id"] for result in results})
    print(f"{count} trials, {len(results)} runs, {len(failed)} not as they must be")
    if out:
        machine: dict[str, Any] = {}
        if backend == "cuda":
            from kpipe.runtime.host.machine import described

            machine = described()
        head = {"schema": RUN, "pipeline": pipeline, "backend": backend, **machine}
        write_document(out, {**head, "results": list(results)})
    return FINDINGS if failed else FINE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kpipe.runtime.counterexamples", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("file", type=Path, help="what bench/counterexamples.py has written")
    parser.add_argument("--folder", type=Path, help="generated folder [default: by pipeline]")
    parser.add_argument("--backend", choices=("auto", "reference", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results as JSON")
    parser.add_argument("--only", default="", metavar="TEXT", help="trials with that in their name")
    parser.add_argument(
        "--lines", type=Path, metavar="FILE", help="results as they come; what is there stays"
    )
    parser.add_argument("--items", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
