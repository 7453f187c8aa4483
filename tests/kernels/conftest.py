"""Equal kernels are compiled once in a run, whichever of its processes asks first."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kpipe.runtime.host import compile as compiler

SPEC_LINE = b'"""Generated from '


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """PTX is kept in a folder of this run: nothing of an earlier one is believed."""
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent  # a worker's own folder lies in that of the run
    folder = run / "compiled"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_compile", functools.partial(_once, folder, compiler._compile))
        yield


def _once(
    folder: Path, really: Callable[..., Any], kernel: Any, key: compiler.KernelKey, keep_ptx: bool
) -> Any:
    """What `really` gives, of which a test that asked for PTX sees the PTX only."""
    if not keep_ptx:
        return really(kernel, key, keep_ptx)
    place = folder / _digest(kernel, key)
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            place.write_text(compiler.ptx_of(_assembled_fast(really, kernel, key)))
        return SimpleNamespace(artifacts=SimpleNamespace(PTX=place.read_text()))


def _assembled_fast(really: Callable[..., Any], kernel: Any, key: compiler.KernelKey) -> Any:
    """The PTX is the same however hard the assembler, which reads all of it, then tries."""
    with pytest.MonkeyPatch.context() as patch:
        options = compiler.options_for
        patch.setattr(compiler, "options_for", lambda arch: f"{options(arch)} --ptxas-options -O0")
        return really(kernel, key, True)


def _digest(kernel: Any, key: compiler.KernelKey) -> str:
    """The structural key, but for the line of a generated file that names its spec."""
    text = Path(inspect.getfile(type(kernel))).read_bytes()
    if text.startswith(SPEC_LINE):
        text = text.partition(b"\n")[2]
    source = hashlib.sha256(text + compiler._device_hash()).hexdigest()
    return hashlib.sha256(repr(replace(key, source=source)).encode()).hexdigest()
