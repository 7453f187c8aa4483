"""Runs random schedules on the GPU of this machine and writes which orders it broke.

    python bench/fuzz/run_gpu.py --out fuzz.json [--schedules 4000] [--repetitions 8] [--seed 0]

N schedules of each mode (eager, captured, mixed segments) run with random spin times; see
schedule_fuzz.cu for what is looked at.  Needs nvcc, and a GPU of compute capability 9.0 or above.
`judge.py` compares the file with what the checker and its mutants claim.  Stops early, and says
so, after `--seconds`.  `--dry-run` executes a model on the CPU instead and proves nothing about a
GPU; it checks that every schedule survives its text form.  Exits with 1 on any CUDA error.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Protocol

from schedules import decode, encode, generate, mode_of, pairs, rows
from simulate import Simulator

from kpipe.codegen.proof.program import Program

SOURCE = Path(__file__).with_name("schedule_fuzz.cu")


class Machine(Protocol):
    """Something that runs schedules."""

    name: str

    def run(self, program: Program, repetitions: int, seed: int) -> bytes:
        """Orders seen broken: one byte per pair, see `schedules.pairs`."""


class Gpu:
    """The compiled library and the GPU that it runs on; RuntimeError on any CUDA error."""

    def __init__(self, library: Path) -> None:
        self.shared = ctypes.CDLL(str(library))
        self.shared.fuzz_error.restype = ctypes.c_char_p
        self.shared.fuzz_open.restype = ctypes.c_char_p
        ints = ctypes.POINTER(ctypes.c_int)
        numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ulonglong)
        self.shared.fuzz_run.argtypes = [ints, *numbers, ctypes.POINTER(ctypes.c_ubyte)]
        name = self.shared.fuzz_open()
        if name is None:
            raise RuntimeError(self._error())
        self.name = name.decode()

    def _error(self) -> str:
        return self.shared.fuzz_error().decode()

    def run(self, program: Program, repetitions: int, seed: int) -> bytes:
        """See `Machine.run`."""
        table = [number for row in rows(program) for number in row]
        launches = len(program.launches)
        broken = (ctypes.c_ubyte * max(1, len(pairs(launches))))()
        actions = (ctypes.c_int * len(table))(*table)
        arguments = (len(table) // 4, launches, repetitions, seed, broken)
        if self.shared.fuzz_run(actions, *arguments):
            raise RuntimeError(f"{self._error()} in schedule {encode(program)}")
        return bytes(broken)[: len(pairs(launches))]

    def close(self) -> None:
        """Give everything back, and report what the last schedule left behind."""
        if self.shared.fuzz_close():
            raise RuntimeError(self._error())


def compile_library(folder: Path, arch: str) -> Path:
    """nvcc's output; RuntimeError with its messages if it fails."""
    library = folder / "schedule_fuzz.so"
    flags = ["-O2", "-std=c++17", f"-arch={arch}", "-shared", "-Xcompiler", "-fPIC"]
    command = ["nvcc", *flags, "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return library


def driver() -> str:
    """The driver's version, or "" without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def run(options: argparse.Namespace, machine: Machine) -> dict[str, object]:
    """All schedules, or as many as the time allows, in an order that keeps the modes even."""
    started = time.monotonic()
    results = []
    done: Counter[str] = Counter()
    complete = True
    for number, generated in enumerate(generate(options.seed, options.schedules)):
        if time.monotonic() - started > options.seconds:
            complete = False
            break
        line = encode(generated)
        program = decode(line)
        if encode(program) != line or rows(program) != rows(generated):
            raise RuntimeError(f"schedule {line!r} does not survive its text form")
        broken = machine.run(program, options.repetitions, options.seed * 1_000_003 + number)
        results.append([line, broken.hex()])
        done[mode_of(program)] += 1
    return {
        "schema": "kpipe.bench.fuzz/1",
        "device": machine.name,
        "driver": driver(),
        "seed": options.seed,
        "repetitions": options.repetitions,
        "schedules": dict(sorted(done.items())),
        "complete": complete,
        "seconds": round(time.monotonic() - started, 1),
        "results": results,
    }


def write(raw: dict[str, object], out: Path) -> None:
    """One schedule a line, so that the file can be read and searched."""
    results = raw.pop("results")
    assert isinstance(results, list)
    head = json.dumps(raw, indent=1)[:-2]
    lines = ",\n".join(json.dumps(result, separators=(",", ":")) for result in results)
    out.write_text(f'{head},\n "results": [\n{lines}\n]}}\n')


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=4000, help="of each mode")
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=270, help="stop after this time")
    parser.add_argument("--arch", default="native", help="as nvcc's -arch")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true", help="a model on the CPU")
    options = parser.parse_args()
    try:
        if options.dry_run:
            raw = run(options, Simulator())
        else:
            with tempfile.TemporaryDirectory() as folder:
                gpu = Gpu(compile_library(Path(folder), options.arch))
                raw = run(options, gpu)
                gpu.close()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print({name: value for name, value in raw.items() if name != "results"})
    write(raw, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
