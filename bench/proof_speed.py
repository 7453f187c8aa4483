"""How long the proof of one schedule takes, in milliseconds.

    python bench/proof_speed.py [--runs 5] [--out FILE]

For 60, 480 and 4,000 launches of a decode-like schedule, eager and captured: edges and closure,
the search for conflicts, and both, as the fastest of `runs`.  The last column has a kernel in
each layer that never waits, so that races are found and judged.  Goal: 4,000 launches under 1 s.

Then every shipped pipeline: the proof of all its launch lists, and its mailbox protocols explored
for the first time, with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "proof"))

from proof_decode import decode  # noqa: E402

from kpipe.codegen.plan.api import plan_pipeline  # noqa: E402
from kpipe.codegen.proof.kept import forget  # noqa: E402
from kpipe.codegen.proof.mailboxes import mailbox_findings  # noqa: E402
from kpipe.codegen.proof.order import Order  # noqa: E402
from kpipe.codegen.proof.prove import orders, prove  # noqa: E402
from kpipe.codegen.proof.races import check, scan  # noqa: E402

SIZES = (60, 480, 4000)
GOAL_MS = 1000.0  # for the largest size


def fastest(runs: int, work: Callable[[Any], object], fresh: Callable[[], Any]) -> float:
    """The shortest wall time of `runs` calls, in milliseconds, each with what `fresh` makes anew
    and with nothing kept from an earlier one."""
    times = []
    for _ in range(runs):
        given = fresh()
        forget()
        started = time.perf_counter()
        work(given)
        times.append(time.perf_counter() - started)
    return 1000 * min(times)


def shipped(runs: int) -> list[dict[str, object]]:
    """The proof of each shipped pipeline: what it covers, fastest and slowest of `runs`, in ms."""
    found: list[dict[str, object]] = []
    for path in sorted((ROOT / "pipelines").glob("*.yaml")):
        pipeline = plan_pipeline(str(path))
        with tempfile.TemporaryDirectory() as empty:
            os.environ["XDG_CACHE_HOME"] = empty
            explored = fastest(1, mailbox_findings, lambda given=pipeline: given)
            times = [fastest(1, prove, lambda given=pipeline: given) for _ in range(runs)]
            proved = prove(pipeline)
        found.append(
            {
                "pipeline": path.stem,
                "lists": len(pipeline.methods),
                "programs": len(proved.programs),
                "orders": orders(proved),
                "fastest_ms": round(min(times), 1),
                "slowest_ms": round(max(times), 1),
                "first_mailboxes_ms": round(explored, 1),
            }
        )
        print(*(f"{name} {value}" for name, value in found[-1].items()), sep="  ")
    return found


def main() -> int:
    """Prints the table; 1 if the largest schedule misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file of the raw numbers")
    options = parser.parse_args()
    runs = options.runs
    results = []
    print(f"{'launches':>8} {'mode':>9} {'order':>9} {'conflicts':>9} {'check':>9} {'racy':>9}")
    worst = 0.0
    for size in SIZES:
        for captured in (False, True):
            safe = partial(decode, size, captured)
            parts = (
                fastest(runs, Order, safe),
                fastest(runs, scan, lambda given=safe: Order(given())),
                fastest(runs, check, safe),
                fastest(1, check, partial(safe, waits=False)),
            )
            mode = "captured" if captured else "eager"
            count = len(safe().launches)
            print(f"{count:>8} {mode:>9}", *(f"{part:>9.2f}" for part in parts))
            names = ("order_ms", "conflicts_ms", "check_ms", "racy_check_ms")
            times = {name: round(part, 4) for name, part in zip(names, parts, strict=True)}
            results.append({"launches": count, "mode": mode, **times})
            worst = max(worst, parts[2])
    pipelines = shipped(runs)
    if options.out:
        raw = {
            "schema": "kpipe.bench.proof_speed/1",
            "python": platform.python_version(),
            "machine": platform.machine(),
            "runs": runs,
            "goal_ms": GOAL_MS,
            "results": results,
            "pipelines": pipelines,
        }
        options.out.write_text(json.dumps(raw, indent=2) + "\n")
    return int(worst > GOAL_MS)


if __name__ == "__main__":
    sys.exit(main())
