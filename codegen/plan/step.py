"""The plan of one step: a mode with its slots filled, flags derived, launches bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kpipe.codegen.diagnostics import Span
from kpipe.codegen.ops.contract import Contract, Kind
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.plan.bind import bind_operands, operand_dtype
from kpipe.codegen.plan.dataflow import check_dataflow
from kpipe.codegen.plan.flags import Seat, active, derive_flags
from kpipe.codegen.plan.join_repairs import repair_late_joins
from kpipe.codegen.plan.limits import check_limits, head_rows
from kpipe.codegen.plan.model import Binding, Fork, Item, Join, Launch, Pdl, StepPlan
from kpipe.codegen.plan.modes import Mode, Word, ancestors
from kpipe.codegen.plan.pdl import Candidate, strongest
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.resolve import Resolved
from kpipe.codegen.plan.tables import Cell
from kpipe.codegen.plan.tactics import tactic_at
from kpipe.codegen.plan.value_types import check_types
from kpipe.codegen.spec.document import Scalar
from kpipe.codegen.spec.document import Sequence as SequenceNode

_BINDING = ("KP103", "KP202")  # a wrong binding would show again as a wrong type


def plan_step(
    resolved: Resolved, arch: str, q: int, rows: int, mode: Mode, cell: Cell, report: Report
) -> StepPlan:
    """The launches of a mode at these rows; what is wrong with them goes to the report."""
    words, names, chosen = _expand(resolved, arch, q, rows, mode)
    seats, spans, heads, fits = [], [], 0, True
    for word, op, ahead in zip(words, names, ancestors(words), strict=True):
        contract = resolved.contracts.get(op)
        if contract is None or word.verb != "launch":
            continue
        stage = resolved.spec.stages[resolved.slots[word.name].stage]
        path = ("stages", resolved.slots[word.name].stage)
        place = _place(resolved, word, op, arch, q, rows)
        if not check_limits(
            contract, resolved.spec, resolved.dims, arch, (q,), rows, place, report
        ):
            fits = False
            continue
        targets = bind_operands(contract, op, stage, path, resolved.memory, place, report)
        options = _options_at(resolved, contract, word.name, arch, q, rows)
        seats.append(Seat(contract, targets, options, ahead, word.name))
        spans.append(word.span)
        heads = max(
            heads,
            head_rows(contract, resolved.dims, resolved.context_parallel, place, report),
        )
    if not fits:  # ops of the other parallelism: what they exchange would be missing everywhere
        return StepPlan(rows, q, arch, mode.name, asked_mode(cell), (), (), 0)
    seats = _renumber(words, seats)
    flags = derive_flags(seats, resolved.context_parallel)
    columns = {c: b.name for b in resolved.buffers for c, _, _ in b.columns}
    launch_words = [w for w in words if w.verb == "launch"]
    labels = [seat.contract.name for seat in seats]
    where = f"mode `{mode.name}`"
    check_dataflow(resolved.spec, labels, seats, flags, spans, columns, where, report)
    repair_late_joins(mode, report)
    if not any(finding.code in _BINDING for finding in report.found):
        check_types(resolved.spec, labels, seats, flags, spans, columns, where, report)
    _check_conditional(resolved, seats, flags, spans, report)
    if report.found:  # a broken mode has no launches worth planning
        return StepPlan(rows, q, arch, mode.name, asked_mode(cell), (), (), 0)
    pdls = _pdls(resolved, launch_words, seats, flags)
    bases = {seat.contract.lse_base for seat in seats if seat.contract.lse_base}
    launches = tuple(
        _launch(resolved, index, word, seat, flags[index], pdls[index], (arch, q, rows), bases)
        for index, (word, seat) in enumerate(zip(launch_words, seats, strict=True))
    )
    items = _items(words, launches)
    return StepPlan(rows, q, arch, mode.name, asked_mode(cell), items, chosen, heads)


def _place(resolved: Resolved, word: Word, op: str, arch: str, q: int, rows: int) -> Span:
    """Where an op was chosen: in the table of its slot, or in the mode itself."""
    table = resolved.slots[word.name].table
    cell = table.at(arch, q, rows) if table else None
    if cell is None:
        return word.span
    items = cell.value.items if isinstance(cell.value, SequenceNode) else (cell.value,)
    return next((i.span for i in items if getattr(i, "raw", "") == op), cell.value.span)


def choices(resolved: Resolved, arch: str, q: int, rows: int, mode: Mode) -> tuple[object, ...]:
    """What the tables say for a mode at these rows; equal choices give equal plans."""
    found: list[object] = []
    for word in mode.ops:
        slot = resolved.slots[word]
        for table in (slot.table, *slot.options.values(), *slot.tactics.values()):
            cell = table.at(arch, q, rows) if table else None
            found.append(id(cell.value) if cell else None)
        for op in slot.choices:
            found.append(CONTRACTS[op].tactic(rows, resolved.dims) if op in CONTRACTS else None)
    return tuple(found)


def asked_mode(cell: Cell) -> str:
    """The name of the mode in a cell of the table."""
    return cell.value.raw if isinstance(cell.value, Scalar) else ""


def _expand(
    resolved: Resolved, arch: str, q: int, rows: int, mode: Mode
) -> tuple[tuple[Word, ...], tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Words with every slot replaced by its ops; the op of each word; the choices made."""
    words: list[Word] = []
    names: list[str] = []
    chosen: list[tuple[str, str]] = []
    for word in mode.words:
        ops = resolved.slots[word.name].ops_at(arch, q, rows) if word.verb == "launch" else ("",)
        if word.verb == "launch" and resolved.slots[word.name].table is not None:
            chosen.append((word.name, "+".join(ops)))
        for op in ops:
            words.append(word)
            names.append(op)
    return tuple(words), tuple(names), tuple(chosen)


