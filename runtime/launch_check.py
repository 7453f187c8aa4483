"""Runs every launch that a generated layer can make against its oracle.

The launches are those of the layer's table for this machine's GPU: each kernel with the flags and
tile parameters that `layer.py` and `ops.py` give it, at each declared number of rows.  Each is run
eagerly and from a CUDA graph that is replayed on other operands than it was captured with, on
fresh random operands with poisoned outputs, and judged by the oracle of its case.

For compute-sanitizer, which wants single launches: `python -m kpipe.runtime.launch_check FOLDER
--kernels NAME,... --rows N` runs each kernel once, eagerly, at its smallest declared number of rows
from N on.  Exit code 1 on any failure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.evidence import launch_key, launch_record
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.host.compile import compile_kernel, flags_of
from kpipe.runtime.host.kernel_file import operands_of
from kpipe.runtime.host.launch import CudaOp, arch_of, unbound_op
from kpipe.runtime.launch_cases.registry import CASES
from kpipe.runtime.layer import Layer
from kpipe.runtime.op import Call

Operands = Mapping[str, Tensor | None]


class LaunchCheck:
    """The launches of a layer on one architecture, and what was found of them.

    `known` are launches, as `launch_key` of evidence.py, that need not run again; `skipped` are
    those that were not.  `without_case` names kernels that the layer launches and nobody can judge.
    """

    def __init__(
        self, layer_class: type[Layer], arch: str, known: frozenset[str] = frozenset()
    ) -> None:
        self.layer_class, self.arch = layer_class, arch
        self.known, self.skipped = known, set[str]()
        self.records: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.without_case: set[str] = set()

    def run(self, said: Callable[[str], None] = lambda line: None) -> None:
        """Every distinct (kernel, flags, rows, q), eagerly and captured."""
        last = ""
        for name, case, ready, kernel, rows, q in self._launches():
            if name != last:
                said(f"launches of {name}")
            last = name
            for how, run in (("eager", self._eager), ("captured", self._captured)):
                flags = dict(flags_of(kernel))
                key = launch_key(name, flags, self.arch, rows, q, how)
                if key in self.known:
                    self.skipped.add(key)
                else:
                    run(name, case, ready, kernel, rows, q)

    def run_once(self, only: set[str], rows: int) -> None:
        """One eager launch of each kernel (or each in `only`): its fewest rows from `rows` on."""
        done = set()
        for launch in sorted(self._launches(), key=lambda launch: launch[4]):
            name, size = launch[0], launch[4]
            if size >= rows and name not in done and (not only or name in only):
                done.add(name)
                self._eager(*launch)

    def _launches(self) -> Iterator[tuple[str, Any, CudaOp, Any, int, int]]:
        done: set[tuple[Any, ...]] = set()
        ops = {op.name: op for op in self.layer_class.OPS if op.kernel}
        calls = [pair for pair in self._calls() if pair[0].op in ops]
        for call, q in sorted(calls, key=lambda pair: ops[pair[0].op].kernel):
            name = ops[call.op].kernel.partition(":")[0]
            if name not in CASES:
                self.without_case.add(name)
                continue
            ready = unbound_op(self.layer_class, ops[call.op], self.arch)
            kernel = ready.kernel(call.rows, call.flags)
            case = CASES[name](ready.module)
            wanted = q if q in case.queries else 1
            key = (name, flags_of(kernel), call.rows, wanted)
            if key not in done:
                done.add(key)
                yield name, case, ready, kernel, call.rows, wanted

    def _calls(self) -> list[tuple[Call, int]]:
        layer = self.layer_class()
        found: dict[tuple[Call, int], None] = {}
        for (arch, q), sizes in self.layer_class.TABLE.items():
            if arch == self.arch:
                for call in layer.calls(arch):
                    if call.rows in sizes:
                        found[call, q] = None
        return list(found)

    def _eager(self, name: str, case, ready: CudaOp, kernel, rows: int, q: int) -> None:
        flags = case.flags = dict(flags_of(kernel))
        specs = operands_of(ready.module, kernel)
        full = case.inputs(rows, q)  # the oracle may need what a flag leaves out
        compiled, given = compile_kernel(kernel, specs, self.arch), present(full, specs)
        with time_out_told(case):
            done = run_eager(compiled, given, case.outputs, case)
        verdict = case.check(full, done, q, **judged(case, flags))
        self._record(name, flags, rows, q, "eager", verdict)

    def _captured(self, name: str, case, ready: CudaOp, kernel, rows: int, q: int) -> None:
        flags = case.flags = dict(flags_of(kernel))
        specs = operands_of(ready.module, kernel)
        compiled = compile_kernel(kernel, specs, self.arch)
        full = case.inputs(rows, q)
        given = present(full, specs)
        live = {operand: copy_of(tensor) for operand, tensor in given.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compiled(*live.values())
        other = case.inputs(rows, q)
        fresh = present(other, specs)
        if _shapes(live) == _shapes(fresh):
            full, given = other, fresh
        for operand, tensor in live.items():
            if tensor is not None:
                tensor.copy_(given[operand])
        with time_out_told(case):
            arrive = arrival_of(case, live)
            torch.cuda.synchronize()  # nothing may arrive ahead of its mailbox
            graph.replay()
            arrive()
            torch.cuda.synchronize()
        verdict = case.check(full, live, q, **judged(case, flags))
        self._record(name, flags, rows, q, "captured", verdict)

    def _record(self, name: str, flags: dict, rows: int, q: int, how: str, verdict) -> None:
        label = f"{name} {flags} rows {rows} q {q} {how}"
        self.failures += [f"{label}: {text}" for text in verdict.wrong[:2]]
        self.records.append(launch_record(name, flags, self.arch, rows, q, how, verdict))


def judged(case: Any, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that say which result is right; a case names them in `judged_flags`."""
    return {flag: flags[flag] for flag in getattr(case, "judged_flags", ())}


