"""Verifies and times generated kernels on the GPU of this machine.

    python bench/kernels_gpu.py FOLDER [--out evidence.json] [--sanitize]

FOLDER is the kernels folder of one generated pipeline; the kernels with a case here are taken.
Every kernel is compared
with an oracle in float64 (float32 where bits are compared) written from the maths: fresh random
inputs, outputs poisoned with NaN, NaN in every padded place, strided views, eagerly and replayed
from a CUDA graph with a side stream and a PDL chain. Times are medians over graph replays that
walk through input sets larger than four times the L2 cache, divided by the launches of a graph.
`--sanitize` runs a few eager launches only, for compute-sanitizer. Exit code 1 on any failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import torch
from gemm_cases import CASES as GEMM_CASES
from kernel_cases import CASES as SMALL_CASES
from kernel_cases import DEVICE, NAN, Verdict, noise
from kernel_cases_query import CASES as QUERY_CASES
from kernel_cases_scores import CASES as SCORES_CASES
from kernel_cases_select import CASES as SELECT_CASES
from kernel_cases_sparse import CASES as SPARSE_CASES
from torch import Tensor

from kpipe.codegen.evidence import device_digest, file_digest
from kpipe.runtime.host.compile import compile_kernel, flags_of
from kpipe.runtime.host.launch import operands_of

CASES = {
    **SMALL_CASES,
    **GEMM_CASES,
    **QUERY_CASES,
    **SCORES_CASES,
    **SELECT_CASES,
    **SPARSE_CASES,
}
SIDE = ("mla_value", "mla_query")
"""Kernels that run beside the others in a captured layer."""
ROWS = (1, 2, 3, 4, 8, 16, 32, 64)
QUERIES = (1, 4)
REPLAYS = 50
MAX_SETS = 160
LAYERS = 3


class Bench:
    """Runs the cases of one folder and collects one record a check."""

    def __init__(self, folder: Path):
        self.folder = folder
        major, minor = torch.cuda.get_device_capability()
        self.arch = f"sm_{major}{minor}a"
        self.cases = {
            name: make(load(folder / f"{name}.py"))
            for name, make in CASES.items()
            if (folder / f"{name}.py").is_file()
        }
        self.records: list[dict] = []
        self.failures: list[str] = []

    def compiled(self, name: str, **flags):
        """(compiled kernel, its flags) for this GPU."""
        kernel, specs = self.kernel(name, flags)
        return compile_kernel(kernel, specs, self.arch), dict(flags_of(kernel))

    def kernel(self, name: str, flags: dict) -> tuple:
        """(kernel object with these flags, its operands)."""
        module = self.cases[name].module
        kernel = getattr(module, CASES[name].class_name)(**flags)
        return kernel, operands_of(module, kernel)

    def inputs(self, name: str, rows: int, q: int, **flags) -> dict[str, Tensor | None]:
        """Fresh operands of a launch; None for those that the flags leave out."""
        return self.present(name, self.cases[name].inputs(rows, q), flags)

    def present(self, name: str, given: dict[str, Tensor], flags: dict) -> dict[str, Tensor | None]:
        """Operands with None for those that the flags leave out."""
        return present(given, self.kernel(name, flags)[1])

    def record(self, name: str, flags: dict, rows: int, q: int, how: str, verdict: Verdict) -> None:
        label = f"{name} {flags} rows {rows} q {q} {how}"
        self.failures += [f"{label}: {text}" for text in verdict.wrong]
        path = self.folder / f"{name}.py"
        self.records.append(evidence_record(path, flags, self.arch, rows, q, how, verdict))

    def verify(self, row_counts: tuple[int, ...], variants: bool = True) -> None:
        """Every kernel eagerly; with `variants` all flags, with and without PDL and release."""
        for name, case in self.cases.items():
            launches = [*case.variants, {"pdl": False}, {"release": False}] if variants else [{}]
            for flags, rows, q in itertools.product(launches, row_counts, case.queries):
                if rows % q:
                    continue
                kernel, all_flags = self.compiled(name, **flags)
                given, case.flags = self.inputs(name, rows, q, **flags), all_flags
                done = run_eager(kernel, given, case.outputs)
                verdict = case.check(given, done, q, **judged(case, all_flags))
                self.record(name, all_flags, rows, q, "eager", verdict)

    def verify_captured(self) -> None:
        """All kernels as one PDL chain, but for those on a side stream; three layers deep.

        Inputs change and outputs are poisoned again between capture and replay.
        """
        for rows, q in itertools.product(ROWS, QUERIES):
            if rows % q:
                continue
            layers = [
                {name: self.inputs(name, rows, q) for name in self.cases} for _ in range(LAYERS)
            ]
            kernels = {name: self.compiled(name) for name in self.cases}
            graph = capture_layers(layers, {name: kernels[name][0] for name in kernels})
            for layer in layers:
                for name in self.cases:
                    refill(layer[name], self.inputs(name, rows, q))
            before = [{n: snapshot(layer[n]) for n in layer} for layer in layers]
            graph.replay()
            torch.cuda.synchronize()
            for layer, given in zip(layers, before, strict=True):
                for name, case in self.cases.items():
                    flags = case.flags = kernels[name][1]
                    verdict = case.check(given[name], layer[name], q, **judged(case, flags))
                    self.record(name, flags, rows, q, "captured", verdict)

    def verify_chain(self, links: int = 8) -> None:
        """A chain of rms_norm where each reads what its PDL predecessor wrote; bits must match."""
        module = self.cases["rms_norm"].module
        width, pitch = module.Q_LORA, module.PITCH
        weights = [noise(width, scale=0.1) + 1 for _ in range(links)]
        pools = [torch.zeros(links + 1, pitch, device=DEVICE).bfloat16() for _ in range(2)]
        pools[0][0], pools[1][0] = (noise(pitch),) * 2
        columns = [pool[:, :width] for pool in pools]
        slow, flags = self.compiled("rms_norm", pdl=False, release=False)
        fast, flags = self.compiled("rms_norm")

        def chain(kernel, column: Tensor, settle) -> None:
            for link, weight in enumerate(weights):
                # One row: a packed row and a contiguous one differ in their stride only.
                target = column[link + 1].view(1, width)
                kernel(column[link : link + 1], weight, target)
                settle()

        chain(slow, columns[0], torch.cuda.synchronize)
        chain(fast, columns[1], lambda: None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(fast, columns[1], lambda: None)
        for how in ("eager chain", "captured chain"):
            verdict = Verdict()
            torch.cuda.synchronize()
            verdict.equal(how, columns[1], columns[0])
            self.record("rms_norm", flags, 1, 1, how, verdict)
            columns[1][1:].fill_(NAN)
            graph.replay()

    def verify_far_slot(self) -> None:
        """A slot whose byte offset passes 2^32 must hit its own page and no aliased one."""
        case = self.cases["dsa_index"]
        m = case.module
        page_bytes = m.PAGE * m.TOKEN_BYTES
        blocks = 2**32 // page_bytes + 8
        given = case.inputs(2, 1)
        cache = torch.zeros(blocks, m.PAGE, m.TOKEN_BYTES, dtype=torch.uint8, device=DEVICE)
        given["index_kv"] = cache
        far = (blocks - 1) * m.PAGE + 5
        given["index_slots"] = torch.tensor([far, 2**31 // page_bytes * m.PAGE + 69], device=DEVICE)
        kernel, flags = self.compiled("dsa_index")
        kernel(*given.values())
        verdict = Verdict()
        touched = cache.flatten(1).any(1).nonzero().flatten().tolist()
        expected = sorted(slot // m.PAGE for slot in given["index_slots"].tolist())
        if touched != expected:
            verdict.wrong.append(f"far slots: pages {touched[:4]} written, not {expected}")
        self.record("dsa_index", flags, 2, 1, "far slots", verdict)

    def verify_far_rows(self) -> None:
        """Cache rows whose byte offset passes 2^32."""
        for name in SPARSE_CASES.keys() & self.cases.keys():
            case = self.cases[name]
            given = case.inputs(12, 1, far=True)
            kernel, flags = self.compiled(name)
            done = run_eager(kernel, given, case.outputs)
            self.record(name, flags, 12, 1, "far rows", case.check(given, done, 1))

    def time(self) -> None:
        """Median microseconds a launch: one after the other, and chained with itself under PDL."""
        chains = ({"pdl": False, "release": False}, {})
        for (name, case), rows in itertools.product(self.cases.items(), ROWS):
            sets, used = timed_sets(case, rows)
            for variant, chained in itertools.product(case.variants, chains):
                flags = {**variant, **chained}
                operands = [self.present(name, given, flags) for given in sets]
                entry = self._timed(name, flags, rows, operands)
                entry["larger_than_l2"] = used * len(sets) > 4 * l2_bytes()

    def _timed(self, name: str, flags: dict, rows: int, sets: list[dict]) -> dict:
        """The record of one kernel's time over these input sets."""
        kernel, all_flags = self.compiled(name, **flags)
        kernel(*sets[0].values())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for arguments in sets:
                kernel(*arguments.values())
        entry = self.entry(name, all_flags, rows)
        entry["median_us"] = replay_us(graph) / len(sets)
        return entry

    def entry(self, name: str, flags: dict, rows: int) -> dict:
        """The record that a timing belongs to; a new one without a check where there is none."""
        for entry in self.records:
            same = (entry["kernel"], entry["flags"], entry["rows"], entry["q"], entry["how"])
            if same == (name, flags, rows, 1, "eager"):
                return entry
        self.records.append({"kernel": name, "flags": flags, "rows": rows, "q": 1, "how": "timed"})
        return self.records[-1]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"generated_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def judged(case, flags: dict) -> dict:
    """The flags that say which result is right; a case names them in `judged_flags`."""
    return {flag: flags[flag] for flag in getattr(case, "judged_flags", ())}


