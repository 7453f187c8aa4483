"""The kernel of an op in its generated file: imported, its flags fixed, compiled where it runs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from kpipe.runtime.host.compile import compile_kernel
from kpipe.runtime.op import CLUSTER_FLAGS

HALVES = ("publish", "collect")
"""Values of a kernel's flag `half`: what it sends, and what it waits for; "whole" is both."""


class Variant(Protocol):
    """A kernel with its flags fixed.

    `operands` are the names of its operands in order, empty for one that the flags leave out;
    `cluster_ctas` are the CTAs of one of its clusters at most, 1 without any.
    """

    operands: tuple[str, ...]
    cluster_ctas: int

    def resident_ctas(self, rows: int) -> int:
        """CTAs that have to run at the same time, of a kernel that publishes and polls."""
        ...

    def load(self) -> Callable[..., None]:
        """The callable on torch tensors in the order of `operands`."""
        ...


class KernelSource(Protocol):
    """Where the variants of one op's kernel come from; `fields` are the names of its flags."""

    fields: frozenset[str]

    def variant(self, values: Mapping[str, Any]) -> Variant:
        """The kernel with these flags, the others as they are declared."""
        ...


@dataclass(frozen=True)
class FileVariant:
    """A kernel object of a generated file and what the compiler is told about its operands."""

    kernel: Any
    specs: tuple[Any, ...]
    arch: str
    fixed_cluster: int = 1  # of the file's kernels, where no flag says it

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster at most: as the tile says, else the file."""
        named = [getattr(self.kernel, name, 1) for name in CLUSTER_FLAGS]
        return max(self.fixed_cluster, *named)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names in the order of the call."""
        return tuple(spec.name if spec else "" for spec in self.specs)

    def resident_ctas(self, rows: int) -> int:
        """As the kernel says; AttributeError for one that does not publish and poll."""
        return self.kernel.resident_ctas(rows)

    def load(self) -> Callable[..., None]:
        """Compiled once per structure and process; what the compiler raises passes through."""
        return compile_kernel(self.kernel, self.specs, self.arch)


class KernelFile:
    """The kernel class that an op names ("module:Class" below the package's kernels)."""

    def __init__(self, package: str, kernel: str, arch: str) -> None:
        module_name, _, class_name = kernel.partition(":")
        self.module = importlib.import_module(f"{package}.kernels.{module_name}")
        self.kernel_class = getattr(self.module, class_name)
        self.fields = frozenset(field.name for field in fields(self.kernel_class))
        self._arch = arch

    def variant(self, values: Mapping[str, Any]) -> FileVariant:
        """The kernel object with these flags."""
        kernel = self.kernel_class(**values)
        fixed = getattr(self.module, "CLUSTER", 1)
        return FileVariant(kernel, operands_of(self.module, kernel), self._arch, fixed)


def operands_of(module: Any, kernel: Any) -> tuple[Any, ...]:
    """The operands of a kernel object; its module's `operands()` takes flags they depend on."""
    wanted = inspect.signature(module.operands).parameters
    return module.operands(**{name: getattr(kernel, name) for name in wanted})


def polls(operands: Iterable[str]) -> bool:
    """Whether a kernel with these operands waits for words of its peers."""
    return "fault" in operands


def publishes(operands: Iterable[str]) -> bool:
    """Whether a kernel with these operands sends words to its peers."""
    return any(name.endswith("_peers") for name in operands)
