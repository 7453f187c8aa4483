"""Host time of a generated layer that is run eagerly: of a launch, and of a stream operation.

    python bench/host_time.py FOLDER [--rows 1,16] [--out FILE]

The thread that launches is timed, not the device: a few layers are queued, the device is waited for
outside of the time, and again. A launch is one op of the layer called with the operands of its
step; a stream operation is the pair of calls that makes one stream wait for another. Medians over
the rounds, microseconds; what a layer takes in all is told beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kpipe.runtime.bench import leave_out_others, middle
from kpipe.runtime.bench_inputs import TimedLayer, make_inputs
from kpipe.runtime.evidence import versions
from kpipe.runtime.generated_folder import launches, layer_of_step, load_layer
from kpipe.runtime.host.launch import arch_of
from kpipe.runtime.memory import Scratch

ROUNDS, QUEUED, CONTEXT = 200, 4, 4096


def host_us(run: Callable[[], object]) -> float:
    """Median microseconds of the host for one call, QUEUED of them at a time."""
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in range(QUEUED):
            run()
        found.append((time.perf_counter() - before) * 1e6 / QUEUED)
    return middle(found)


def stream_operation_us() -> float:
    """What it takes to let one stream wait for another."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    return host_us(lambda: side.wait_stream(main))


def figures(layer_class: type, rows: int) -> dict[str, object]:
    """A layer eagerly, and of each of its launches what it adds to a layer without launches."""
    arch = arch_of(torch.device("cuda"))
    made = make_inputs(layer_class, rows, 1, CONTEXT, torch.Generator("cuda").manual_seed(0))
    layer = layer_of_step(layer_class, arch, rows, 1)  # no kernels of other steps
    scratch = Scratch("cuda")
    layer.prepare(made.weights, made.caches, backend="cuda", arch=arch, layer=0, scratch=scratch)
    one = TimedLayer(layer, made.step, made)
    method = one.run()
    names = list(dict.fromkeys(op.name for op in launches(layer_class, method)))
    whole = host_us(one.run)
    empty = _with(one, "", host_us)
    alone = {name: _with(one, name, host_us) - empty for name in names}
    return {
        "rows": rows,
        "method": method,
        "layer_us": round(whole, 2),
        "without_launches_us": round(empty, 2),
        "launch_us": {name: round(us, 2) for name, us in alone.items()},
    }


def _with(one: TimedLayer, name: str, timed: Callable[[Callable[[], object]], float]) -> float:
    """The layer with that launch alone."""
    saved = leave_out_others(one.layer, name)
    try:
        return timed(one.run)
    finally:
        for other, ready in saved.items():
            setattr(one.layer, other, ready)


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", default="1,16", metavar="N,N,...")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: this machine has no CUDA device", file=sys.stderr)
        return 4
    layer_class = load_layer(options.folder)
    found = [figures(layer_class, int(word)) for word in options.rows.split(",")]
    document = {
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "stream_operation_us": round(stream_operation_us(), 2),
        "layers": found,
    }
    text = json.dumps(document, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
