"""Runs racy and repaired schedules with one launch held up, and counts the wrong values seen.

    python -m kpipe.runtime.stress --plan stress.json --out stressed.json [--dry-run]

`bench/stress.py` writes the plan and judges what comes back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from kpipe.runtime.schedules.form import Schedule, from_json
from kpipe.runtime.schedules.memory import lay_out
from kpipe.runtime.schedules.trial_file import (
    DRY_ARCH,
    FINE,
    Attempts,
    main,
    parser,
    read_document,
    write_document,
)

PLAN, STRESSED = "kpipe.stress/1", "kpipe.stressed/1"
REPETITIONS = 20


def _stress(options: argparse.Namespace) -> int:
    from kpipe.runtime.schedules import execute

    plan = read_document(options.plan, PLAN)
    trials = [(trial, *_ready(trial)) for trial in plan["trials"]]
    if options.dry_run:
        for _, schedule, delays, holds in trials:
            lay_out(schedule, delays, holds)
        count = execute.check_kernels([schedule for _, schedule, *_ in trials], DRY_ARCH)
        print(f"{len(trials)} trials, {count} kernels compiled for {DRY_ARCH}")
        return FINE
    from kpipe.runtime.host.machine import described

    machine = execute.Machine()
    results, attempts = [], Attempts()
    repetitions = options.repetitions or REPETITIONS
    for trial, schedule, delays, holds in trials:
        work = partial(machine.run, schedule, repetitions, delays, holds)
        seen = attempts.run(work, id=trial["id"])
        if seen is None:
            continue
        results.append(
            {
                "id": trial["id"],
                "repetitions": seen.repetitions,
                "wrong": seen.any,
                "wrong_reads": sum(seen.words),
                "wrong_at_the_end": seen.final,
            }
        )
    head = {"schema": STRESSED, **described()}
    write_document(options.out, {**head, "results": results, "refused": attempts.refused})
    print(f"{len(results)} trials: {options.out}")
    return attempts.code


def _ready(
    trial: Mapping[str, Any],
) -> tuple[Schedule, dict[tuple[int, bool], int], dict[int, int]]:
    delays = {(position, early): us for position, early, us in trial["delays"]}
    return from_json(trial["schedule"]), delays, dict(trial["holds"])


if __name__ == "__main__":
    arguments = parser("kpipe.runtime.stress", __doc__ or "", plan=True).parse_args(sys.argv[1:])
    sys.exit(main(arguments, _stress))
