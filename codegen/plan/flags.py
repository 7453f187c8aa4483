"""Kernel flags, derived from the mode: who writes what, who polls, who is alone.

A flag is never written in the spec.  It follows from which ops stand in the mode and in which
order, so an overlap edit can change a flag but never a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kpipe.codegen.ops.contract import Access, Contract, Derive, Flag, Operand


@dataclass(frozen=True)
class Seat:
    """One op of a mode before its flags are known."""

    contract: Contract
    targets: Mapping[str, str]  # operand -> memory that it is bound to
    options: Mapping[str, str]
    ahead: frozenset[int]  # seats that are complete before this one starts
    word: str = ""  # as the mode says it (the slot, where a variant chose the op)


def active(operand: Operand, flags: Mapping[str, bool]) -> bool:
    """Whether the operand exists under these flags."""
    if not operand.when:
        return True
    return (
        not flags.get(operand.when[1:], False)
        if operand.when[0] == "!"
        else flags.get(operand.when, False)
    )


def derive_flags(seats: Sequence[Seat], context_parallel: bool) -> tuple[dict[str, bool], ...]:
    """Flags of every seat."""
    flags: list[dict[str, bool]] = [_plain_flags(seat, context_parallel) for seat in seats]
    for derive, decide in (
        (Derive.IS_WRITTEN, _is_written),
        (Derive.WRITTEN_APART, _is_written_apart),
        (Derive.ONLY_WRITER, _is_only_writer),
        (Derive.ONLY_POLLER, _is_only_poller),
    ):
        for position, seat in enumerate(seats):
            for flag in seat.contract.flags:
                if flag.derive is derive:
                    flags[position][flag.name] = decide(seats, flags, position, flag)
    return tuple(flags)


def _plain_flags(seat: Seat, context_parallel: bool) -> dict[str, bool]:
    flags = {}
    for flag in seat.contract.flags:
        if flag.derive is Derive.CONTEXT_PARALLEL:
            flags[flag.name] = context_parallel
        elif flag.derive is Derive.OPTION:
            flags[flag.name] = seat.options.get(flag.operand) == flag.name
    return flags


def _may_write(seat: Seat, target: str) -> bool:
    """Writes the target, or would if nobody else did."""
    return any(
        o.access.writes and seat.targets.get(o.name) == target for o in seat.contract.operands
    )


def _writes(seat: Seat, flags: Mapping[str, bool], target: str) -> bool:
    return any(
        o.access.writes and active(o, flags) and seat.targets.get(o.name) == target
        for o in seat.contract.operands
    )


def _written_by(seats: Sequence[Seat], others: Iterable[int], position: int, flag: Flag) -> bool:
    target = seats[position].targets.get(flag.operand, flag.operand)
    return any(_may_write(seats[other], target) for other in others)


def _is_written(
    seats: Sequence[Seat], flags: Sequence[Mapping[str, bool]], position: int, flag: Flag
) -> bool:
    return _written_by(seats, seats[position].ahead, position, flag)


def _is_written_apart(
    seats: Sequence[Seat], flags: Sequence[Mapping[str, bool]], position: int, flag: Flag
) -> bool:
    return _written_by(seats, (i for i in range(len(seats)) if i != position), position, flag)


def _is_only_writer(
    seats: Sequence[Seat], flags: Sequence[Mapping[str, bool]], position: int, flag: Flag
) -> bool:
    target = seats[position].targets.get(flag.operand, flag.operand)
    others = [i for i in range(len(seats)) if i != position]
    if any(_writes(seats[i], flags[i], target) for i in others):
        return False
    return any(
        o.access.reads and active(o, flags[i]) and seats[i].targets.get(o.name) == target
        for i in range(len(seats))
        for o in seats[i].contract.operands
    )


def _is_only_poller(
    seats: Sequence[Seat], flags: Sequence[Mapping[str, bool]], position: int, flag: Flag
) -> bool:
    target = seats[position].targets.get(flag.operand, flag.operand)
    operand = seats[position].contract.operand(flag.operand)
    if operand is None or not active(operand, flags[position]):
        return False
    return not any(
        o.access.polls and seats[i].targets.get(o.name) == target
        for i in range(len(seats))
        if i != position
        for o in seats[i].contract.operands
    )


def polled_operands(contract: Contract, flags: Mapping[str, bool]) -> tuple[str, ...]:
    """Operands on which a launch spins, its flags considered."""
    own = [o.name for o in contract.operands if o.access.polls and active(o, flags)]
    derived = [
        f.operand
        for f in contract.flags
        if f.derive is Derive.ONLY_POLLER and flags.get(f.name, False)
    ]
    return (*own, *derived)


def only_consumes(contract: Contract, flags: Mapping[str, bool]) -> bool:
    """True where a launch that exchanges words only takes them: an op ahead of it has sent them."""
    exchanged = {o.name for o in contract.operands if o.access is Access.EXCHANGE}
    return any(
        flag.derive is Derive.ONLY_WRITER
        and flag.operand in exchanged
        and not flags.get(flag.name, False)
        for flag in contract.flags
    )


def sends(operand: Operand, contract: Contract, flags: Mapping[str, bool]) -> bool:
    """Whether a launch with these flags stores words of that mailbox into its peers' memory."""
    if not operand.access.publishes or not active(operand, flags):
        return False
    return not (operand.access is Access.EXCHANGE and only_consumes(contract, flags))
