"""Makes one object: compile a kernel without a GPU, export it, link it.  Runs in a process of its
own, where nothing of the layer is imported."""

from __future__ import annotations

import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kpipe.runtime.aot.toolchain import link
from kpipe.runtime.host.compile import compile_kernel
from kpipe.runtime.host.kernel_file import operands_of


@dataclass(frozen=True)
class Order:
    """An object to be made: kernel file and class, flags, target, symbol, linker, and where to."""

    path: Path
    class_name: str
    flags: Mapping[str, Any]
    arch: str
    symbol: str
    linker: str
    target: Path


@dataclass(frozen=True)
class Made:
    """What came of an order: seconds, and what went wrong, empty for nothing."""

    order: Order
    seconds: float
    error: str = ""


def warm_up() -> None:
    """Imports the compiler, and leaves an interrupt to the process that hands out the orders."""
    import cutlass.cute  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def make(order: Order) -> Made:
    """Makes the object of an order; whatever goes wrong is told in the result."""
    started = time.monotonic()
    try:
        _make(order)
    except Exception as error:  # a compiler may raise anything; the other orders go on
        first = str(error).strip().partition("\n")[0]
        return Made(order, time.monotonic() - started, f"{type(error).__name__}: {first}")
    return Made(order, time.monotonic() - started)


def _make(order: Order) -> None:
    module = _module(order.path)
    kernel = getattr(module, order.class_name)(**order.flags)
    compiled = compile_kernel(kernel, operands_of(module, kernel), order.arch)
    with tempfile.TemporaryDirectory(prefix="kpipe-") as folder:
        relocatable = Path(folder) / "kernel.o"
        compiled.export_to_c(str(relocatable), order.symbol, export_only_tvm_ffi_symbols=True)
        link(order.linker, relocatable, order.target)


def _module(path: Path) -> ModuleType:
    """A kernel file by itself: it needs the runtime alone, not the package around it."""
    name = f"kpipe_kernel_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
