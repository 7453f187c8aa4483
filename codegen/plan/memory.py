"""Buffers, mailboxes and caches of a spec with their sizes filled in and checked."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from kpipe.codegen.plan.dims import SYMBOLS, shape_value
from kpipe.codegen.plan.model import BufferPlan, CachePlan, MailboxPlan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.expressions import names_in, parse
from kpipe.codegen.spec.models import Buffer, Cache, Pipeline

DTYPE_BYTES = {"bf16": 2, "fp8": 1, "fp32": 4, "i32": 4, "i64": 8, "u8": 1}
_INT32_MAX = 2**31 - 1
_SYMBOL_NAMES = {value: name for name, value in SYMBOLS.items()}
# Words that no payload of the type can hold once it is sanitised.
_SAFE_SENTINELS = {
    "fp8": (0xFFFFFFFF,),
    "bf16": (0x80000000, 0xFFFFFFFF),
    "fp32": (0xFFFFFFFF,),
    "i32": (0xFFFFFFFF,),
}


def named_shape(shape: tuple[int, ...]) -> tuple[int | str, ...]:
    """Numbers, with symbolic sizes as their names again."""
    return tuple(_SYMBOL_NAMES.get(size, size) for size in shape)


def derive_pitches(spec: Pipeline, dims: dict[str, int], report: Report) -> None:
    """The last axis of a buffer with columns is their sum; its name becomes a dimension."""
    for name, buffer in spec.buffers.items():
        if not buffer.columns:
            if "pad_to" in buffer.model_fields_set:
                report.error(
                    "KP109",
                    f"buffer `{name}`: `pad_to` is read where columns add up to the last axis",
                    report.source.span("buffers", name, "pad_to", key=True),
                    help="delete it, or write the padded size into `shape`",
                )
            continue
        widths = [
            _column(name, column, text, dims, report) for column, text in buffer.columns.items()
        ]
        last = str(buffer.shape[-1])
        if any(width is None for width in widths):
            dims.setdefault(last, 1)  # reported; the axis itself is not to blame
            continue
        total = sum(width for width in widths if width is not None)
        pitch = -(-total // buffer.pad_to) * buffer.pad_to
        if last.isidentifier() and last not in dims and last not in SYMBOLS:
            dims[last] = pitch
            continue
        span = report.source.span("buffers", name, "shape")
        value = shape_value(last, dims, report, span, f"buffer `{name}`")
        if value is not None and value != pitch:
            report.error(
                "KP202",
                f"buffer `{name}`: columns add up to {pitch}, the last axis `{last}` is {value}",
                span,
                help="give the last axis a new name, for example `pitch`: it becomes the sum",
            )


def _column(
    buffer: str, column: str, text: str | int, dims: Mapping[str, int], report: Report
) -> int | None:
    span = report.source.span("buffers", buffer, "columns", column)
    return shape_value(text, dims, report, span, f"column `{column}`", extra={})


def plan_buffers(
    spec: Pipeline, dims: Mapping[str, int], rows_cap: int, report: Report
) -> tuple[BufferPlan, ...]:
    """Every buffer with its axes as numbers (or the names rows, requests)."""
    planned = []
    for name, buffer in spec.buffers.items():
        shape = _axes("buffers", name, buffer.shape, {**dims, "rows_cap": rows_cap}, report)
        if shape is None:
            continue
        size = prod(_at_cap(axis, rows_cap) for axis in shape) * DTYPE_BYTES[buffer.dtype]
        planned.append(
            BufferPlan(
                name,
                named_shape(shape),
                buffer.dtype,
                buffer.scope,
                _columns(name, buffer, dims, report),
                buffer.init == "zeros",
                size,
                tuple(str(axis) for axis in buffer.shape),
            )
        )
    return tuple(planned)


def _at_cap(axis: int, rows_cap: int) -> int:
    return rows_cap if axis in _SYMBOL_NAMES else axis


def _axes(
    section: str, name: str, shape: tuple[str | int, ...], dims: Mapping[str, int], report: Report
) -> tuple[int, ...] | None:
    axes = []
    for position, text in enumerate(shape):
        span = report.source.span(section, name, "shape", position)
        axes.append(shape_value(text, dims, report, span, f"`{name}`"))
    return None if any(axis is None for axis in axes) else tuple(axes)  # type: ignore[arg-type]


def _columns(
    name: str, buffer: Buffer, dims: Mapping[str, int], report: Report
) -> tuple[tuple[str, int, int], ...]:
    offset, columns = 0, []
    for column, text in buffer.columns.items():
        width = _column(name, column, text, dims, report) or 0
        columns.append((column, offset, width))
        offset += width
    return tuple(columns)


def plan_mailboxes(
    spec: Pipeline, dims: Mapping[str, int], rows_cap: int, report: Report
) -> tuple[MailboxPlan, ...]:
    """Every mailbox; its sentinel must be a word that no payload can hold."""
    planned = []
    for name, mailbox in spec.mailboxes.items():
        shape = _axes("mailboxes", name, mailbox.shape, {**dims, "rows_cap": rows_cap}, report)
        if shape is None:
            continue
        safe = _SAFE_SENTINELS.get(mailbox.dtype, ())
        if mailbox.sentinel not in safe:
            report.error(
                "KP703",
                f"mailbox `{name}`: a {mailbox.dtype} payload can hold the word "
                f"0x{mailbox.sentinel:08X}, so readers would wait for ever or miss data",
                report.source.span("mailboxes", name, "sentinel"),
                allowed=tuple(f"0x{word:08X}" for word in safe),
                help=f"write `sentinel: 0x{safe[0]:08X}`"
                if safe
                else f"mailboxes carry {', '.join(_SAFE_SENTINELS)}",
            )
        if (shape[-1] * DTYPE_BYTES[mailbox.dtype]) % 4:
            report.error(
                "KP202",
                f"mailbox `{name}`: the last axis must fill whole 4-byte words, it has "
                f"{shape[-1]} x {DTYPE_BYTES[mailbox.dtype]} bytes",
                report.source.span("mailboxes", name, "shape"),
                help="choose a last axis, or a dtype, whose bytes are a multiple of 4",
            )
        size = prod(shape) * DTYPE_BYTES[mailbox.dtype] * mailbox.parities
        planned.append(
            MailboxPlan(
                name,
                shape,
                mailbox.dtype,
                mailbox.sentinel,
                mailbox.parities,
                mailbox.rearmed_by,
                size,
                tuple(str(axis) for axis in mailbox.shape),
                *_source(mailbox.shape, shape, dims["tp"]),
            )
        )
    return tuple(planned)


def _source(texts: tuple[str | int, ...], shape: tuple[int, ...], ranks: int) -> tuple[int, int]:
    """The axis whose places belong to writers, and how many to each.

    It is the axis that counts ranks; where none does, writers own blocks of the last axis.
    """
    for axis, text in enumerate(texts):
        if names_in(parse(str(text))) & {"tp", "dcp"}:
            return axis, max(1, shape[axis] // ranks)
    return len(shape) - 1, max(1, shape[-1] // ranks)


def row_bytes(cache_format: str, dims: Mapping[str, int]) -> int:
    """Bytes of one token in a cache format."""
    kv_lora, pe, index_dim = dims.get("kv_lora", 0), dims.get("pe", 0), dims.get("index_dim", 0)
    return {
        "fp8_tensor": kv_lora + pe,
        "fp8_ds_mla": kv_lora + 4 * (kv_lora // 128) + 2 * pe,
        "nvfp4_ds_mla": kv_lora // 2 + pe + kv_lora // 16,
        "index_fp8": index_dim + 4,
        "kda_state": 0,
        "kda_conv": 0,
    }[cache_format]


def plan_caches(spec: Pipeline, dims: Mapping[str, int], report: Report) -> tuple[CachePlan, ...]:
    """Every cache with its row bytes; pages, interleave and address range are checked."""
    planned = []
    for name, cache in spec.caches.items():
        _check_pages(name, cache, spec.parallel.interleave, spec.parallel.dcp is not None, report)
        if cache.format == "fp8_ds_mla" and dims.get("kv_lora", 128) % 128:
            report.error(
                "KP104",
                "cache format fp8_ds_mla has one scale per 128 values; kv_lora is "
                f"{dims['kv_lora']}",
                report.source.span("caches", name, "format"),
                help="choose a kv_lora that 128 divides, or another format",
            )
        size = row_bytes(cache.format, dims)
        planned.append(
            CachePlan(name, cache.format, cache.page, size, cache.manager_page, cache.max_blocks)
        )
    return tuple(planned)


def _check_pages(
    name: str, cache: Cache, interleave: int, context_parallel: bool, report: Report
) -> None:
    if cache.manager_page is not None and cache.manager_page % cache.page:
        report.error(
            "KP110",
            f"cache `{name}`: page {cache.manager_page} is not a multiple of kernel page "
            f"{cache.page}",
            report.source.span("caches", name, "manager_page"),
            help=f"choose a multiple of {cache.page}, for example "
            f"{-(-cache.manager_page // cache.page) * cache.page}",
        )
    if context_parallel and cache.page % interleave:
        report.error(
            "KP110",
            f"interleave {interleave} does not divide page {cache.page} of cache `{name}`",
            report.source.span("parallel", "interleave"),
            help=f"choose an interleave that divides {cache.page}",
            related=[("cache", report.source.span("caches", name))],
        )
    if cache.max_blocks is not None and cache.max_blocks * cache.page - 1 > _INT32_MAX:
        report.error(
            "KP110",
            f"cache `{name}`: {cache.max_blocks} blocks of {cache.page} rows end at row "
            f"{cache.max_blocks * cache.page - 1}, beyond the row ids' limit {_INT32_MAX}",
            report.source.span("caches", name, "max_blocks"),
            help=f"at most {(_INT32_MAX + 1) // cache.page} blocks fit",
        )
