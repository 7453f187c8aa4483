"""Captures planned schedules into CUDA graphs on this machine and writes down the graphs.

    python -m kpipe.runtime.verify_capture --plan plan.json --out captured.json [--dry-run]

Stand-ins take the place of the ops, with the overlap that the plan gives them.  With
`--layer FOLDER` the generated layer itself is captured as well, for every launch list that its
table selects here.  `kpipe verify-capture SPEC` writes the plan, and judges the graphs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kpipe.runtime.host.graph import graph_json
from kpipe.runtime.schedules.form import from_json
from kpipe.runtime.schedules.memory import lay_out
from kpipe.runtime.schedules.trial_file import (
    DRY_ARCH,
    FINE,
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
    for one in plan["lists"]:
        seen = machine.run(schedules[one["key"]], 1, {})
        graphs = [graph_json(graph) for graph in seen.graphs]
        found["lists"].append(
            {"key": one["key"], "sha256": one["sha256"], "layer": False, "graphs": graphs}
        )
    write_document(options.out, found)
    if options.layer:
        from kpipe.runtime.schedules.layers import capture_layers

        found["lists"] += capture_layers(machine, options.layer, plan)
        write_document(options.out, found)
    print(f"{len(found['lists'])} graphs on {found['gpu']}: {options.out}")
    return FINE


def _options(argv: list[str]) -> argparse.Namespace:
    made = parser("kpipe.runtime.verify_capture", __doc__ or "", plan=True)
    made.add_argument("--layer", default="", metavar="FOLDER", help="e.g. generated/dsa_tp")
    return made.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(_options(sys.argv[1:]), _capture))