def _renumber(words: tuple[Word, ...], seats: list[Seat]) -> list[Seat]:
    """Positions among all words become positions among launches."""
    numbers = {}
    for position, word in enumerate(words):
        if word.verb == "launch":
            numbers[position] = len(numbers)
    return [replace(s, ahead=frozenset(numbers[p] for p in s.ahead)) for s in seats]


def _options_at(
    resolved: Resolved, contract: Contract, word: str, arch: str, q: int, rows: int
) -> dict[str, str]:
    options = {}
    for option in contract.options:
        table = resolved.slots[word].options.get(option.name)
        cell = table.at(arch, q, rows) if table else None
        value = cell.value.raw if cell and isinstance(cell.value, Scalar) else option.choices[0]
        options[option.name] = value
    return options


def _check_conditional(
    resolved: Resolved,
    seats: list[Seat],
    flags: tuple[dict[str, bool], ...],
    spans: list[Span],
    report: Report,
) -> None:
    """Operands that exist under a flag need their buffer only where the flag is set."""
    declared = {*resolved.memory.buffers, *resolved.memory.mailboxes}
    for seat, flag, span in zip(seats, flags, spans, strict=True):
        for operand in seat.contract.operands:
            if operand.kind is not Kind.BUFFER or not operand.when or not active(operand, flag):
                continue
            target = seat.targets[operand.name]
            if target not in declared:
                report.error(
                    "KP103",
                    f"`{seat.contract.name}` needs a buffer `{target}` "
                    f"({', '.join(operand.shape)}, {operand_dtype(operand, resolved.memory)}), "
                    "which nothing declares",
                    span,
                    help="declare it under `buffers` or `mailboxes`",
                    once=True,
                )


def _pdls(
    resolved: Resolved,
    words: list[Word],
    seats: list[Seat],
    flags: tuple[dict[str, bool], ...],
) -> list[Pdl]:
    spin_overlap = resolved.spec.environment.spin_overlap == "allow"
    found = []
    for word, seat, flag in zip(words, seats, flags, strict=True):
        stage = resolved.spec.stages[resolved.slots[word.name].stage]
        candidate = Candidate(seat.contract, flag, stage.pdl.get(seat.contract.name, ""))
        found.append(strongest(candidate, spin_overlap=spin_overlap))
    return found


def _launch(
    resolved: Resolved,
    index: int,
    word: Word,
    seat: Seat,
    flags: Mapping[str, bool],
    pdl: Pdl,
    at: tuple[str, int, int],
    lse_bases: set[str],
) -> Launch:
    contract = seat.contract
    slot = resolved.slots[word.name]
    bindings = tuple(
        Binding(
            o.name, seat.targets[o.name], o.kind, o.access, contract.phase(o), bool(o.when), o.path
        )
        for o in contract.operands
        if active(o, flags)
    )
    tag = word.name.partition("@")[2]
    # Whoever merges must know the base that the core of this plan writes.
    merges = "lse_base" in contract.constants and not contract.lse_base
    arguments = tuple(("lse_base", base) for base in sorted(lse_bases) if merges and base != "2")
    return Launch(
        index,
        contract.name,
        f"{contract.name}_{tag}" if tag else contract.name,
        word.name,
        slot.stage,
        word.stream,
        contract,
        bindings,
        tuple(sorted(flags.items())),
        tuple(sorted(seat.options.items())),
        arguments,
        tactic_at(slot, contract, resolved.dims, *at),
        pdl,
        word.span,
    )


def _items(words: tuple[Word, ...], launches: tuple[Launch, ...]) -> tuple[Item, ...]:
    items: list[Item] = []
    remaining = iter(launches)
    for word in words:
        if word.verb == "fork":
            items.append(Fork(word.name, word.stream, word.span))
        elif word.verb == "join":
            items.append(Join(word.name, word.stream, word.span))
        else:
            items.append(next(remaining))
    return tuple(items)
