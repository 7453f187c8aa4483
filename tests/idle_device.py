"""A device without one: kernels that check and note what they are handed, streams of the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kpipe.runtime import layer as layer_module
from kpipe.runtime.host import kernel_file, launch
from kpipe.runtime.host.compile import Symbol, flags_of
from kpipe.runtime.recording import HostStream

DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}


@dataclass(frozen=True)
class Launched:
    """One launch: by which rank, of which kernel, which half, with which operands."""

    rank: int
    kernel: str
    half: str
    names: tuple[str, ...]
    flags: dict[str, Any]
    operands: dict[str, torch.Tensor] = field(default_factory=dict, compare=False)

    @property
    def polls(self) -> bool:
        return "fault" in self.names

    @property
    def publishes(self) -> bool:
        return any(name.endswith("_peers") for name in self.names)


class IdleStream(HostStream):
    """A stream on which nothing is ever left to do."""

    def synchronize(self) -> None:
        return


class Device:
    """Stands in for compiler and device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[Launched] = []
        self.rank_of: dict[int, int] = {}  # address of a record of time-outs or a table -> rank
        monkeypatch.setattr(kernel_file, "compile_kernel", self.compiled)
        monkeypatch.setattr(launch, "side_stream", lambda device, name, *rest: HostStream(name))
        monkeypatch.setattr(layer_module.torch.cuda, "current_stream", lambda *_: IdleStream("m"))
        monkeypatch.setattr(layer_module, "_refuse_host", lambda name, device: None)

    def compiled(self, kernel: Any, specs: tuple, arch: str) -> Any:
        names = tuple(spec.name for spec in specs if spec)

        def run(*operands: torch.Tensor | None) -> None:
            assert len(operands) == len(specs)
            check_operands(type(kernel).__name__, specs, operands)
            flags = dict(flags_of(kernel))
            addresses = [tensor.data_ptr() for tensor in operands if tensor is not None]
            rank = next((self.rank_of[a] for a in addresses if a in self.rank_of), -1)
            half = str(flags.get("half", "whole"))
            given = dict(zip(names, (t for t in operands if t is not None), strict=True))
            self.launched.append(Launched(rank, type(kernel).__name__, half, names, flags, given))

        return run

    def know(self, comm: Any) -> None:
        self.rank_of[comm.record.fault.data_ptr()] = comm.rank
        for box in comm.boxes.values():
            self.rank_of[box.peers.data_ptr()] = comm.rank


def check_operands(kernel: str, specs: tuple, operands: tuple) -> None:
    """Raises AssertionError where an operand is not what the kernel was compiled for."""
    sizes: dict[str, int] = {}
    for spec, tensor in zip(specs, operands, strict=True):
        if spec is None:
            assert tensor is None
            continue
        what = f"{kernel} {spec.name}: {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"
        assert tensor.dtype == DTYPES[spec.dtype], what
        assert len(tensor.shape) == len(spec.shape), what
        extents = [*zip(tensor.shape, spec.shape, strict=True)]
        extents += [
            pair
            for size, *pair in zip(tensor.shape, tensor.stride(), spec.strides, strict=True)
            if size > 1 or spec.shape is None
        ]
        for found, wanted in extents:
            if isinstance(wanted, Symbol):
                assert found % wanted.multiple == 0, what
                wanted = sizes.setdefault(wanted.name, found)
            assert wanted is None or found == wanted, (what, spec)
        assert tensor.data_ptr() % spec.align == 0, what
