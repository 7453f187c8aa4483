"""Counterexamples of the mailbox explorer, run: with the fault they go wrong, repaired they do not.

    python -m kpipe.runtime.counterexamples P [--folder generated/dsa_dcp_d2] [--out F]

`bench/counterexamples.py` writes the folder P.  With the fault the results must be beyond the
oracle's bounds, or a poll must give up; repaired, the bits must be those of the undelayed run,
which is compared with the oracle.  On a GPU trials run in processes that follow each other, since
a poll that gives up takes the device along, and one that stands still is ended.  Without a GPU the
CPU's reference runs.  Exit code 1 where a trial is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kpipe.runtime.aot.manifest import BuildError
from kpipe.runtime.fault_trial import (
    LOST,
    TIMEOUT,
    Entry,
    Result,
    as_it_must_be,
    case_of,
    run_side,
)
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.schedules.trial_file import (
    ENVIRONMENT,
    FINDINGS,
    FINE,
    USAGE,
    UsageError,
    read_document,
    write_document,
)
from kpipe.runtime.watch import watched

LOG = logging.getLogger("kpipe.runtime.counterexamples")  # also where this file is the program

TRIALS, BUILD = "trials.json", "build"
"""What lies in the folder P; kernels are compiled where it has no build of them."""
PLAN, RUN = "kpipe.counterexamples/1", "kpipe.counterexamples_run/1"
SIDES = ("control", "fault")
PROCESS_S = 560
"""What a process may take on a GPU; that a trial stands still is seen sooner, by itself."""

Item = tuple[str, str]  # a trial's id, and the side


def items_of(trials: Sequence[Entry]) -> list[Item]:
    """Everything to run: what may lose the device comes last."""
    last = [one["id"] for one in trials if one["expects"] == TIMEOUT]
    first = [one["id"] for one in trials if one["id"] not in last]
    return [(name, side) for side in SIDES for name in (*first, *last)]


class Runner:
    """Runs sides of trials in this process and adds each result to a file of lines."""

    def __init__(
        self, layer_class: type[Layer], backend: str, build: Path | None, lines: Path
    ) -> None:
        self._layer_class, self._backend, self._lines = layer_class, backend, lines
        self._build = build

    def run(self, trials: Sequence[Entry], items: Sequence[Item]) -> None:
        """All of them, or until the device is lost."""
        by_id = {one["id"]: one for one in trials}
        for name, side in items:
            LOG.info("%s, %s ...", name, side)
            result, goes_on = self._result(by_id[name], side)
            add(result, self._lines)
            if not goes_on:
                return

    def _result(self, entry: Entry, side: str) -> tuple[Result, bool]:
        """A result, and whether the device is still there."""
        lost = {"id": entry["id"], "side": side, "outcome": LOST}
        try:
            result = self._side(entry, side)
        except ValueError as error:  # for example a cluster that finds no room beside what polls
            return {**lost, "said": str(error)}, True
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            return {**lost, "said": said}, self._backend != "cuda"
        return result, self._backend != "cuda" or result["outcome"] != TIMEOUT

    def _side(self, entry: Entry, side: str) -> Result:
        case = case_of(self._layer_class, entry, self._backend, self._build)
        try:
            return run_side(self._layer_class, entry, side, case)
        except BuildError as error:
            LOG.info("compiled here: %s", error)
            self._build = None
            return self._side(entry, side)


def run_apart(place: Path, folder: Path, items: Sequence[Item], lines: Path) -> None:
    """Runs items in processes that follow each other; what ends without a result is `lost`."""
    left = list(items)
    while left:
        before, well = len(results_in(lines)), False
        words = [f"{name}/{side}" for name, side in left]
        command = [sys.executable, "-m", "kpipe.runtime.counterexamples", str(place)]
        command += ["--folder", str(folder), "--backend", "cuda", "--lines", str(lines)]
        try:
            done = subprocess.run([*command, "--items", ",".join(words)], timeout=PROCESS_S)
            said, well = f"the process ended with {done.returncode}", done.returncode == FINE
        except subprocess.TimeoutExpired:
            said = f"no end within {PROCESS_S} s"
        found = {(one["id"], one["side"]) for one in results_in(lines)}
        left = [item for item in left if item not in found]
        if left and not (well and len(found) > before):  # the first of them was running
            name, side = left.pop(0)
            add({"id": name, "side": side, "outcome": LOST, "said": said}, lines)


def add(result: Result, lines: Path) -> None:
    """Keeps a result, and tells it."""
    with lines.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(text_of(result), file=sys.stderr, flush=True)


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
        document = read_document(options.place / TRIALS, PLAN)
        folder = options.folder or Path("generated") / document["pipeline"]
        layer_class = load_layer(folder)
        trials = _chosen(document["trials"], options.only)
    except (UsageError, LayerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    backend = options.backend
    if backend == "auto":
        backend = "cuda" if torch.cuda.is_available() else "reference"
    if backend == "cuda" and not torch.cuda.is_available():
        print("error: this machine has no CUDA device; --backend reference", file=sys.stderr)
        return ENVIRONMENT
    if options.items:
        build = options.place / BUILD
        runner = Runner(layer_class, backend, build if build.is_dir() else None, options.lines)
        items = [tuple(word.rsplit("/", 1)) for word in options.items.split(",")]
        with watched():
            runner.run(trials, items)
            sys.stdout.flush()
            os._exit(FINE)  # a device that is lost may keep what comes at the end waiting
    with TemporaryDirectory() as temporary:
        lines = options.lines or Path(temporary) / "results"
        items = _items_left(trials, lines, backend)
        if backend == "cuda":
            run_apart(options.place, folder, items, lines)
        else:
            Runner(layer_class, backend, None, lines).run(trials, items)
        results = results_in(lines)
    return _told(document["pipeline"], backend, results, options.out)


def _chosen(trials: Sequence[Entry], only: str) -> list[Entry]:
    """Trials with that text in their name; UsageError where there is none."""
    if chosen := [one for one in trials if only in one["id"]]:
        return chosen
    names = ", ".join(one["id"] for one in trials)
    raise UsageError(f"--only {only}: no such trial; there are {names}")


def _items_left(trials: Sequence[Entry], lines: Path, backend: str) -> list[Item]:
    """What has no result yet, without what takes streams that run apart where there are none."""
    known = {(one["id"], one["side"]) for one in results_in(lines)}
    if backend == "reference":
        for one in (one for one in trials if one["apart"]):
            print(f"left out: {one['id']}: it takes streams that run apart", file=sys.stderr)
        trials = [one for one in trials if not one["apart"]]
    return [item for item in items_of(trials) if item not in known]


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
    parser.add_argument("place", type=Path, metavar="P", help="what bench/counterexamples.py made")
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
