"""Captures planned schedules into CUDA graphs on this machine and writes down the graphs.

    python -m kpipe.runtime.verify_capture --plan plan.json --out captured.json [--dry-run]

Stand-ins take the place of the ops, with the overlap that the plan gives them.  With
`--layer FOLDER` the generated layer itself is captured as well, for every launch list that its
table selects here.  `kpipe verify-capture SPEC` writes the plan, and judges the graphs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from kpipe.runtime.host.graph import graph_json
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

PLAN, CAPTURED = "kpipe.capture_plan/1", "kpipe.captured/1"


def _capture(options: argparse.Namespace) -> int:
    from kpipe.runtime.schedules import execute

    plan = read_document(options.plan, PLAN)
    schedules = {one["key"]: from_json(one["schedule"]) for one in plan["lists"]}
    if options.dry_run:
        for schedule in schedules.values():
            lay_out(schedule, {})
        count = execute.check_kernels(list(schedules.values()), DRY_ARCH)
        print(f"{len(schedules)} launch lists, {count} kernels compiled for {DRY_ARCH}")
        return FINE
    from kpipe.runtime.host.machine import described

    machine = execute.Machine()
    found: dict[str, Any] = {"schema": CAPTURED, **described(), "pipeline": plan["pipeline"]}
    found["lists"] = []
    attempts = Attempts()
    for one in plan["lists"]:
        work = partial(_of_stand_ins, machine, one, schedules[one["key"]])
        found["lists"].append(attempts.run(work, key=one["key"], layer=False))
    _write(options, found, attempts)
    if options.layer:
        from kpipe.runtime.generated_folder import load_layer
        from kpipe.runtime.schedules.layers import capture_list, selected

        layer_class = load_layer(options.layer)
        for one, use in selected(plan, machine.arch):
            print(f"the layer: {one['key']} ...", flush=True)
            work = partial(capture_list, machine, layer_class, one, use)
            found["lists"].append(attempts.run(work, key=one["key"], layer=True))
            _write(options, found, attempts)
    print(f"{len(found['lists'])} graphs on {found['gpu']}: {options.out}")
    return attempts.code


def _of_stand_ins(machine: Any, one: Mapping[str, Any], schedule: Schedule) -> dict[str, Any]:
    graphs = [graph_json(graph) for graph in machine.run(schedule, 1, {}).graphs]
    return {"key": one["key"], "sha256": one["sha256"], "layer": False, "graphs": graphs}


def _write(options: argparse.Namespace, found: dict[str, Any], attempts: Attempts) -> None:
    found["lists"] = [one for one in found["lists"] if one is not None]
    write_document(options.out, {**found, "refused": attempts.refused})


def _options(argv: list[str]) -> argparse.Namespace:
    made = parser("kpipe.runtime.verify_capture", __doc__ or "", plan=True)
    made.add_argument("--layer", default="", metavar="FOLDER", help="e.g. generated/dsa_tp")
    return made.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(_options(sys.argv[1:]), _capture))
