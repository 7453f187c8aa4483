"""Paged caches: the byte layout of a token, and reading and writing it.

`fp8_tensor`: kv_lora E4M3 latent | pe E4M3, both stored as value / k_scale.
`fp8_ds_mla`: kv_lora E4M3 latent | one FP32 scale per 128 latents | pe BF16; no tensor scale.
`index_fp8`: per page, the index_dim E4M3 key bytes of all its tokens, then one FP32 scale each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

GROUP = 128  # latents that share one scale in fp8_ds_mla
FORMATS = ("fp8_tensor", "fp8_ds_mla", "index_fp8")

_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Field:
    """One part of a token's bytes: `count` elements of `dtype`, `offset` bytes into the row.

    In a planar format `offset` counts the bytes of the fields ahead of it for one token; the
    field of a page starts at `page * offset`.
    """

    name: str
    dtype: torch.dtype
    count: int
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes of this field per token."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class CacheFormat:
    """A named layout; two layouts of equal size with different names are different layouts."""

    name: str
    fields: tuple[Field, ...]
    planar: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return sum(part.bytes for part in self.fields)

    def page_bytes(self, page: int) -> int:
        """Bytes of a page of `page` tokens."""
        return page * self.row_bytes

    def field(self, name: str) -> Field:
        """The field of that name; ValueError lists the known ones."""
        for part in self.fields:
            if part.name == name:
                return part
        known = ", ".join(part.name for part in self.fields)
        raise ValueError(f"cache format {self.name} has no field {name}; it has {known}")

    def field_offset(self, name: str, token: int, page: int) -> int:
        """Byte offset of the field of the page's `token`, from the start of the page."""
        part = self.field(name)
        if self.planar:
            return page * part.offset + token * part.bytes
        return token * self.row_bytes + part.offset

    @property
    def latent_dims(self) -> int:
        """Elements of a dequantised row."""
        return sum(part.count for part in self.fields if part.name != "scale")


