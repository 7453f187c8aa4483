"""How long the command line takes: --help, an unchanged generate, a cold generate, a check.

    python bench/cli.py RESULT.json [--runs 15]

Each figure is the median wall time of whole processes, started one after the other, with
compiled sources in a private cache (as after an installation).  Wall times depend on the machine
and on what else it runs; the file says which machine, and beside each the processes' own time on a
core, which depends less on its neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PIPELINES = Path(__file__).resolve().parents[1] / "pipelines"
GOALS = {"help": 0.15, "unchanged": 0.25, "cold": 0.4}  # seconds
RUN = "import sys; from kpipe.codegen.cli import main; sys.argv[0] = 'kpipe'; main()"
PROBE = (
    "import sys\nfrom kpipe.codegen.cli import main\n"
    "try: main()\nexcept SystemExit: pass\n"
    "print('torch' in sys.modules, file=sys.stderr)\n"
)


def measure(
    words: list[str], runs: int, env: dict[str, str], cwd: Path, before: Callable[[], None]
) -> dict[str, object]:
    """Median, fastest and slowest of `runs` processes, the median of their time on a core, and
    whether torch was imported."""
    seconds, on_core = [], []
    for number in range(runs + 1):
        before()
        used, started = _on_core(), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", RUN, *words], env=env, cwd=cwd, capture_output=True, text=True
        )
        elapsed = time.perf_counter() - started
        if done.returncode:
            raise SystemExit(f"kpipe {' '.join(words)} failed:\n{done.stderr}")
        if number:  # the first fills the cache of compiled sources
            seconds.append(elapsed)
            on_core.append(_on_core() - used)
    before()
    probe = subprocess.run(
        [sys.executable, "-c", PROBE, *words], env=env, cwd=cwd, capture_output=True, text=True
    )
    return {
        "median_s": round(statistics.median(seconds), 4),
        "fastest_s": round(min(seconds), 4),
        "slowest_s": round(max(seconds), 4),
        "median_on_core_s": round(statistics.median(on_core), 4),
        "imports_torch": probe.stderr.splitlines()[-1] == "True",
    }


def _on_core() -> float:
    """Seconds on a core, user and system, of all processes that have been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        env = {**os.environ, "PYTHONPYCACHEPREFIX": str(root / "cache")}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        (root / "kpipe.toml").touch()
        spec = str(PIPELINES / "dsa_dcp.yaml")
        generate = ["generate", spec, "--out", str(root / "out")]

        def forget() -> None:
            for path in sorted((root / "out").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()

        def nothing() -> None:
            return None

        plan = (
            ("help", ["--help"], nothing),
            ("cold", generate, forget),
            ("unchanged", generate, nothing),
            ("check", ["check", spec], nothing),
            ("plan", ["plan", spec], nothing),
        )
        results = {
            name: measure(words, options.runs, env, root, before) for name, words, before in plan
        }
    payload = {
        "schema": "kpipe.bench.cli/1",
        "runs": options.runs,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 2),
        "goals_s": GOALS,
        "results": results,
    }
    options.result.write_text(json.dumps(payload, indent=2) + "\n")
    for name, result in results.items():
        goal = f"goal {GOALS[name]:.2f} s" if name in GOALS else ""
        torch = "torch imported" if result["imports_torch"] else "no torch"
        wall, core = result["median_s"], result["median_on_core_s"]
        print(f"{name:<10} {wall:.3f} s  on a core {core:.3f} s  {goal:<12}  {torch}")


if __name__ == "__main__":
    main()