def run_eager(kernel, given: dict[str, Tensor], outputs: tuple[str, ...]) -> dict[str, Tensor]:
    """Launches on copies of the outputs, so that `given` keeps what was there before."""
    done = {name: copy_of(given[name]) if name in outputs else given[name] for name in given}
    kernel(*done.values())
    torch.cuda.synchronize()
    return done


def present(given: dict[str, Tensor], specs: tuple) -> dict[str, Tensor | None]:
    """Operands with None for those that a kernel's flags leave out."""
    pairs = zip(given.items(), specs, strict=True)
    return {operand: None if spec is None else value for (operand, value), spec in pairs}


def evidence_record(
    path: Path, flags: dict, arch: str, rows: int, q: int, how: str, verdict: Verdict
) -> dict:
    """What was found of one launch of the kernel in this file; `kpipe check` reads it."""
    return {
        "kernel": path.stem,
        "sha256": file_digest(path),
        "device_sha256": device_digest(),
        "flags": flags,
        "arch": arch,
        "rows": rows,
        "q": q,
        "how": how,
        "max_relative_error": verdict.error,
        "bound": verdict.bound,
        "ok": not verdict.wrong,
    }


def copy_of(tensor: Tensor | None) -> Tensor | None:
    """A copy with the same strides."""
    if tensor is None:
        return None
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    storage = torch.empty(extent, dtype=tensor.dtype, device=DEVICE)
    return storage.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def snapshot(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: copy_of(tensor) for name, tensor in tensors.items()}


