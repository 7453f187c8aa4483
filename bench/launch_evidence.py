"""Runs every launch that a generated layer can make against its oracle, and writes the evidence.

    python bench/launch_evidence.py FOLDER [--out FILE] [--kernels NAME,...]
                                    [--sanitize [--rows N]]

FOLDER is a generated folder.  The launches are those of its table for this machine's GPU: each
kernel with the flags and tile parameters that `layer.py` and `ops.py` give it, at each declared
number of rows.  Each is run eagerly and from a CUDA graph, on fresh random operands with poisoned
outputs, and judged by the oracle of its case (see kernel_cases*.py).  Exit code 1 on any failure.
With `--sanitize` every kernel runs once, at the smallest declared number of rows from N on, for
compute-sanitizer (see sanitize.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from kernels_gpu import (
    CASES,
    evidence_record,
    evidence_text,
    judged,
    present,
    refill,
    run_eager,
    snapshot,
    versions,
)

from kpipe.runtime.host.compile import compile_kernel, flags_of
from kpipe.runtime.host.launch import CudaOp, arch_of, operands_of
from kpipe.runtime.layer import Layer
from kpipe.runtime.op import Call
from kpipe.runtime.sharding import Shard
from kpipe.runtime.trial import load_layer


class Launches:
    """The launches of a layer on one architecture, and what was found of them."""

    def __init__(self, layer_class: type[Layer], folder: Path, arch: str) -> None:
        self.layer_class, self.folder, self.arch = layer_class, folder, arch
        self.records: list[dict] = []
        self.failures: list[str] = []

    def run(self, only: set[str], *, sanitize_rows: int = 0) -> None:
        """Every distinct (kernel, flags, rows, q).

        With `sanitize_rows` one launch of each kernel, the smallest of at least so many rows.
        """
        done: set[tuple] = set()
        ops = {op.name: op for op in self.layer_class.OPS}
        calls = self._calls()
        if sanitize_rows:
            enough = [(call, q) for call, q in calls if call.rows >= sanitize_rows]
            calls = sorted(enough, key=lambda entry: entry[0].rows)
        for call, q in calls:
            op = ops[call.op]
            name = op.kernel.partition(":")[0]
            if name not in CASES or (only and name not in only):
                continue
            ready = self._op(op)
            kernel = ready.kernel(call.rows, call.flags)
            case = CASES[name](ready.module)
            wanted = q if q in case.queries else 1
            key = (name, flags_of(kernel), call.rows, wanted)
            if key in done or (sanitize_rows and any(known[0] == name for known in done)):
                continue
            done.add(key)
            eager_only = bool(sanitize_rows)
            self._judge(name, case, ready, kernel, call.rows, wanted, eager_only=eager_only)

    def _calls(self) -> list[tuple[Call, int]]:
        layer = self.layer_class()
        found: dict[tuple[Call, int], None] = {}
        for (arch, q), sizes in self.layer_class.TABLE.items():
            if arch == self.arch:
                for call in layer.calls(arch):
                    if call.rows in sizes:
                        found[call, q] = None
        return list(found)

    def _op(self, op) -> CudaOp:
        bound = dict(op.constants)
        if op.needs_shard:
            ranks = self.layer_class.RANKS if self.layer_class.CONTEXT_PARALLEL else 1
            bound["shard"] = Shard(0, ranks, self.layer_class.INTERLEAVE)
        return CudaOp(op, self.layer_class.PACKAGE, bound, self.arch, lambda: 1, lambda op: None)

    def _judge(self, name, case, ready, kernel, rows, q, *, eager_only: bool) -> None:
        flags = dict(flags_of(kernel))
        case.flags = flags
        specs = operands_of(ready.module, kernel)
        compiled = compile_kernel(kernel, specs, self.arch)

        full = case.inputs(rows, q)  # the oracle may need what a flag leaves out
        given = present(full, specs)
        done = run_eager(compiled, given, case.outputs)
        self._record(
            name, flags, rows, q, "eager", case.check(full, done, q, **judged(case, flags))
        )
        if eager_only:
            return
        full = case.inputs(rows, q)
        given = present(full, specs)
        live = snapshot(given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compiled(*live.values())
        other = case.inputs(rows, q)
        fresh = present(other, specs)
        shapes = [(t.shape, t.stride()) for t in live.values() if t is not None]
        if shapes == [(t.shape, t.stride()) for t in fresh.values() if t is not None]:
            full, given = other, fresh  # replayed on other operands than it was captured with
        refill(live, given)
        graph.replay()
        torch.cuda.synchronize()
        verdict = case.check(full, live, q, **judged(case, flags))
        self._record(name, flags, rows, q, "captured", verdict)

    def _record(self, name: str, flags: dict, rows: int, q: int, how: str, verdict) -> None:
        label = f"{name} {flags} rows {rows} q {q} {how}"
        self.failures += [f"{label}: {text}" for text in verdict.wrong[:2]]
        path = self.folder / "kernels" / f"{name}.py"
        self.records.append(evidence_record(path, flags, self.arch, rows, q, how, verdict))


def summary(records: list[dict]) -> str:
    """One line a kernel: launches, failures, the worst error beside its bound."""
    lines = []
    for name in dict.fromkeys(entry["kernel"] for entry in records):
        mine = [entry for entry in records if entry["kernel"] == name]
        failed = sum(not entry["ok"] for entry in mine)
        worst = max((e["max_relative_error"] / e["bound"] for e in mine if e["bound"]), default=0.0)
        lines.append(f"{name}: {len(mine)} runs, {failed} failed, worst {worst:.3f} of its bound")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kernels", default="", metavar="NAME,...")
    parser.add_argument("--sanitize", action="store_true", help="one eager launch a kernel")
    parser.add_argument("--rows", type=int, default=1, help="with --sanitize: at least so many")
    options = parser.parse_args()
    torch.manual_seed(torch.seed() % 2**31)
    arch = arch_of(torch.device("cuda"))
    launches = Launches(load_layer(options.folder), options.folder, arch)
    rows = max(options.rows, 1) if options.sanitize else 0
    launches.run(set(filter(None, options.kernels.split(","))), sanitize_rows=rows)
    gpu = torch.cuda.get_device_name()
    document = {"gpu": gpu, "versions": versions(), "records": launches.records}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(evidence_text(document))
    print("\n".join(launches.failures[:40]))
    print(summary(launches.records))
    print("FAILED" if launches.failures else "ok", len(launches.failures), gpu, arch)
    return 1 if launches.failures else 0


if __name__ == "__main__":
    sys.exit(main())
