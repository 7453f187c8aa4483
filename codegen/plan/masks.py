"""What a mask may leave out: a key that another rank stores is no reason to skip its query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kpipe.codegen.diagnostics import Span
from kpipe.codegen.ops.contract import Contract, Kind, Operand
from kpipe.codegen.ops.types import Mask, Placement, ValueType, resolve_type
from kpipe.codegen.plan.flags import Seat, active
from kpipe.codegen.plan.report import Report

# A mask operand, its domain, an output that it may not gate, and where that lies (None: a cache).
Refused = tuple[Operand, Mask, Operand, Placement | None]


def refused_gates(
    contract: Contract,
    flags: Mapping[str, bool],
    targets: Mapping[str, str],
    parallel: tuple[bool, int],
) -> tuple[Refused, ...]:
    """Outputs that the op leaves out by a mask which tells other rows apart.

    `targets`: operand to memory; `parallel`: whether contexts are sharded, and over how many
    ranks.  Masks and outputs without a type are not checked.
    """
    found = []
    for mask in contract.operands:
        meaning = _type(mask, targets, parallel)
        if not mask.gates or meaning is None or not active(mask, flags):
            continue
        for name in mask.gates:
            output = contract.operand(name)
            if output is None or not active(output, flags):
                continue
            written = _type(output, targets, parallel)
            placement = written.placement if written else None
            if (written or output.kind is Kind.CACHE) and not meaning.mask.may_gate(placement):
                found.append((mask, meaning.mask, output, placement))
    return tuple(found)


def _type(
    operand: Operand, targets: Mapping[str, str], parallel: tuple[bool, int]
) -> ValueType | None:
    return resolve_type(operand.type, targets.get(operand.name, operand.name), *parallel)


def check_masks(
    parallel: tuple[bool, int],
    names: Sequence[str],
    seats: Sequence[Seat],
    flags: Sequence[Mapping[str, bool]],
    spans: Sequence[Span],
    columns: Mapping[str, str],
    where: str,
    report: Report,
) -> None:
    """Report outputs that a mask of the wrong domain gates, with the first op that reads them."""
    for position, seat in enumerate(seats):
        for mask, domain, output, placement in refused_gates(
            seat.contract, flags[position], seat.targets, parallel
        ):
            target = seat.targets[output.name]
            reader = _reader(target, position, seats, flags, columns)
            holds = placement.value if placement else "a cache"
            report.error(
                "KP212",
                f"{where}: `{names[position]}` leaves rows out of `{target}` ({holds}) by "
                f"`{seat.targets[mask.name]}`, which tells apart {domain.value}",
                spans[position],
                help=_repair(seat.contract, mask, output),
                related=[] if reader is None else [("reader", spans[reader])],
            )


def _reader(
    target: str,
    writer: int,
    seats: Sequence[Seat],
    flags: Sequence[Mapping[str, bool]],
    columns: Mapping[str, str],
) -> int | None:
    memory = columns.get(target, target)
    for position, seat in enumerate(seats):
        for operand in seat.contract.operands:
            bound = seat.targets.get(operand.name, "")
            reads = operand.access.reads and active(operand, flags[position])
            if position != writer and reads and columns.get(bound, bound) == memory:
                return position
    return None


def _repair(contract: Contract, mask: Operand, output: Operand) -> str:
    others = [name for name in mask.gates if name != output.name]
    kept = f"`{mask.name}` may go on to gate {_listed(others)}; " if others else ""
    return (
        f"{kept}compute `{output.name}` of `{contract.name}` for every row in use, which "
        "`lengths` tells (0: padding)"
    )


def _listed(names: list[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)
