"""The whole generated layer beside the best composition of public kernels, on one machine.

    python bench/layer_peers.py FOLDER --peers DIR --peers-path PATH [--rows 1,4,16,64] [--out FILE]

FOLDER is a generated folder of the DSA layer under tensor parallelism (12 heads, 32K context);
DIR holds `peers.py`, whose StockDSALayer composes the layer from FlashMLA or FA3, DeepGEMM,
FlashInfer's tinygemm, cuBLAS and SGLang's top-k, and PATH the packages that it imports.  Both are
captured over layers with weights and caches of their own; medians are printed in microseconds.
The composition runs in a process of its own, because tinygemm does not import beside CuTe DSL.
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
from kpipe.runtime.bench import LAYERS, graph_us

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


def time_ours(folder: str, rows: int) -> float:
    """Microseconds a layer of the generated folder."""
    from kpipe.runtime.bench_inputs import build
    from kpipe.runtime.generated_folder import load_layer
    from kpipe.runtime.host.launch import arch_of

    arch = arch_of(torch.device("cuda"))
    count = layers_of(rows)
    timed = build(load_layer(folder), arch=arch, rows=rows, q=1, context=CONTEXT, count=count)
    result = graph_us([one.run for one in timed])
    del timed
    free()
    return result


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
    ours = [{"what": "kpipe", "rows": r, "us": time_ours(options.folder, r)} for r in counts]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "theirs.json"
        words = [options.folder, "--child", "--peers", options.peers, "--rows", options.rows]
        command = [sys.executable, __file__, *map(str, words), "--out", str(file)]
        path = os.pathsep.join([options.peers_path, str(Path(next(iter(kpipe.__path__))).parent)])
        environment = {**os.environ, "PYTHONPATH": path}  # without CuTe DSL
        subprocess.run(command, check=True, env=environment)
        theirs = json.loads(file.read_text())
    for own in ours:
        beside = {e["what"]: e["us"] for e in theirs if e["rows"] == own["rows"]}
        listed = "  ".join(f"{name} {us:.1f}" for name, us in beside.items())
        gain = min(beside.values(), default=float("nan")) / own["us"]
        print(f"{own['rows']:>3} rows  kpipe {own['us']:.1f}  {listed}  x{gain:.2f}")
    if options.out:
        gpu = torch.cuda.get_device_name()
        document = {"gpu": gpu, "context": CONTEXT, "records": [*ours, *theirs]}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