def refill(tensors: dict[str, Tensor], fresh: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            tensor.copy_(fresh[name])


def capture_layers(layers: list[dict], kernels: dict) -> torch.cuda.CUDAGraph:
    """A graph of all layers: the chain on the capturing stream, the others beside it."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for layer in layers:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for name in SIDE:
                    launch(kernels, layer, name)
            for name in kernels:
                if name not in SIDE:
                    launch(kernels, layer, name)
            main.wait_stream(side)
    return graph


def launch(kernels: dict, layer: dict, name: str) -> None:
    """Launches a kernel where this pipeline has it."""
    if name in kernels:
        kernels[name](*layer[name].values())


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Median microseconds of a replay."""
    times = []
    for _ in range(REPLAYS + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[5:])


def timed_sets(case, rows: int) -> tuple[list[dict[str, Tensor]], int]:
    """Input sets of a timing, and the bytes that a launch touches of each.

    A case whose launch touches little of a large operand makes them itself.
    """
    if hasattr(case, "timed_inputs"):
        used = case.touched_bytes(rows)
        return case.timed_inputs(rows, set_count(used)), used
    given = case.inputs(rows, 1)
    used = sum(tensor.numel() * tensor.element_size() for tensor in given.values())
    return [given, *(case.inputs(rows, 1) for _ in range(set_count(used) - 1))], used


def set_count(used: int) -> int:
    return min(MAX_SETS, max(16, 4 * l2_bytes() // used + 1))


def l2_bytes() -> int:
    return torch.cuda.get_device_properties(0).L2_cache_size


def versions() -> dict[str, str]:
    import cutlass

    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "cutlass": cutlass.__version__}
    try:
        found["tvm_ffi"] = version("apache-tvm-ffi")
    except PackageNotFoundError:
        found["tvm_ffi"] = "unknown"
    return found


def table(records: list[dict]) -> str:
    """Worst error of every kernel, and its times by rows."""
    lines = []
    for name in sorted({entry["kernel"] for entry in records}):
        mine = [entry for entry in records if entry["kernel"] == name]
        checked = [entry for entry in mine if "ok" in entry]
        failed = sum(not entry["ok"] for entry in checked)
        worst = max(
            (entry["max_relative_error"] / entry["bound"] for entry in checked if entry["bound"]),
            default=0.0,  # only bits are compared
        )
        lines.append(
            f"{name}: {len(checked)} checks, {failed} failed, worst {worst:.3f} of its bound"
        )
        timed: dict[str, list[str]] = {}
        for entry in mine:
            if "median_us" in entry:
                key = " ".join(f"{flag}={value}" for flag, value in entry["flags"].items())
                timed.setdefault(key, []).append(f"{entry['rows']}:{entry['median_us']:.2f}")
        lines += [f"  {key:<58} {' '.join(values)}" for key, values in timed.items()]
    return "\n".join(lines)


def evidence_text(document: dict) -> str:
    """One record per line, so that a re-run reads well in a diff."""
    records = ",\n".join("  " + json.dumps(record) for record in document["records"])
    head = json.dumps({"gpu": document["gpu"], "versions": document["versions"]})
    return f'{head[:-1]},\n "records": [\n{records}\n ]}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sanitize", action="store_true", help="a few eager launches, no timing")
    options = parser.parse_args()
    torch.manual_seed(torch.seed() % 2**31)
    bench = Bench(options.folder)
    if options.sanitize:
        bench.verify((20,), variants=False)
    else:
        bench.verify(ROWS)
        bench.verify_captured()
        bench.verify_chain()
        bench.verify_far_slot()
        bench.verify_far_rows()
        bench.time()
    gpu = torch.cuda.get_device_name()
    document = {"gpu": gpu, "versions": versions(), "records": bench.records}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(evidence_text(document))
    print("\n".join(bench.failures[:40]))
    print(table(bench.records))
    print("FAILED" if bench.failures else "ok", len(bench.failures), gpu, bench.arch)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