def cache_format(name: str, *, kv_lora: int = 0, pe: int = 0, index_dim: int = 0) -> CacheFormat:
    """The layout of that name; it uses the dimensions that it has.

    Raises ValueError for an unknown name, a missing dimension, and a kv_lora that the scale
    groups of fp8_ds_mla do not divide.
    """
    if name == "fp8_tensor":
        _need(name, kv_lora=kv_lora, pe=pe)
        return _layout(name, ("latent", _FP8, kv_lora), ("pe", _FP8, pe))
    if name == "fp8_ds_mla":
        _need(name, kv_lora=kv_lora, pe=pe)
        if kv_lora % GROUP:
            raise ValueError(f"fp8_ds_mla: kv_lora {kv_lora} is not a multiple of {GROUP}")
        scales = ("scale", torch.float32, kv_lora // GROUP)
        return _layout(name, ("latent", _FP8, kv_lora), scales, ("pe", torch.bfloat16, pe))
    if name == "index_fp8":
        _need(name, index_dim=index_dim)
        parts = ("key", _FP8, index_dim), ("scale", torch.float32, 1)
        return _layout(name, *parts, planar=True)
    raise ValueError(f"unknown cache format {name}; known are {', '.join(FORMATS)}")


def _need(name: str, **dims: int) -> None:
    for dim, value in dims.items():
        if value < 1:
            raise ValueError(f"cache format {name} needs {dim}, got {value}")


def _layout(name: str, *parts: tuple[str, torch.dtype, int], planar: bool = False) -> CacheFormat:
    fields, offset = [], 0
    for part in parts:
        fields.append(Field(*part, offset))
        offset += fields[-1].bytes
    return CacheFormat(name, tuple(fields), planar)


@dataclass(frozen=True, eq=False)
class PagedCache:
    """Bytes of a paged cache, uint8 [blocks, page, row_bytes], and the format to read them by.

    Blocks may lie further apart than a page (other layers' blocks in between), by a whole number
    of rows; inside a page the bytes are contiguous.  `name` only serves error texts.
    Raises ValueError where the tensor does not have this layout.
    """

    data: Tensor = field(repr=False)
    format: CacheFormat
    name: str = "cache"

    def __post_init__(self) -> None:
        data, row = self.data, self.format.row_bytes
        if data.dtype != torch.uint8 or data.dim() != 3:
            raise ValueError(
                f"{self.name}: {data.dtype} with {data.dim()} dimensions, needs torch.uint8 with 3"
            )
        if data.shape[2] != row:
            raise ValueError(
                f"{self.name}: rows of {data.shape[2]} bytes, format {self.format.name} needs {row}"
            )
        if data.stride(2) != 1 or (data.shape[1] > 1 and data.stride(1) != row):
            raise ValueError(
                f"{self.name}: strides {tuple(data.stride())[1:]} inside a page, needs ({row}, 1)"
            )
        if data.stride(0) % row:
            raise ValueError(
                f"{self.name}: block stride {data.stride(0)} is not a whole number of rows "
                f"of {row} bytes"
            )
        if data.stride(0) < data.shape[1] * row:
            raise ValueError(
                f"{self.name}: block stride {data.stride(0)} is less than the page of "
                f"{data.shape[1]} rows = {data.shape[1] * row} bytes"
            )

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.data.shape[0]

    @property
    def page(self) -> int:
        """Tokens of a block."""
        return self.data.shape[1]

    @property
    def block_rows(self) -> int:
        """Rows from one block to the next; physical row = block * block_rows + offset."""
        return self.data.stride(0) // self.format.row_bytes

    def view(self, name: str) -> Tensor:
        """The bytes of one field, uint8 [blocks, page, bytes of the field], without a copy."""
        part = self.format.field(name)
        if not self.format.planar:
            return self.data[:, :, part.offset : part.offset + part.bytes]
        pages = self.data.view(self.blocks, self.format.page_bytes(self.page))
        start = self.page * part.offset
        plane = pages[:, start : start + self.page * part.bytes]
        return plane.unflatten(1, (self.page, part.bytes))

    def physical_rows(self, table: Tensor, positions: Tensor) -> Tensor:
        """Physical rows (int64) of `positions` of the request whose blocks `table` lists.

        Raises ValueError where a position lies beyond the table or its entry is no block.
        """
        positions = positions.to(torch.int64)
        slots = positions // self.page
        if positions.numel() and int(slots.max()) >= table.numel():
            raise ValueError(
                f"{self.name}: position {int(positions.max())} needs {int(slots.max()) + 1} "
                f"blocks of {self.page}, the table has {table.numel()}"
            )
        blocks = table.to(torch.int64)[slots]
        self._check_blocks(blocks)
        return blocks * self.block_rows + positions % self.page

    def insert(self, slots: Tensor, **values: Tensor) -> None:
        """Writes the row of every slot >= 0 (block * page + offset); skips negative slots.

        `values` gives every field of the format, [rows, count] in the field's dtype.  No other
        byte changes.  Raises ValueError for missing or extra fields, shapes, dtypes, slots.
        """
        names = [part.name for part in self.format.fields]
        if sorted(values) != sorted(names):
            raise ValueError(f"{self.name}: insert of {sorted(values)}, needs {sorted(names)}")
        slots = slots.to(torch.int64)
        rows = torch.nonzero(slots >= 0).flatten()
        blocks, offsets = slots[rows] // self.page, slots[rows] % self.page
        self._check_blocks(blocks)
        for part in self.format.fields:
            value = values[part.name]
            if value.dtype != part.dtype or tuple(value.shape) != (slots.numel(), part.count):
                raise ValueError(
                    f"{self.name}: field {part.name} is {value.dtype} {tuple(value.shape)}, "
                    f"needs {part.dtype} ({slots.numel()}, {part.count})"
                )
            data = value.contiguous().view(torch.uint8)
            self.view(part.name)[blocks, offsets] = data.reshape(slots.numel(), -1)[rows]

    def gather(self, rows: Tensor) -> dict[str, Tensor]:
        """Every field of the given physical rows, {name: [n, count] in the field's dtype}.

        Touches no other bytes.  Raises ValueError for a row outside the cache.
        """
        rows = rows.to(torch.int64)
        blocks, offsets = rows // self.block_rows, rows % self.block_rows
        self._check_blocks(blocks)
        if rows.numel() and int(offsets.max()) >= self.page:
            row = int(rows[int(offsets.argmax())])
            raise ValueError(
                f"{self.name}: row {row} is row {row % self.block_rows} of its block, "
                f"a page has {self.page}"
            )
        return {
            part.name: self.view(part.name)[blocks, offsets].view(part.dtype)
            for part in self.format.fields
        }

    def dequantise(self, rows: Tensor, k_scale: Tensor | float = 1.0) -> Tensor:
        """The given physical rows as FP32 [n, latent_dims], scales applied.

        `k_scale` applies to fp8_tensor only: the other formats carry their own scales, as stored
        (any FP32 value, not only powers of two).
        """
        parts = self.gather(rows)
        if self.format.name == "fp8_tensor":
            values = torch.cat([parts["latent"].float(), parts["pe"].float()], dim=1)
            return values * k_scale
        if self.format.name == "fp8_ds_mla":
            groups = parts["latent"].float().unflatten(1, (-1, GROUP))
            latent = (groups * parts["scale"].unsqueeze(-1)).flatten(1)
            return torch.cat([latent, parts["pe"].float()], dim=1)
        return parts["key"].float() * parts["scale"]

    def _check_blocks(self, blocks: Tensor) -> None:
        """ValueError unless every block id lies in the cache."""
        if blocks.numel() and (int(blocks.min()) < 0 or int(blocks.max()) >= self.blocks):
            wrong = int(blocks.min()) if int(blocks.min()) < 0 else int(blocks.max())
            raise ValueError(f"{self.name}: block {wrong} is outside 0..{self.blocks - 1}")
