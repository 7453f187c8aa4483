"""Kernels of many candidates, compiled by several processes ahead of their use.

The compiler works in one thread of a process.  So each process compiles its share into object
files, and this one loads them.  What a process cannot compile is left for this one, where it is
compiled when it is prepared, and its error has a candidate's name.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.layer import Layer
from kpipe.runtime.recording import recorded

MOST = 16  # processes
_LOADED: list[Any] = []  # modules of object files, for as long as the process lives


def kernels_of(layer_class: type[Layer], arch: str, comm: Any = None) -> list[Any]:
    """The kernel objects that a layer can launch there; those that refuse a tile are left out.

    `comm` is the rank's end of its group where ranks exchange data; it decides flags.
    """
    from kpipe.runtime.host.launch import unbound_op

    ops = {op.name: op for op in layer_class.OPS if op.kernel}
    found = []
    for (target, _), sizes in layer_class.TABLE.items():
        for rows, method in sizes.items() if target == arch else ():
            for call in recorded(layer_class(), method, rows):
                if call.op not in ops:
                    continue
                ready = unbound_op(layer_class, ops[call.op], arch, comm)
                try:
                    found.append(ready.kernel(rows, call.flags))
                except ValueError:
                    continue
    return found


Compiled = Callable[[str], None]
"""Compiles a kernel into the object file of that path, by `export`; another process calls it."""


def jobs_of(folder: Path, kernels: Sequence[Any], arch: str) -> dict[Any, Compiled]:
    """What compiles each of these kernels of a generated folder; equal ones once."""
    from kpipe.runtime.host.compile import flags_of

    found = {}
    for kernel in kernels:
        module = type(kernel).__module__.rpartition(".kernels.")[2]
        job = (str(folder), module, type(kernel).__name__, flags_of(kernel), arch)
        found[kernel] = partial(compile_to_file, *job)
    return found


@contextmanager
def compile_ahead(
    jobs: Mapping[Any, Compiled], arch: str, processes: int, say: Callable[[str], None]
) -> Iterator[None]:
    """Inside, every kernel that another process could compile is loaded; 0 processes: one a core.

    `jobs` says how, by kernel.
    """
    count = min(processes or os.cpu_count() or 1, MOST, len(jobs))
    with tempfile.TemporaryDirectory(prefix="kpipe-tune-") as place:
        if count > 1:
            say(f"{len(jobs)} kernels to compile, {count} processes")
            _compile_all(jobs, arch, count, Path(place), say)
        yield


def _compile_all(
    jobs: Mapping[Any, Compiled], arch: str, count: int, place: Path, say: Callable[[str], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    left = 0
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        waiting = {}
        for number, (kernel, job) in enumerate(jobs.items()):
            path = place / f"kpipe_{number}.o"
            waiting[pool.submit(job, str(path))] = (kernel, path)
        for number, done in enumerate(as_completed(waiting), 1):
            kernel, path = waiting[done]
            left += done.exception() is not None or not _load(kernel, arch, path)
            if number % 25 == 0 or number == len(waiting):
                say(f"{number} of {len(waiting)} kernels compiled")
    if left:
        say(f"{left} of them are left to this process")


def compile_to_file(
    folder: str, module: str, name: str, flags: Sequence[tuple[str, Any]], arch: str, path: str
) -> None:
    """Compile one kernel of a generated folder into an object file; runs in its own process."""
    from kpipe.runtime.host.kernel_file import KernelFile

    file = KernelFile(load_layer(folder).PACKAGE, f"{module}:{name}", arch)
    export(file.variant(dict(flags)).load(), path)


def export(compiled: Any, path: str) -> None:
    """A compiled kernel as an object file; the function in it has the stem of the file's name."""
    compiled.export_to_c(object_file_path=path, function_name=Path(path).stem)


def _load(kernel: Any, arch: str, path: Path) -> bool:
    """Make an object file the compiled kernel; False where it cannot be loaded here."""
    from cutlass import cute

    from kpipe.runtime.host.compile import keep_compiled
    from kpipe.runtime.host.kernel_file import operands_of

    try:
        loaded = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
        function = getattr(loaded, path.stem)
    except Exception:  # whatever the loader says, compiling here still works
        return False
    _LOADED.append(loaded)
    module = sys.modules[type(kernel).__module__]
    keep_compiled(kernel, operands_of(module, kernel), arch, function)
    return True