def present(given: Mapping[str, Tensor], specs: tuple) -> dict[str, Tensor | None]:
    """Operands with None for those that a kernel's flags leave out."""
    pairs = zip(given.items(), specs, strict=True)
    return {operand: None if spec is None else value for (operand, value), spec in pairs}


def arrival_of(case: Any, live: dict[str, Tensor | None]) -> Callable[[], None]:
    """Made ready ahead of a launch on `live`: what the case lets arrive while it waits."""
    return case.arrival(live) if hasattr(case, "arrival") else lambda: None


@contextmanager
def time_out_told(case: Any) -> Iterator[None]:
    """An error of the device gets a note that says which poll has given up, where one has."""
    try:
        yield
    except RuntimeError as error:
        if note := case.boxes.time_out() if hasattr(case, "boxes") else "":
            error.add_note(note)
        raise


def run_eager(
    kernel: Any, given: Operands, outputs: tuple[str, ...], case: Any = None
) -> dict[str, Tensor | None]:
    """Launches on copies of the outputs, so that `given` keeps what was there before.

    What `case` lets arrive comes while the launch waits.
    """
    done = {name: copy_of(given[name]) if name in outputs else given[name] for name in given}
    arrive = arrival_of(case, done)
    torch.cuda.synchronize()  # nothing may arrive ahead of its mailbox
    kernel(*done.values())
    arrive()
    torch.cuda.synchronize()
    return done


def copy_of(tensor: Tensor | None) -> Tensor | None:
    """A copy with the same strides."""
    if tensor is None:
        return None
    if not tensor.numel():
        return torch.empty_like(tensor)
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    storage = torch.empty(extent, dtype=tensor.dtype, device=tensor.device)
    return storage.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _shapes(operands: Operands) -> list[tuple]:
    return [(t.shape, t.stride()) for t in operands.values() if t is not None]


def summary(records: list[dict[str, Any]]) -> list[str]:
    """One line a kernel: runs, failures, the worst error beside its bound."""
    lines = []
    for name in dict.fromkeys(entry["kernel"] for entry in records):
        mine = [entry for entry in records if entry["kernel"] == name]
        failed = sum(not entry["ok"] for entry in mine)
        worst = max((e["max_relative_error"] / e["bound"] for e in mine if e["bound"]), default=0.0)
        lines.append(f"{name}: {len(mine)} runs, {failed} failed, worst {worst:.3f} of its bound")
    return lines


def main(argv: list[str]) -> int:
    """Run each kernel of a folder once; returns 0, or 1 where one was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", default="", metavar="NAME,...")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="at least so many")
    options = parser.parse_args(argv)
    torch.manual_seed(torch.seed() % 2**31)
    check = LaunchCheck(load_layer(options.folder), arch_of(torch.device("cuda")))
    check.run_once(set(filter(None, options.kernels.split(","))), options.rows)
    print("\n".join([*check.failures[:40], *summary(check.records)]))
    failed = check.failures or not check.records
    print("FAILED" if failed else "ok", len(check.failures), "of", len(check.records))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
