"""Who writes what before whom, within one layer: the check that needs no timing model.

Every buffer has exactly one writer before its readers; a mailbox is polled between its peers'
publishing and any plain read; each mailbox is re-armed by the one op that the spec names, by its
own name or by the word of the modes that a variant fills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kpipe.codegen.diagnostics import Span
from kpipe.codegen.ops.contract import Access, Kind
from kpipe.codegen.plan.flags import Seat, active, polled_operands
from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.models import Pipeline


def check_dataflow(
    spec: Pipeline,
    names: Sequence[str],
    seats: Sequence[Seat],
    flags: Sequence[Mapping[str, bool]],
    spans: Sequence[Span],
    columns: Mapping[str, str],
    where: str,
    report: Report,
) -> None:
    """Report missing, late and double writers in one launch list.

    `columns` maps each column to its buffer; `where` names the mode and rows in messages.
    """
    writers = _writers(seats, flags)
    declared = {*spec.buffers, *spec.mailboxes, *columns}
    for target, positions in writers.items():
        whole = columns.get(target, target)
        others = [p for p in positions if target not in spec.mailboxes]
        if len(others) > 1:
            first, second = others[0], others[1]
            report.error(
                "KP201",
                f"{where}: `{names[first]}` and `{names[second]}` both write `{whole}`",
                spans[second],
                help="a buffer has exactly one writer before its readers; drop one, or bind one of "
                "them to another buffer",
                related=[("other writer", spans[first])],
            )
    for position, seat in enumerate(seats):
        for operand in seat.contract.operands:
            if operand.kind is not Kind.BUFFER or not active(operand, flags[position]):
                continue
            target = seat.targets[operand.name]
            if target not in declared:
                continue  # reported where the operand is bound
            if operand.access is Access.READ:
                whole = columns.get(target, target)
                found = writers.get(target, []) + (
                    writers.get(whole, []) if whole != target else []
                )
                _check_read(
                    names, seats, flags, spans, position, target, found, spec, where, report
                )
            elif operand.access.polls and target in spec.mailboxes:
                _check_poll(names, seats, flags, spans, position, target, writers, where, report)
    _check_rearm(spec, names, seats, flags, spans, where, report)


def _writers(seats: Sequence[Seat], flags: Sequence[Mapping[str, bool]]) -> dict[str, list[int]]:
    writers: dict[str, list[int]] = {}
    for position, seat in enumerate(seats):
        for operand in seat.contract.operands:
            written = operand.kind is Kind.BUFFER and operand.access.writes
            if written and active(operand, flags[position]):
                writers.setdefault(seat.targets[operand.name], []).append(position)
    return writers


def _check_read(
    names: Sequence[str],
    seats: Sequence[Seat],
    flags: Sequence[Mapping[str, bool]],
    spans: Sequence[Span],
    position: int,
    target: str,
    found: list[int],
    spec: Pipeline,
    where: str,
    report: Report,
) -> None:
    reader, ahead = names[position], seats[position].ahead
    if not found:
        report.error(
            "KP201",
            f"{where}: `{reader}` reads `{target}`, which no op of the mode writes",
            spans[position],
            help="add an op that writes it ahead of this one",
        )
        return
    late = [writer for writer in found if writer not in ahead]
    if late:
        report.error(
            "KP201",
            f"{where}: `{reader}` reads `{target}` before `{names[late[0]]}` has written it",
            spans[position],
            help=f"put `{names[late[0]]}` ahead of it, or join its stream first",
            related=[("writer", spans[late[0]])],
        )
        return
    if target in spec.mailboxes:
        pollers = [
            p
            for p in ahead
            if target in {seats[p].targets[o] for o in polled_operands(seats[p].contract, flags[p])}
        ]
        if not pollers:
            report.error(
                "KP701",
                f"{where}: `{reader}` reads mailbox `{target}` and nothing ahead of it waits "
                "for the peers' words",
                spans[position],
                help="put the op that polls it ahead of this one",
            )


def _check_poll(
    names: Sequence[str],
    seats: Sequence[Seat],
    flags: Sequence[Mapping[str, bool]],
    spans: Sequence[Span],
    position: int,
    target: str,
    writers: Mapping[str, list[int]],
    where: str,
    report: Report,
) -> None:
    found = [w for w in writers.get(target, []) if w == position or w in seats[position].ahead]
    if not found:
        report.error(
            "KP701",
            f"{where}: `{names[position]}` waits for mailbox `{target}`, which this rank has not "
            "published by then: every rank would wait for ever",
            spans[position],
            help="put the op that publishes it ahead of this one",
        )


def _check_rearm(
    spec: Pipeline,
    names: Sequence[str],
    seats: Sequence[Seat],
    flags: Sequence[Mapping[str, bool]],
    spans: Sequence[Span],
    where: str,
    report: Report,
) -> None:
    for mailbox, declared in spec.mailboxes.items():
        rearmers, users = [], []
        for position, seat in enumerate(seats):
            for operand in seat.contract.operands:
                if seat.targets.get(operand.name) != mailbox or not active(
                    operand, flags[position]
                ):
                    continue
                users.append(position)
                if operand.access.rearms:
                    rearmers.append(position)
        if not users:
            continue
        expected = declared.rearmed_by
        found = [seats[p].contract.name for p in rearmers]
        by_word = [seats[p].word for p in rearmers] == [expected]  # whatever op it became
        if found != [expected] and not by_word:
            actual = " and ".join(f"`{name}`" for name in found) or "no op"
            place = report.source.span("mailboxes", mailbox, "rearmed_by")
            report.error(
                "KP704",
                f"{where}: mailbox `{mailbox}` is re-armed by {actual}, the spec says `{expected}`",
                place,
                help=f"write `rearmed_by: {found[0]}`"
                if len(found) == 1
                else f"let `{expected}`, and no other op, re-arm it in this mode",
                related=[("in this mode", spans[users[-1]])],
                fix=report.replacement(place, expected, found[0]) if len(found) == 1 else (),
            )
