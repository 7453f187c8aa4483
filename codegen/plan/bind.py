"""Operands to memory: names, renames, shapes and types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kpipe.codegen.diagnostics import Span
from kpipe.codegen.ops.contract import Contract, Kind, Operand
from kpipe.codegen.plan.dims import SYMBOLS
from kpipe.codegen.plan.flags import active
from kpipe.codegen.plan.model import BufferPlan, MailboxPlan, TensorPlan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.expressions import ExpressionError, evaluate, parse
from kpipe.codegen.spec.models import Pipeline, Stage

_QUERY_DTYPES = {"fp8_tensor": "fp8", "fp8_ds_mla": "bf16", "nvfp4_ds_mla": "fp8"}


@dataclass(frozen=True)
class Memory:
    """What operands can bind to: name -> (shape with symbols as primes, dtype)."""

    buffers: Mapping[str, tuple[tuple[int, ...], str]]
    mailboxes: Mapping[str, tuple[tuple[int, ...], str]]
    caches: tuple[str, ...]
    dims: Mapping[str, int]
    query_dtype: str


def memory_of(
    spec: Pipeline,
    dims: Mapping[str, int],
    rows_cap: int,
    buffers: tuple[BufferPlan, ...],
    mailboxes: tuple[MailboxPlan, ...],
) -> Memory:
    """Index of everything that an operand may bind to, columns included."""
    places: dict[str, tuple[tuple[int, ...], str]] = {}
    for buffer in buffers:
        shape = tuple(SYMBOLS[a] if isinstance(a, str) else a for a in buffer.shape)
        places[buffer.name] = (shape, buffer.dtype)
        for column, _, width in buffer.columns:
            places[column] = ((*shape[:-1], width), buffer.dtype)
    boxes = {mailbox.name: (mailbox.shape, mailbox.dtype) for mailbox in mailboxes}
    formats = [c.format for c in spec.caches.values() if c.format in _QUERY_DTYPES]
    query_dtype = _QUERY_DTYPES[formats[0]] if formats else "bf16"
    return Memory(places, boxes, tuple(spec.caches), {**dims, "rows_cap": rows_cap}, query_dtype)


def operand_dtype(operand: Operand, memory: Memory) -> str:
    """The dtype of an operand; `query` follows the latent cache's format."""
    return memory.query_dtype if operand.dtype == "query" else operand.dtype


def operand_shape(operand: Operand, memory: Memory, span: Span, report: Report) -> tuple[int, ...]:
    """Axes as numbers, symbols as primes."""
    names = {**memory.dims, **SYMBOLS}
    axes = []
    for text in operand.shape:
        try:
            axes.append(evaluate(parse(text), names))
        except ExpressionError as error:
            report.error(
                "KP111",
                f"operand `{operand.name}` has shape {', '.join(operand.shape)}: {error.message}",
                span,
                help="the geometry lacks a dimension that this op needs",
            )
            return ()
    return tuple(axes)


def bind_operands(
    contract: Contract,
    name: str,
    stage: Stage,
    stage_path: tuple[str, ...],
    memory: Memory,
    span: Span,
    report: Report,
) -> dict[str, str]:
    """Operand -> target for one op of a stage.  Unknown and mismatched targets are reported."""
    targets = {}
    for operand in contract.operands:
        renamed = stage.bind.get(f"{name}.{operand.name}") or stage.bind.get(operand.name)
        target = renamed or operand.name
        targets[operand.name] = target
        place = span
        if renamed:
            key = operand.name if operand.name in stage.bind else f"{name}.{operand.name}"
            place = report.source.span(*stage_path, "with", key)
        if renamed and operand.kind in (Kind.WEIGHT, Kind.STEP):
            what = "weight" if operand.kind is Kind.WEIGHT else "step tensor"
            report.error(
                "KP103",
                f"`{operand.name}` of `{contract.name}` is a {what}, which the engine hands in by "
                "this name; it cannot be bound",
                place,
                help="delete the entry; buffers, columns, mailboxes and caches can be bound",
                once=True,
            )
        elif operand.kind is Kind.BUFFER:
            _check_buffer(contract, operand, target, memory, place, report)
        elif operand.kind is Kind.CACHE and target not in memory.caches:
            report.error(
                "KP103",
                f"`{contract.name}` needs a cache `{target}`, which `caches` does not declare",
                place,
                allowed=memory.caches,
                help=f"declare it, or bind the operand: `with: {{{operand.name}: ...}}`",
                once=True,
            )
    return targets


def _check_buffer(
    contract: Contract, operand: Operand, target: str, memory: Memory, span: Span, report: Report
) -> None:
    found = memory.buffers.get(target) or memory.mailboxes.get(target)
    needs = f"{', '.join(operand.shape)}, {operand_dtype(operand, memory)}"
    if found is None:
        if operand.when:
            return  # reported by check_targets, once it is known whether the operand exists
        report.error(
            "KP103",
            f"`{contract.name}` needs a buffer `{target}` ({needs}), which nothing declares",
            span,
            help=f"declare it under `buffers`, or bind the operand: "
            f"`with: {{{operand.name}: ...}}`",
            once=True,
        )
        return
    shape = operand_shape(operand, memory, span, report)
    if not shape:
        return
    dtype = operand_dtype(operand, memory)
    if found[1] != dtype:
        report.error(
            "KP202",
            f"`{contract.name}` takes `{operand.name}` as {dtype}; `{target}` is {found[1]}",
            _declaration(report, target) or span,
            help=f"write `dtype: {dtype}`, or bind the operand to another buffer",
            related=[("op", span)],
            once=True,
        )
    elif found[0] != shape:
        report.error(
            "KP202",
            f"`{contract.name}` takes `{operand.name}` as [{_text(shape)}]; `{target}` is "
            f"[{_text(found[0])}]",
            _declaration(report, target) or span,
            help=f"write `shape: [{', '.join(operand.shape)}]`, or bind the operand to another "
            "buffer",
            related=[("op", span)],
            once=True,
        )


def _declaration(report: Report, target: str) -> Span | None:
    from kpipe.codegen.spec.document import find

    for section in ("buffers", "mailboxes"):
        if find(report.source.root, (section, target)) is not None:
            return report.source.span(section, target)
    return None


def _text(shape: tuple[int, ...]) -> str:
    names = {value: name for name, value in SYMBOLS.items()}
    return ", ".join(names.get(axis, str(axis)) for axis in shape)


def collect_tensors(
    contracts: tuple[Contract, ...],
    kind: Kind,
    memory: Memory,
    settled: Mapping[str, Mapping[str, bool]],
    report: Report,
) -> tuple[TensorPlan, ...]:
    """Weights or step tensors that these ops can need, by name; the same name has one shape.

    `settled` are the flags of each op that are the same for all rows.
    """
    symbols = {value: name for name, value in SYMBOLS.items()}
    found: dict[str, TensorPlan] = {}
    for contract in contracts:
        for operand in contract.operands:
            flags = settled[contract.name]
            left_out = operand.when.lstrip("!") in flags and not active(operand, flags)
            if operand.kind is not kind or left_out:
                continue
            shape = operand_shape(operand, memory, report.source.span("stages"), report)
            named = tuple(symbols.get(axis, axis) for axis in shape)
            known = found.get(operand.name)
            written = operand.access.writes or (known is not None and known.written)
            dtype = operand_dtype(operand, memory)
            found[operand.name] = TensorPlan(operand.name, named, dtype, operand.shape, written)
    return tuple(found[name] for name in sorted(found))
