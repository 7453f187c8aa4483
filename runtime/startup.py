"""Measures how long a generated layer takes from the start of its process to its first step.

Each folder twice, in processes of their own: kernels compiled in `prepare()`, and loaded from a
build.  Where the folder has no build for the architecture one is made first, in a folder that is
thrown away, and its time is told.  Both must leave the same bits, eagerly and from a graph.
`python -m kpipe.runtime.startup FOLDER... --arch sm_90a
--out FILE`; needs a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTEXT = 4096
PHASES = ("imports", "inputs", "prepare", "first_step")


def once(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each phase in this process, which was started at `options.since`."""
    marks = [options.since]
    import torch

    from kpipe.runtime import bench_inputs
    from kpipe.runtime.generated_folder import load_layer

    layer_class = load_layer(options.folders[0])
    torch.cuda.init()
    marks.append(time.monotonic())
    prepare = layer_class.prepare
    seconds: list[float] = []

    def timed(prepared: Any, /, *records: Any, **named: Any) -> None:
        torch.cuda.synchronize()
        started = time.monotonic()
        prepare(prepared, *records, build=options.build or None, **named)
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)

    layer_class.prepare = timed
    rows, arch = options.rows, options.arch
    (one,) = bench_inputs.build(layer_class, arch=arch, rows=rows, q=1, context=CONTEXT, count=1)
    marks.append(time.monotonic())
    one.run()
    torch.cuda.synchronize()
    marks.append(time.monotonic())
    imports, both, step = (after - before for before, after in zip(marks, marks[1:], strict=False))
    phases = (imports, both - seconds[0], seconds[0], step)
    found = {name: round(value, 3) for name, value in zip(PHASES, phases, strict=True)}
    return found | {
        "total": round(marks[-1] - marks[0], 3),
        "compiler_imported": "cutlass" in sys.modules,
        "gpu": torch.cuda.get_device_name(),
        "out": _digest(one.step.out),
        "replayed": _digest(_replayed(one)),
    }


def _replayed(one: Any) -> Any:
    """What the step leaves when it is captured and replayed."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.run()
    one.step.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return one.step.out


def _digest(tensor: Any) -> str:
    """sha256 (hex) of a BF16 tensor's bits."""
    import torch

    words = tensor.view(torch.int16).cpu().flatten().tolist()
    return hashlib.sha256(repr(words).encode()).hexdigest()


def measure(folder: Path, arch: str, rows: int, repeat: int) -> dict[str, Any]:
    """Both ways of starting a folder's layer, `repeat` processes each, in turn.

    Raises RuntimeError with what a process says that fails.
    """
    from kpipe.runtime.aot.opened import default_folder

    build = default_folder(folder, arch)
    with tempfile.TemporaryDirectory(prefix="kpipe-startup-") as scratch:
        result: dict[str, Any] = {"folder": folder.name, "arch": arch, "rows": rows}
        if not build.is_dir():
            build, started = Path(scratch), time.monotonic()
            words = ["kpipe.runtime.build", str(folder), "--arch", arch, "--out", str(build)]
            result["build"] = _said(words).strip()
            result["build_seconds"] = round(time.monotonic() - started, 1)
        runs: dict[str, list[dict[str, Any]]] = {"compiled": [], "built": []}
        for _ in range(repeat):
            for how, path in (("compiled", ""), ("built", str(build))):
                words = ["kpipe.runtime.startup", str(folder), "--arch", arch, "--rows", str(rows)]
                words += ["--build", path, "--since", repr(time.monotonic())]
                runs[how].append(json.loads(_said(words).splitlines()[-1]))
        bits = {run[how] for found in runs.values() for run in found for how in ("out", "replayed")}
        result["same_bits"] = len(bits) == 1
        result["objects"] = len(list(build.glob("*.so")))
        result["bytes"] = sum(path.stat().st_size for path in build.glob("*.so"))
    return result | runs


def _said(words: list[str]) -> str:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr}{done.stdout}")
    return done.stdout


def lines(results: list[dict[str, Any]]) -> list[str]:
    """The fastest run of each kind as a table, seconds."""
    rows = [("seconds", "", *PHASES, "total")]
    for result in results:
        for how in ("compiled", "built"):
            best = min(result[how], key=lambda run: run["total"])
            cells = (f"{best[name]:.2f}" for name in (*PHASES, "total"))
            rows.append((result["folder"], how, *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def main(argv: list[str]) -> int:
    """Run the measurement; returns 0, 1 where a process failed or bits differ, 2 (usage) or 4
    (no device here)."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--arch", required=True)
    parser.add_argument("--rows", type=int, default=4, metavar="N", help="token rows of the step")
    parser.add_argument("--repeat", type=int, default=2, metavar="N", help="processes each")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--build", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--since", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.build is not None:
        print(json.dumps(once(options)))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("error: this machine has no CUDA device", file=sys.stderr)
        return 4
    try:
        results = [measure(f, options.arch, options.rows, options.repeat) for f in options.folders]
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.out:
        options.out.write_text(json.dumps({"runs": results}, indent=1) + "\n")
    print("\n".join(lines(results)))
    differing = [result["folder"] for result in results if not result["same_bits"]]
    for name in differing:
        print(f"error: {name}: compiled and built kernels leave different bits", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
