"""Whether each reader takes a value for what its writer made it.

Shapes and dtypes are compared where operands are bound; here it is the meaning: what integers
count, how a tensor lies over the ranks, the base of an LSE, rows without keys, holes in a list,
and what a mask may leave out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kpipe.codegen.diagnostics import Span
from kpipe.codegen.ops.contract import Kind, Operand
from kpipe.codegen.ops.types import LseBase, ValueType, resolve_type
from kpipe.codegen.plan.flags import Seat, active
from kpipe.codegen.plan.masks import check_masks
from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.models import Pipeline

_CODES = {
    "space": "KP210",
    "placement": "KP211",
    "lse": "KP213",
    "empty": "KP214",
    "format": "KP215",
    "mask": "KP212",
}


# One end of an edge: the position of its op, the operand, what it means there.
_End = tuple[int, Operand, ValueType]


def check_types(
    spec: Pipeline,
    names: Sequence[str],
    seats: Sequence[Seat],
    flags: Sequence[Mapping[str, bool]],
    spans: Sequence[Span],
    columns: Mapping[str, str],
    where: str,
    report: Report,
) -> None:
    """Report readers whose operand means something else than what the target's writers wrote.

    Arguments as in check_dataflow.  Operands without a type are not checked.  A step tensor that
    no op writes means the same to all its readers.
    """
    parallel = spec.parallel.dcp is not None, spec.parallel.tp
    writers = _writers(seats, flags)
    first: dict[str, _End] = {}
    told = _told_base(seats)
    check_masks(parallel, names, seats, flags, spans, columns, where, report)
    for position, seat in enumerate(seats):
        takes_base = _takes_base(seat)
        for operand in seat.contract.typed_reads:
            target = seat.targets[operand.name]
            wanted = resolve_type(operand.type, target, *parallel)
            if wanted is None or not active(operand, flags[position]):
                continue
            if takes_base and told is not LseBase.NONE:
                wanted = replace(wanted, lse=told)
            found = writers.get(target) or writers.get(columns.get(target, ""), ())
            reader = position, operand, wanted
            others = [(p, o, resolve_type(o.type, target, *parallel)) for p, o in found]
            if not found and operand.kind is Kind.STEP:
                others = [first.setdefault(target, reader)]
            for other in others:
                for field in wanted.refuses(other[2]) if other[2] else ():
                    _report(field, target, other, reader, names, seats, spans, where, report)


def _writers(
    seats: Sequence[Seat], flags: Sequence[Mapping[str, bool]]
) -> dict[str, list[tuple[int, Operand]]]:
    writers: dict[str, list[tuple[int, Operand]]] = {}
    for position, seat in enumerate(seats):
        for operand in seat.contract.typed_writes:
            if active(operand, flags[position]):
                writers.setdefault(seat.targets[operand.name], []).append((position, operand))
    return writers


def _takes_base(seat: Seat) -> bool:
    """Whether the planner tells the op the base of the LSE that it reads."""
    return "lse_base" in seat.contract.constants and not seat.contract.lse_base


def _told_base(seats: Sequence[Seat]) -> LseBase:
    """The base that every merge of the plan is told: one word, e as soon as one core writes it."""
    bases = {seat.contract.lse_base for seat in seats}
    if "e" in bases:
        return LseBase.E
    return LseBase.TWO if "2" in bases else LseBase.NONE


def _report(
    field: str,
    target: str,
    writer: _End,
    reader: _End,
    names: Sequence[str],
    seats: Sequence[Seat],
    spans: Sequence[Span],
    where: str,
    report: Report,
) -> None:
    from kpipe.codegen.plan.type_repairs import repair  # of use in an error only

    (writer_at, operand, written), (reader_at, _, wanted) = writer, reader
    have, want = getattr(written, field), getattr(wanted, field)
    writes = operand.access.writes
    how = "with" if field == "empty" else "as"
    report.error(
        _CODES[field],
        f"{where}: `{names[writer_at]}` {'writes' if writes else 'reads'} `{target}` {how} "
        f"{have.value}, `{names[reader_at]}` takes it {how} {want.value}",
        spans[reader_at],
        help=repair(field, have, want, names[reader_at], seats),
        related=[("writer" if writes else "other reader", spans[writer_at])],
    )
