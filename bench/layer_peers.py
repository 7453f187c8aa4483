"""The whole generated layer beside the best composition of public kernels, in one process.

    python bench/layer_peers.py FOLDER --peers DIR [--rows 1,4,16,64] [--out FILE]

FOLDER is a generated folder of the DSA layer under tensor parallelism (12 heads, 32K context);
DIR holds `peers.py`, whose StockDSALayer composes the layer from FlashMLA or FA3, DeepGEMM,
FlashInfer's tinygemm, cuBLAS and SGLang's top-k.  Both are captured over layers with weights and
caches of their own, timed alternately, twice; the medians are printed in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path

import torch

from kpipe.runtime.bench import LAYERS, graph_us
from kpipe.runtime.bench_inputs import build
from kpipe.runtime.host.launch import arch_of
from kpipe.runtime.trial import load_layer

CONTEXT = 32768
BEST = {"gemm": "tiny", "glue": "triton", "topk": "sgl", "overlap": True}
VARIANTS = {"flashmla": BEST, "fa3": {**BEST, "attn": "fa3"}}


def free() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def time_ours(folder: str, rows: int) -> float:
    """Microseconds a layer of the generated folder."""
    layer_class = load_layer(folder)
    arch = arch_of(torch.device("cuda"))
    count = LAYERS if rows < 64 else LAYERS - 1
    timed = build(layer_class, arch=arch, rows=rows, q=1, context=CONTEXT, count=count)
    result = graph_us([one.run for one in timed])
    del timed
    free()
    return result


def time_theirs(peers, options: dict, rows: int) -> tuple[float, float]:
    """Microseconds a layer of the composition, and its own error against float32."""
    count = LAYERS if rows < 64 else LAYERS - 1
    layers = [peers.StockDSALayer(rows, CONTEXT, **options) for _ in range(count)]
    inputs = [peers.randn(rows, peers.HIDDEN) for _ in layers]
    layers[0].forward(inputs[0])
    torch.cuda.synchronize()
    error = layers[0].check(inputs[0])["out"]
    us = graph_us([lambda a=a, x=x: a.forward(x) for a, x in zip(layers, inputs, strict=True)])
    del layers, inputs
    free()
    return us, float(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--peers", required=True, type=Path)
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(options.peers))
    import peers

    records = []
    for rows in map(int, options.rows.split(",")):
        ours = [time_ours(options.folder, rows)]
        theirs: dict[str, float] = {}
        for name, chosen in VARIANTS.items():
            try:
                theirs[name], error = time_theirs(peers, chosen, rows)
                records.append({"what": name, "rows": rows, "us": theirs[name], "error": error})
            except Exception as failure:  # noqa: BLE001 - a peer that does not load is left out
                print(f"{name}, {rows} rows: {type(failure).__name__}: {failure}"[:300])
                free()
        ours.append(time_ours(options.folder, rows))
        records.append({"what": "kpipe", "rows": rows, "us": min(ours), "both": ours})
        best = min(theirs.values(), default=float("nan"))
        listed = "  ".join(f"{name} {us:.1f}" for name, us in theirs.items())
        print(
            f"{rows:>3} rows  kpipe {ours[0]:.1f} {ours[1]:.1f}  {listed}  x{best / min(ours):.2f}"
        )
    if options.out:
        document = {"gpu": torch.cuda.get_device_name(), "context": CONTEXT, "records": records}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
