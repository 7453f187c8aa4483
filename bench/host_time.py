"""Host time of a generated layer that is run eagerly: of a launch, and of a stream operation.

    python bench/host_time.py FOLDER [--rows 1,16] [--out FILE]
    python bench/host_time.py FOLDER --stub            # no GPU: kernels that do nothing

The thread that launches is timed, not the device: some calls are queued, the device is waited for
outside of the time, and again. Microseconds, the median of the rounds and their lowest decile.

A launch is one op of the layer, called again and again with the operands that a step hands to it;
a stream operation is the pair of calls that makes one stream wait for another. `idle` is the same
with kernels that do nothing: `ffi`, behind the calling convention of compiled ones, and `python`,
a function, so that what is left is this project's own Python. With --stub these two are all there
is, on tensors of the host, without the cost of streams and launches.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from host_parts.idle import idle_kernels, nothing, through_ffi, without_device
from host_parts.timed import QUEUED, ROUNDS, host_us

from kpipe.runtime.bench import leave_out_others
from kpipe.runtime.bench_inputs import Inputs, TimedLayer, make_inputs
from kpipe.runtime.evidence import versions
from kpipe.runtime.generated_folder import launches, layer_of_step, load_layer
from kpipe.runtime.host.launch import arch_of
from kpipe.runtime.layer import Layer
from kpipe.runtime.memory import Scratch
from kpipe.runtime.metadata import LayerError

CONTEXT = 512
STUB_ARCH = "sm_90a"


class Machine:
    """Where the host is timed: the GPU of this machine, or the host alone."""

    def __init__(self, stub: bool, rounds: int = ROUNDS) -> None:
        self.stub, self.rounds = stub, rounds
        self.device = "cpu" if stub else "cuda"
        self.arch = STUB_ARCH if stub else arch_of(torch.device("cuda"))

    def idle(self) -> None:
        """Returns when the device has nothing left to do."""
        if not self.stub:
            torch.cuda.synchronize()

    def host_us(self, run: Callable[[], object], queued: int = QUEUED) -> dict[str, float]:
        """Median and lowest decile of one call's microseconds, as they are written down."""
        return host_us(run, self.idle, queued, self.rounds).told()

    def prepared(self, layer_class: type[Layer], inputs: Inputs, kernel: Any = None) -> TimedLayer:
        """A layer that launches `kernel` in place of its own, where one is given."""
        rows = inputs.step.rows
        layer = layer_of_step(layer_class, self.arch, rows, 1)  # no kernels of other steps
        how = {"backend": "cuda", "arch": self.arch, "scratch": Scratch(self.device)}
        with ExitStack() as stack:
            if kernel is not None:
                stack.enter_context(idle_kernels(kernel))
                how["build"] = None  # a build has kernels of its own
            layer.prepare(inputs.weights, inputs.caches, **how)
        return TimedLayer(layer, inputs.step, inputs)


def stream_operation_us(machine: Machine) -> dict[str, float]:
    """What it takes to let one stream wait for another."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    return machine.host_us(lambda: side.wait_stream(main))


def figures(machine: Machine, layer_class: type[Layer], rows: int) -> dict[str, Any]:
    """One number of rows: a layer as it is, where there is a device, and with idle kernels."""
    generator = torch.Generator(machine.device).manual_seed(0)
    inputs = make_inputs(layer_class, rows, 1, CONTEXT, generator)
    found: dict[str, Any] = {"rows": rows}
    if not machine.stub:
        found.update(times(machine, machine.prepared(layer_class, inputs)))
    kernels = {"ffi": through_ffi(), "python": nothing}
    found["idle"] = {
        name: times(machine, machine.prepared(layer_class, inputs, kernel))
        for name, kernel in kernels.items()
    }
    return found


def times(machine: Machine, one: TimedLayer) -> dict[str, Any]:
    """The whole layer, the layer without its launches, and each launch alone."""
    calls = operands_of(one)
    found: dict[str, Any] = {"layer_us": machine.host_us(one.run, queued=4)}
    saved = leave_out_others(one.layer, "")
    try:
        found["without_launches_us"] = machine.host_us(one.run)
    finally:
        _put_back(one.layer, saved)
    found["launch_us"] = {name: host_us(call, machine.idle).told() for name, call in calls.items()}
    return found


def operands_of(one: TimedLayer) -> dict[str, Callable[[], object]]:
    """Each launch of the step as a call of its own, in host order, by the op's name.

    The layer runs once, and what it hands to its ops is kept.
    """
    layer, calls = one.layer, {}

    def kept(name: str, ready: Callable[..., object]) -> Callable[..., object]:
        def call(*operands: Any, **named: Any) -> object:
            calls[name] = lambda: ready(*operands, **named)
            return ready(*operands, **named)

        return call

    method = layer.TABLE[layer.arch, one.step.q][layer.declared_rows(one.step)]
    saved = {op.name: getattr(layer, op.name) for op in launches(type(layer), method)}
    for name, ready in saved.items():
        setattr(layer, name, kept(name, ready))
    try:
        one.run()
    finally:
        _put_back(layer, saved)
    return calls


def _put_back(layer: Layer, saved: dict[str, Callable[..., object]]) -> None:
    for name, ready in saved.items():
        setattr(layer, name, ready)


def table(document: dict[str, Any]) -> str:
    """The medians and lowest deciles that a run has found, for a reader."""
    lines = []
    if "stream_operation_us" in document:
        lines.append(f"stream operation  {_cell(document['stream_operation_us'])}")
    for at in document["layers"]:
        columns = {"kernels": at} if "layer_us" in at else {}
        columns |= {f"idle, {name}": found for name, found in at["idle"].items()}
        lines.append(f"rows {at['rows']}: us, median / lowest decile")
        lines.append(" " * 24 + "".join(f"{name:>18}" for name in columns))
        rows = {"layer": "layer_us", "without launches": "without_launches_us"}
        for what, key in rows.items():
            cells = "".join(f"{_cell(found[key]):>18}" for found in columns.values())
            lines.append(f"{what:24}{cells}")
        for name in next(iter(columns.values()))["launch_us"]:
            cells = (f"{_cell(found['launch_us'][name]):>18}" for found in columns.values())
            lines.append(f"{name:24}{''.join(cells)}")
    return "\n".join(lines)


def _cell(told: dict[str, float]) -> str:
    return f"{told['median']:.1f} / {told['low']:.1f}"


def _rows(word: str) -> int:
    if not word.strip().isdigit():
        raise ValueError(f"--rows: {word!r} is no number of rows")
    return int(word)


def main(argv: list[str]) -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", default="1,16", metavar="N,N,...")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="of each time")
    parser.add_argument("--stub", action="store_true", help="without a GPU: idle kernels alone")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if not options.stub and not torch.cuda.is_available():
        print("error: this machine has no CUDA device; --stub needs none", file=sys.stderr)
        return 4
    machine = Machine(options.stub, options.rounds)
    try:
        layer_class = load_layer(options.folder)
        counts = [_rows(word) for word in options.rows.split(",")]
    except (LayerError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        if options.stub:
            stack.enter_context(without_device())
        try:
            found = [figures(machine, layer_class, rows) for rows in counts]
        except LayerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 4
    document: dict[str, Any] = {
        "gpu": "none" if options.stub else torch.cuda.get_device_name(),
        "arch": machine.arch,
        "versions": versions(),
        "layers": found,
    }
    if not options.stub:
        document["stream_operation_us"] = stream_operation_us(machine)
    print(table(document))
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
