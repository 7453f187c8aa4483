"""The generated layer beside the best composition of public kernels: one machine, one command.

    python bench/layer_peers.py FOLDER --peers DIR --peers-path PATH [--rows 1,4,16,64] [--out FILE]

FOLDER is a generated folder of the DSA layer under tensor parallelism (12 heads, 32K context);
DIR holds `peers.py`, whose StockDSALayer composes the layer from FlashMLA or FA3, DeepGEMM,
FlashInfer's tinygemm, cuBLAS and SGLang's top-k, and PATH the packages that it imports.  Both are
captured over layers with weights and caches of their own; medians in microseconds.  Ours are the
functions of `kpipe bench`.  The composition runs in a process of its own, because tinygemm does not
import beside CuTe DSL; the table on stdout is Markdown.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import kpipe
from kpipe.runtime.bench import LAYERS, Timing, document, graph_us, time_launches, time_layers
from kpipe.runtime.bench_inputs import build
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.host.launch import arch_of

CONTEXT = 32768
BEST = {"gemm": "tiny", "glue": "triton", "topk": "sgl", "overlap": True}
VARIANTS = {"flashmla": BEST, "fa3": {**BEST, "attn": "fa3"}}


def layers_of(rows: int) -> int:
    """Layers in a graph; three of 64 rows fill as much memory as four of the others."""
    return LAYERS if rows < 64 else LAYERS - 1


def free() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def time_ours(folder: str, rows: int) -> list[Timing]:
    """The layer of the generated folder, whole and launch by launch."""
    arch, count = arch_of(torch.device("cuda")), layers_of(rows)
    timed = build(load_layer(folder), arch=arch, rows=rows, q=1, context=CONTEXT, count=count)
    found = [time_layers(timed, CONTEXT), *time_launches(timed, CONTEXT)]
    del timed
    free()
    return found


def time_theirs(peers, options: dict, rows: int) -> tuple[float, float]:
    """Microseconds a layer of the composition, and its own error against float32."""
    count = layers_of(rows)
    layers = [peers.StockDSALayer(rows, CONTEXT, **options) for _ in range(count)]
    inputs = [peers.randn(rows, peers.HIDDEN) for _ in layers]
    layers[0].forward(inputs[0])
    torch.cuda.synchronize()
    error = layers[0].check(inputs[0])["out"]
    us = graph_us([lambda a=a, x=x: a.forward(x) for a, x in zip(layers, inputs, strict=True)])
    del layers, inputs
    free()
    return us, float(error)


def all_of_theirs(folder: Path, counts: list[int]) -> list[dict]:
    """Every variant at every number of rows; what does not load is left out and named."""
    sys.path.insert(0, str(folder))
    import peers

    records = []
    for rows in counts:
        for name, chosen in VARIANTS.items():
            try:
                us, error = time_theirs(peers, chosen, rows)
                records.append({"what": name, "rows": rows, "us": us, "error": error})
            except Exception as failure:  # a peer that does not load is no reason to stop
                print(f"{name}, {rows} rows: {type(failure).__name__}: {failure}"[:300])
                free()
    return records


def beside(options: argparse.Namespace) -> list[dict]:
    """What `all_of_theirs` finds in another process."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "theirs.json"
        words = [options.folder, "--child", "--peers", options.peers, "--rows", options.rows]
        command = [sys.executable, __file__, *map(str, words), "--out", str(file)]
        path = os.pathsep.join([options.peers_path, str(Path(next(iter(kpipe.__path__))).parent)])
        environment = {**os.environ, "PYTHONPATH": path}  # without CuTe DSL
        subprocess.run(command, check=True, env=environment)
        return json.loads(file.read_text())


def table(ours: list[Timing], theirs: list[dict], counts: list[int]) -> str:
    """Markdown: a row a line of what was timed, a column a number of rows."""

    def line(name: str, cells: list[str]) -> str:
        return f"| {name} | " + " | ".join(cells) + " |"

    whole = {t.rows: t for t in ours if t.what == "layer"}
    best = {r: min((e["us"] for e in theirs if e["rows"] == r), default=0.0) for r in counts}
    lines = [line("", [f"{r} rows" for r in counts]), "|---" * (len(counts) + 1) + "|"]
    lines.append(line("kpipe", [f"{whole[r].us:.1f}" for r in counts]))
    for name in VARIANTS:
        found = {e["rows"]: e["us"] for e in theirs if e["what"] == name}
        lines.append(line(name, [f"{found[r]:.1f}" if r in found else "-" for r in counts]))
    lines.append(line("faster by", [f"{best[r] / whole[r].us:.2f}" for r in counts]))
    lines.append(line("floor", [f"{whole[r].floor_us:.1f}" for r in counts]))
    for what in dict.fromkeys(t.what for t in ours if t.what != "layer"):
        found = {t.rows: t for t in ours if t.what == what}
        cells = [
            f"{found[r].us:.1f} ({100 * found[r].share:.0f})" if r in found else "-" for r in counts
        ]
        lines.append(line(what, cells))
    return "\n".join(lines)


def _cell(timing: Timing | None) -> str:
    """Microseconds, and in brackets percent of the floor."""
    return f"{timing.us:.1f} ({100 * timing.share:.0f})" if timing else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--peers", required=True, type=Path)
    parser.add_argument("--peers-path", default="", help="PYTHONPATH of the composition")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    counts = [int(word) for word in options.rows.split(",")]
    if options.child:
        options.out.write_text(json.dumps(all_of_theirs(options.peers, counts)))
        return 0
    ours = [timing for rows in counts for timing in time_ours(options.folder, rows)]
    theirs = beside(options)
    print(table(ours, theirs, counts))
    if options.out:
        arch = arch_of(torch.device("cuda"))
        made = document(ours, arch, Path(options.folder))
        found = {**made, "context": CONTEXT, "peers": theirs}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
