"""The mailbox protocols of dsa_dcp for two, three and four ranks: states and seconds.

    python bench/mailbox_ranks.py [--out FILE]

Every distinct protocol of the launch lists, in both bounds that a check uses.  Two and three ranks
are searched, interleaving by interleaving; where a proof by order exists as well (`causal`), the
two have to agree.  Four ranks are proved by order.  Exits with 1 where a protocol is not proved.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kpipe.codegen.plan.api import plan_pipeline
from kpipe.codegen.proof.mailbox.causal import always_alike
from kpipe.codegen.proof.mailbox.explorer import SEARCHED, bounds_to_check, explore
from kpipe.codegen.proof.mailbox.protocol import Protocol, protocol_of
from kpipe.codegen.proof.mailbox.unrolled import unroll

SPEC = Path(__file__).resolve().parents[1] / "pipelines" / "dsa_dcp.yaml"
RANKS = (2, 3, 4)


def protocols() -> dict[Protocol, str]:
    """Distinct protocols, each with the mode in which it comes first."""
    pipeline = plan_pipeline(str(SPEC))
    found: dict[Protocol, str] = {}
    for method in pipeline.methods:
        found.setdefault(protocol_of(method.plan, pipeline), method.plan.mode)
    return found


def measure(protocol: Protocol, ranks: int) -> list[dict[str, Any]]:
    """Both bounds of one protocol."""
    rows: list[dict[str, Any]] = []
    for bounds in bounds_to_check(protocol, ranks):
        started = time.perf_counter()
        verdict = explore(protocol, bounds)
        seconds = time.perf_counter() - started
        rows.append(
            asdict(bounds)
            | {
                "proved": verdict.proved,
                "by": "search" if ranks <= SEARCHED else "order",
                "also_by_order": always_alike(unroll(protocol, bounds)),
                "states": verdict.states,
                "seconds": round(seconds, 3),
            }
        )
    return rows


def main() -> int:
    """Prints one line per number of ranks and writes the raw figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file of the raw numbers")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for ranks in RANKS:
        rows = [
            {"mode": mode, **row} for p, mode in protocols().items() for row in measure(p, ranks)
        ]
        states = [row["states"] for row in rows]
        seconds = [row["seconds"] for row in rows]
        print(
            f"{ranks} ranks  {sum(bool(row['proved']) for row in rows)} of {len(rows)} proved by "
            f"{rows[0]['by']}, {sum(bool(row['also_by_order']) for row in rows)} by order  "
            f"{min(states):,} to {max(states):,} states  "
            f"{min(seconds):.2f} to {max(seconds):.2f} s"
        )
        results += rows
    if options.out:
        raw = {
            "schema": "kpipe.bench.mailbox_ranks/1",
            "python": platform.python_version(),
            "machine": platform.machine(),
            "results": results,
        }
        options.out.write_text(json.dumps(raw, indent=2) + "\n")
    return int(not all(row["proved"] and row["also_by_order"] for row in results))


if __name__ == "__main__":
    sys.exit(main())
