"""Kernels that do nothing in place of compiled ones: what is left is this project's own Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from kpipe.runtime import layer as layer_module
from kpipe.runtime.host import kernel_file, launch
from kpipe.runtime.recording import HostStream


class IdleStream(HostStream):
    """A stream on which nothing is ever left to do."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def nothing(*operands: Any) -> None:
    """A kernel in Python that takes what it is given and does nothing."""


def through_ffi() -> Callable[..., None]:
    """A kernel behind the calling convention of compiled ones that does nothing."""
    import tvm_ffi

    return tvm_ffi.get_global_func("testing.nop")


@contextmanager
def idle_kernels(kernel: Callable[..., None]) -> Iterator[None]:
    """Layers that are prepared inside launch `kernel` in place of what would be compiled."""
    with mock.patch.object(kernel_file, "compile_kernel", lambda *_: kernel):
        yield


@contextmanager
def without_device() -> Iterator[None]:
    """The cuda backend on tensors of the host: streams are names on which nothing waits."""
    main = IdleStream("main")
    with ExitStack() as patches:
        for place, name, value in (
            (torch.cuda, "current_stream", lambda *_: main),
            (launch, "side_stream", lambda device, name, *_: IdleStream(name)),
            (layer_module, "_refuse_host", lambda *_: None),
        ):
            patches.enter_context(mock.patch.object(place, name, value))
        yield
