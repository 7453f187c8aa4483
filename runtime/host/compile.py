"""Compiles generated kernels once per structure and hands out callables on torch tensors.

The calling convention is TVM-FFI: a compiled kernel takes torch tensors directly, checks their
shapes, dtypes and strides, and launches on torch's current stream (under capture as well).
Nothing here imports the compiler before `compile_kernel` is called.
"""

from __future__ import annotations

import hashlib
import inspect
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

DTYPES = {
    "bf16": ("BFloat16", 2),
    "fp32": ("Float32", 4),
    "i32": ("Int32", 4),
    "i64": ("Int64", 8),
    "u8": ("Uint8", 1),
}
"""Spec dtype -> (name in the DSL, bytes). FP8 codes and cache bytes travel as uint8."""

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
"""Targets that a kernel may be compiled for."""


@dataclass(frozen=True)
class Symbol:
    """An extent or stride that is known at launch only; equal names must have equal values.

    `multiple` is a promise that the launch checks; `bits` is the width of address arithmetic
    with it: 64 wherever the product with an index may pass 2^31.
    """

    name: str
    multiple: int = 1
    bits: int = 32


@dataclass(frozen=True)
class TensorSpec:
    """One operand of a kernel as the compiler sees it.

    `shape` and `strides` (in elements) hold integers and symbols; a None in `shape` is dynamic
    and equal to nothing else. Without `strides` the tensor is row-major and contiguous.
    `align` is the alignment of its first element in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int | Symbol | None, ...]
    strides: tuple[int | Symbol, ...] | None = None
    align: int = 16

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise ValueError(f"{self.name}: unknown dtype {self.dtype!r}; known: {known}")
        if self.strides is None:
            object.__setattr__(self, "strides", _row_major(self.name, self.shape))
        if len(self.strides) != len(self.shape):
            raise ValueError(
                f"{self.name}: {len(self.shape)} extents but {len(self.strides)} strides"
            )


@dataclass(frozen=True)
class KernelKey:
    """What a compiled kernel depends on: structure only, no address, stream or build history."""

    name: str
    source: str
    flags: tuple[tuple[str, bool | int | float | str], ...]
    operands: tuple[TensorSpec | None, ...]
    arch: str
    dsl: str


_COMPILED: dict[tuple[KernelKey, bool], Callable[..., None]] = {}
_LOCK = threading.Lock()


def compile_kernel(
    kernel: Any, operands: Sequence[TensorSpec | None], arch: str, keep_ptx: bool = False
) -> Callable[..., None]:
    """The compiled `kernel`, a callable on torch tensors in the order of `operands`.

    `kernel` is an instance of a generated kernel class: a frozen dataclass whose fields are its
    flags and whose `__call__` takes the operands and a stream. An operand that the flags leave
    out is None here and in the call. Equal structure gives the same object within a process.
    With `keep_ptx` the result works with `ptx_of`.
    Raises ValueError for an unknown arch and TypeError for a class or flag that has no
    structural key; what the compiler raises passes through.
    """
    key = kernel_key(kernel, operands, arch)
    with _LOCK:
        if (key, keep_ptx) not in _COMPILED:
            _COMPILED[key, keep_ptx] = _compile(kernel, key, keep_ptx)
        return _COMPILED[key, keep_ptx]


def keep_compiled(
    kernel: Any, operands: Sequence[TensorSpec | None], arch: str, compiled: Callable[..., None]
) -> None:
    """Let `compile_kernel` return `compiled`, made elsewhere from a kernel of equal structure."""
    with _LOCK:
        _COMPILED.setdefault((kernel_key(kernel, operands, arch), False), compiled)


def kernel_key(kernel: Any, operands: Sequence[TensorSpec | None], arch: str) -> KernelKey:
    """The structural key under which `compile_kernel` keeps its result."""
    import cutlass

    if arch not in ARCHS:
        raise ValueError(f"unknown arch {arch!r}; known: {', '.join(ARCHS)}")
    return KernelKey(
        name=type(kernel).__qualname__,
        source=source_hash(kernel),
        flags=flags_of(kernel),
        operands=tuple(operands),
        arch=arch,
        dsl=cutlass.__version__,
    )


def flags_of(kernel: Any) -> tuple[tuple[str, bool | int | float | str], ...]:
    """(name, value) of every constructor flag of a kernel, in the order of declaration.

    Raises TypeError unless the class is a frozen dataclass of bools, numbers and strings.
    """
    name = type(kernel).__qualname__
    if not is_dataclass(kernel) or not type(kernel).__dataclass_params__.frozen:
        raise TypeError(f"{name} is not a frozen dataclass; its flags cannot be a cache key")
    flags = tuple((field.name, getattr(kernel, field.name)) for field in fields(kernel))
    for flag, value in flags:
        if not isinstance(value, (bool, int, float, str)):
            raise TypeError(f"{name}.{flag} is a {type(value).__name__}; flags are plain values")
    return flags


def source_hash(kernel: Any) -> str:
    """sha256 (hex) over the kernel's file and the device building blocks that it may use."""
    digest = hashlib.sha256(Path(inspect.getfile(type(kernel))).read_bytes())
    digest.update(_device_hash())
    return digest.hexdigest()


def options_for(arch: str) -> str:
    """What the compiler is told for a target, here and ahead of time."""
    return f"--enable-tvm-ffi --gpu-arch {arch}"


def ptx_of(compiled: Callable[..., None]) -> str:
    """PTX text of a kernel compiled with `keep_ptx`; ValueError without it."""
    ptx = compiled.artifacts.PTX if compiled.artifacts is not None else None
    if not ptx:
        raise ValueError("no PTX was kept; compile with keep_ptx=True")
    return ptx


def _compile(kernel: Any, key: KernelKey, keep_ptx: bool) -> Callable[..., None]:
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    from kpipe.runtime.host.carveout import whole_shared_memory

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = options_for(key.arch)
    with tempfile.TemporaryDirectory(prefix="kpipe-") as folder, whole_shared_memory():
        if keep_ptx:
            options += f" --keep-ptx --dump-dir={folder}"
        return cute.compile(kernel, *_fake_tensors(key.operands), stream, options=options)


def _fake_tensors(operands: Sequence[TensorSpec | None]) -> list[Any]:
    """Descriptors for the compiler; symbols of one name become one object."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    symbols: dict[Symbol, Any] = {}

    def extent(size: int | Symbol | None) -> Any:
        if isinstance(size, int):
            return size
        if size is None:
            return cute.sym_int()
        if size not in symbols:
            symbols[size] = cute.sym_int(size.bits, divisibility=size.multiple, symbol=size.name)
        return symbols[size]

    def fake(spec: TensorSpec) -> Any:
        return make_fake_tensor(
            getattr(cutlass, DTYPES[spec.dtype][0]),
            tuple(extent(size) for size in spec.shape),
            tuple(extent(stride) for stride in spec.strides),
            assumed_align=spec.align,
        )

    return [None if spec is None else fake(spec) for spec in operands]


def _row_major(name: str, shape: Sequence[int | Symbol | None]) -> tuple[int, ...]:
    """Strides of a contiguous tensor; only its first extent may be dynamic."""
    strides, step = [], 1
    for size in reversed(shape[1:]):
        strides.append(step)
        if not isinstance(size, int):
            raise ValueError(f"{name}: give strides where an inner extent is dynamic")
        step *= size
    return (*reversed([*strides, step]),)


@cache
def _device_hash() -> bytes:
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent.parent / "device").glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()
