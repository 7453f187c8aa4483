"""Measures what programmatic launches, events and graphs do on this machine's GPU.

    python -m kpipe.runtime.probe --out observed.json [--rows 2,10] [--dry-run]

`kpipe probe --apply observed.json` turns the observations into a table of semantics.  Takes a few
seconds; needs no compiler but CuTe DSL.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

from kpipe.runtime.host.graph import graph_json
from kpipe.runtime.schedules.form import as_json
from kpipe.runtime.schedules.memory import lay_out, long_launches
from kpipe.runtime.schedules.rows import EXPERIMENTS, FIRST, LAST, LATE_US, Experiment
from kpipe.runtime.schedules.trial_file import (
    DRY_ARCH,
    FINE,
    Attempts,
    UsageError,
    main,
    parser,
    write_document,
)

SCHEMA = "kpipe.observed/1"
GRAPH_REPETITIONS = 40


def _probe(options: argparse.Namespace) -> int:
    from kpipe.runtime.schedules import execute

    wanted = _chosen(options.rows)
    if options.dry_run:
        schedules = [one.schedule(mode) for one in wanted for mode in one.modes]
        for one in wanted:
            for mode in one.modes:
                lay_out(one.schedule(mode), _delays(one, mode))
        count = execute.check_kernels(schedules, DRY_ARCH)
        print(f"{len(schedules)} schedules, {count} kernels compiled for {DRY_ARCH}")
        return FINE
    from kpipe.runtime.host.machine import described
    from kpipe.runtime.schedules.graph_trials import graph_trials

    machine = execute.Machine()
    observed: dict[str, Any] = {"schema": SCHEMA, **described(), "late_us": LATE_US}
    attempts, repetitions = Attempts(), options.repetitions
    seen = [
        attempts.run(partial(_observe, machine, one, mode, repetitions), row=one.row, mode=mode)
        for one in wanted
        for mode in one.modes
    ]
    observed["experiments"] = [item for item in seen if item is not None]
    observed["refused"] = attempts.refused
    write_document(options.out, observed)  # what is known already
    if not options.rows:
        observed["graph_trials"] = graph_trials(machine, repetitions or GRAPH_REPETITIONS)
        write_document(options.out, observed)
    print(f"{len(observed['experiments'])} experiments on {observed['gpu']}: {options.out}")
    return attempts.code


def _observe(machine: Any, one: Experiment, mode: str, repetitions: int | None) -> dict[str, Any]:
    from kpipe.runtime.schedules.graph_trials import early_and_stale

    schedule = one.schedule(mode)
    seen = machine.run(schedule, repetitions or one.repetitions, _delays(one, mode))
    early, stale = early_and_stale(seen)
    names = [launch.name for launch in schedule.launches]
    return {
        "row": one.row,
        "chain": one.chain,
        "mode": mode,
        "repetitions": seen.repetitions,
        "early": early,
        "stale": stale,
        "stale_words": sum(
            words for look, words in zip(seen.looks, seen.words, strict=True) if not look.early
        ),
        "first": names.index(FIRST),
        "last": names.index(LAST),
        "schedule": as_json(schedule),
        "looks": [asdict(look) for look in seen.looks],
        "graphs": [graph_json(graph) for graph in seen.graphs],
    }


def _delays(one: Experiment, mode: str) -> dict[tuple[int, bool], int]:
    return long_launches(one.schedule(mode), one.long, LATE_US)


def _chosen(rows: str) -> list[Experiment]:
    if not rows:
        return list(EXPERIMENTS)
    wanted = rows.split(",")
    known = {one.row for one in EXPERIMENTS}
    for row in wanted:
        if row not in known:
            raise UsageError(f"--rows: no row {row!r}")
    return [one for one in EXPERIMENTS if one.row in wanted]


def _options(argv: list[str]) -> argparse.Namespace:
    made = parser("kpipe.runtime.probe", __doc__ or "", plan=False)
    made.add_argument("--rows", default="", metavar="ID,ID,...", help="only these rows")
    return made.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(_options(sys.argv[1:]), _probe))
