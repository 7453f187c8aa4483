"""Named records that a layer takes, and the declarations that they are checked against.

Nothing here knows a model: a generated layer declares its operands with `TensorSpec` and
`BufferSpec`; `check_tensors` compares what the engine hands in, and reports everything at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
MOST_SAVED = 8
"""Saved blocks that AttnRes mixes at most."""
STEP_OUTPUTS = ("out", "new_prefix")
"""Tensors of a step that a layer writes."""
Axis = int | str  # a size, or a name such as "rows" whose size a step decides


class LayerError(ValueError):
    """What was handed to a layer does not fit what it declares."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that the engine hands in; axes named by text are decided by the step."""

    shape: tuple[Axis, ...]
    dtype: str


@dataclass(frozen=True)
class BufferSpec:
    """Scratch of a layer, allocated for `rows_cap` rows.

    `scope` says who else gets this buffer: layer, kind, model or device (see `Scratch`);
    `columns` names blocks of the last axis: name -> (offset, width).
    """

    shape: tuple[Axis, ...]
    dtype: str
    scope: str = "kind"
    columns: Mapping[str, tuple[int, int]] | None = None
    zeroed: bool = False

    @property
    def rows_axis(self) -> int:
        """The axis that counts rows."""
        return self.shape.index("rows")


@dataclass(frozen=True)
class CacheSpec:
    """A paged cache: byte format and tokens per kernel page."""

    format: str
    page: int


@dataclass
class Weights:
    """Static tensors of one layer; a pipeline takes the fields that it declares.

    Shapes with H heads of this rank: packed [pitch, hidden], q_norm [q_lora], kv_norm [kv_lora],
    q_b [H * (nope + pe), q_lora], w_uk [H, nope, kv_lora], w_uv [H, v_dim, kv_lora] (latent
    innermost) or, where rows travel behind it, w_uv_all [tp * H, v_dim, kv_lora] of every rank's
    heads, index_q_b [index_heads * index_dim, q_lora], o_proj [hidden, H * v_dim], all BF16;
    index_k_norm and index_k_bias [index_dim], q_scale, k_scale and v_scale [1] FP32.  v_scale is
    checked against k_scale: an MLA latent has one scale.  AttnRes takes mix_norm, mix_query and
    out_norm [hidden] BF16.
    """

    packed: Tensor | None = None
    q_norm: Tensor | None = None
    kv_norm: Tensor | None = None
    q_b: Tensor | None = None
    w_uk: Tensor | None = None
    w_uv: Tensor | None = None
    w_uv_all: Tensor | None = None
    index_q_b: Tensor | None = None
    index_k_norm: Tensor | None = None
    index_k_bias: Tensor | None = None
    o_proj: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    mix_norm: Tensor | None = None
    mix_query: Tensor | None = None
    out_norm: Tensor | None = None


@dataclass
class Caches:
    """Paged bytes of one layer: uint8 [blocks, page, row_bytes]; blocks may be strided."""

    latent_kv: Tensor | None = None
    index_kv: Tensor | None = None


@dataclass
class Step:
    """What one step hands to a layer.

    hidden and out [rows, hidden] BF16; lengths [requests] int32, the new rows included;
    slots and index_slots [rows] int64, negative where nothing is inserted; block_table
    [requests, pages] and index_table [requests, index_pages] int32; q query rows a request,
    rows = requests * q.  Under context parallelism slots and tables are this rank's, lengths
    are global.  A layer that adds to the residual stream takes it as prefix [rows, hidden] BF16;
    one with AttnRes takes up to MOST_SAVED blocks saved [blocks, rows, hidden] BF16 (blocks may be
    any distance apart) and leaves the stream in new_prefix [rows, hidden].
    """

    hidden: Tensor
    out: Tensor
    lengths: Tensor
    slots: Tensor
    block_table: Tensor
    index_slots: Tensor | None = None
    index_table: Tensor | None = None
    prefix: Tensor | None = None
    saved: Tensor | None = None
    new_prefix: Tensor | None = None
    q: int = 1

    @property
    def rows(self) -> int:
        """Token rows of the step."""
        return self.hidden.shape[0]


def given(record: object) -> dict[str, Tensor]:
    """The tensors of a record by name, those left out excluded."""
    values = [(name, getattr(record, name)) for name in names_of(type(record))]
    return {name: value for name, value in values if isinstance(value, Tensor)}


@cache
def names_of(record: type) -> tuple[str, ...]:
    """The names of the fields of a kind of record."""
    return tuple(field.name for field in fields(record))


def check_tensors(
    what: str,
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, TensorSpec],
    sizes: Mapping[str, int],
    *,
    optional: Iterable[str] = (),
) -> None:
    """Compare tensors with their declarations.

    `sizes` gives named axes that are known; a named axis that is not in it may have any size.
    Raises LayerError that lists every missing, superfluous or misshapen tensor.
    """
    problems = []
    for name, spec in specs.items():
        if name not in tensors:
            problems.append(f"{name} is missing: {_text(spec, sizes)}")
            continue
        tensor = tensors[name]
        if tensor.dtype != DTYPES[spec.dtype] or not _fits(tensor.shape, spec.shape, sizes):
            found = f"[{', '.join(map(str, tensor.shape))}] {_dtype_name(tensor.dtype)}"
            problems.append(f"{name} is {found}, not {_text(spec, sizes)}")
    for name in tensors:
        if name not in specs and name not in optional:
            problems.append(f"{name} is not an operand of this layer")
    if problems:
        raise LayerError(f"{what}: " + "; ".join(problems))


def _fits(found: torch.Size, declared: tuple[Axis, ...], sizes: Mapping[str, int]) -> bool:
    if len(found) != len(declared):
        return False
    for size, axis in zip(found, declared, strict=True):
        expected = sizes.get(axis) if isinstance(axis, str) else axis
        if expected is not None and size != expected:
            return False
    return True


def _text(spec: TensorSpec, sizes: Mapping[str, int]) -> str:
    axes = ", ".join(str(sizes.get(a, a) if isinstance(a, str) else a) for a in spec.shape)
    return f"[{axes}] {spec.dtype}"


def _dtype_name(dtype: torch.dtype) -> str:
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))
