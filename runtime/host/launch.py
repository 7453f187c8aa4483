"""Launches the generated kernels of a layer: operands by name, flags from the call, streams.

A call of the generated layer names operands in contract order, which is the order of the op's
reference function; the kernel's own `operands()` says which of them it takes, and in which order.
Every (op, flags, tactic) that a layer can launch is compiled in prepare(), so that nothing is
compiled, allocated or looked up on the device while a CUDA graph is captured.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.formats import PagedCache
from kpipe.runtime.host.compile import compile_kernel
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.op import Call, Op


class CudaOp:
    """The kernel of one op: compiled per structure, called with the step's tensors.

    `bound` are weights and constants; `rows` gives the rows of the step that is running.
    """

    def __init__(
        self,
        op: Op,
        package: str,
        bound: Mapping[str, Any],
        arch: str,
        rows: Callable[[], int],
        enter: Callable[[Op], None],
    ) -> None:
        module_name, _, class_name = op.kernel.partition(":")
        self.op = op
        self.module = importlib.import_module(f"{package}.kernels.{module_name}")
        self.kernel_class = getattr(self.module, class_name)
        self._bound = dict(bound)
        self._arch = arch
        self._rows = rows
        self._enter = enter
        self._names = tuple(inspect.signature(op.reference).parameters)
        self._fields = {field.name for field in fields(self.kernel_class)}
        self._ready: dict[tuple, tuple[Callable[..., None], tuple[str, ...]]] = {}

    def compile(self, call: Call) -> None:
        """Make the kernel of that call ready; what the compiler raises passes through."""
        self._compiled(call.rows, call.flags)

    def __call__(self, *operands: Any, **named: Any) -> None:
        self._enter(self.op)
        given = dict(zip(self._names, operands, strict=False))
        flags = []
        for name, value in named.items():
            if isinstance(value, Tensor | PagedCache):
                given[name] = value
            else:
                flags.append((name, value))
        launch, order = self._compiled(self._rows(), tuple(sorted(flags)))
        bound = self._bound
        launch(*(_tensor(given[n]) if n in given else bound[n] if n else None for n in order))

    def kernel(self, rows: int, flags: Iterable[tuple[str, Any]] = ()) -> Any:
        """The kernel object (its fields are its flags) that such a call launches."""
        values: dict[str, Any] = {
            name: value for name, value in self._bound.items() if name in self._fields
        }
        if "shard" in self._bound:
            shard = self._bound["shard"]
            place = {"rank": shard.rank, "ranks": shard.ranks, "interleave": shard.interleave}
            values.update({name: value for name, value in place.items() if name in self._fields})
        values.update(self.op.tactic(self._arch, rows))
        values.update({name: value for name, value in flags if name in self._fields})
        return self.kernel_class(**values)

    def _compiled(
        self, rows: int, flags: tuple[tuple[str, Any], ...]
    ) -> tuple[Callable[..., None], tuple[str, ...]]:
        key = (rows, flags)
        if key not in self._ready:
            kernel = self.kernel(rows, flags)
            specs = operands_of(self.module, kernel)
            names = tuple(spec.name if spec else "" for spec in specs)
            self._ready[key] = compile_kernel(kernel, specs, self._arch), names
        return self._ready[key]


def operands_of(module: Any, kernel: Any) -> tuple[Any, ...]:
    """The operands of a kernel object; its module's `operands()` takes flags they depend on."""
    wanted = inspect.signature(module.operands).parameters
    return module.operands(**{name: getattr(kernel, name) for name in wanted})


def _tensor(value: Tensor | PagedCache) -> Tensor:
    """What the kernel is handed: caches and FP8 tensors travel as bytes."""
    tensor = value.data if isinstance(value, PagedCache) else value
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


_STREAMS: dict[tuple[torch.device, str, int], torch.cuda.Stream] = {}


def side_stream(device: torch.device, name: str, priority: int) -> torch.cuda.Stream:
    """The side stream of that name: one per device, shared by all layers."""
    key = (device, name, priority)
    if key not in _STREAMS:
        _STREAMS[key] = torch.cuda.Stream(device, priority=priority)
    return _STREAMS[key]


def arch_of(device: torch.device) -> str:
    """The target of a device, for example sm_90a; LayerError for a GPU that has none here."""
    major, minor = torch.cuda.get_device_capability(device)
    known = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
    if (major, minor) not in known:
        raise LayerError(f"no kernels for compute capability {major}.{minor}")
    return known[major, minor]
