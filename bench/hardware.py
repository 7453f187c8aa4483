"""Everything that wants a GPU to look at: captured graphs, measured semantics, stressed schedules.

    python bench/hardware.py prepare PLANS              here: what is to be run
    python bench/hardware.py run PLANS --out DIR        on the machine with the GPU
    python bench/hardware.py judge DIR [--results DIR]  here: verdicts, and the files that are kept

`run` needs no library of the generator, goes on where one part fails, says how long each took, and
with `--dry-run` only compiles and lays out.  `judge` exits with 1 if one verdict is bad.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

PIPELINES = ("dsa_dcp", "dsa_tp")
LAYER = "dsa_tp"  # the pipeline whose kernels all exist; its layer takes longest and comes last
SECONDS = 120  # of one part
BENCH = Path(__file__).parent


def _kpipe(*words: str) -> list[str]:
    return [sys.executable, "-m", "kpipe.codegen.cli", *words]


def _module(name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", f"kpipe.runtime.{name}", *words]


def prepare(plans: Path) -> int:
    """Write the plans of captures and stressed schedules."""
    plans.mkdir(parents=True, exist_ok=True)
    commands = [
        _kpipe("verify-capture", f"pipelines/{name}.yaml", "--plan", str(plans / f"{name}.json"))
        for name in PIPELINES
    ]
    stress = [sys.executable, str(BENCH / "stress.py"), "plan", str(plans / "stress.json")]
    return _all([*commands, stress])


def run(plans: Path, out: Path, dry: bool) -> int:
    """Run every part; the files lie under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    more = ("--dry-run",) if dry else ()
    probe = _module("probe", "--out", str(out / "observed.json"), *more)
    files = "--plan", str(plans / "stress.json"), "--out", str(out / "stressed.json")
    commands = [probe, _module("stress", *files, *more)]
    for name in PIPELINES:
        layer = ("--layer", f"generated/{name}") if name == LAYER else ()
        files = "--plan", str(plans / f"{name}.json"), "--out", str(out / f"captured_{name}.json")
        commands.append(_module("verify_capture", *files, *layer, *more))
    return _all(commands)


def judge(out: Path, results: Path) -> int:
    """Judge every file that came back, and keep them under `results`."""
    results.mkdir(parents=True, exist_ok=True)
    table = str(results / "table_h200.json")
    commands = [_kpipe("probe", "--apply", str(out / "observed.json"), "--table", table)]
    for name in PIPELINES:
        captured = str(out / f"captured_{name}.json")
        commands.append(_kpipe("verify-capture", f"pipelines/{name}.yaml", "--captured", captured))
    stress = [sys.executable, str(BENCH / "stress.py"), "judge", str(out / "stressed.json")]
    for name in ("observed", *(f"captured_{name}" for name in PIPELINES)):
        if (out / f"{name}.json").is_file():
            shutil.copyfile(out / f"{name}.json", results / f"{name}_h200.json")
    return _all([*commands, [*stress, "--out", str(results / "stress_h200.json")]])


def _all(commands: list[list[str]]) -> int:
    worst, begin = 0, time.monotonic()
    for command in commands:
        print(f"$ {' '.join(command[1:])}", flush=True)
        start = time.monotonic()
        try:
            code = subprocess.run(command, check=False, timeout=SECONDS).returncode
        except subprocess.TimeoutExpired:
            print(f"not done after {SECONDS} s", flush=True)
            code = 1
        worst = worst or code
        print(f"exit {code} after {time.monotonic() - start:.1f} s", flush=True)
    print(f"{len(commands)} parts in {time.monotonic() - begin:.1f} s", flush=True)
    return worst


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("prepare")
    verb.add_argument("plans", type=Path)
    verb = verbs.add_parser("run")
    verb.add_argument("plans", type=Path)
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--dry-run", action="store_true")
    verb = verbs.add_parser("judge")
    verb.add_argument("out", type=Path)
    verb.add_argument("--results", type=Path, default=Path("build/hardware"))
    options = parser.parse_args()
    if options.verb == "prepare":
        return prepare(options.plans)
    if options.verb == "run":
        return run(options.plans, options.out, options.dry_run)
    return judge(options.out, options.results)


if __name__ == "__main__":
    sys.exit(main())
