"""The plan of one step: a mode with its slots filled, flags derived, launches bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kpipe.codegen.diagnostics import Span
from kpipe.codegen.ops.contract import Kind
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


# What stands in a mode, op by op -> its launches, kept where nothing is wrong with them.
Known = dict[tuple[object, ...], tuple[Launch, ...]]


def plan_step(
    resolved: Resolved,
    arch: str,
    q: int,
    rows: int,
    mode: Mode,
    cell: Cell,
    report: Report,
    known: Known | None = None,
) -> StepPlan:
    """The launches of a mode at these rows; what is wrong with them goes to the report.

    Steps that launch the same ops differ in their tiles alone: with `known` they are checked once.
    """
    at = (arch, q, rows)
    words, names, chosen = _expand(resolved, arch, q, rows, mode)
    options = [_options_at(resolved, w.name, op, at) for w, op in zip(words, names, strict=True)]
    key = (mode.name, names, tuple(tuple(given.items()) for given in options))
    like = known.get(key) if known and not report.found else None
    seats, spans, heads = _seat(resolved, words, names, options, at, like is None, report)
    nothing = StepPlan(rows, q, arch, mode.name, asked_mode(cell), (), (), 0)
    if seats is None:
        return nothing
    if like is None:
        like = _launches(resolved, mode, words, _renumber(words, seats), spans, at, report)
    if report.found:  # a broken mode has no launches worth planning
        return nothing
    if known is not None:
        known[key] = like
    launches = tuple(_tiled(resolved, launch, at) for launch in like)
    return StepPlan(
        rows, q, arch, mode.name, asked_mode(cell), _items(words, launches), chosen, heads
    )


def _seat(
    resolved: Resolved,
    words: tuple[Word, ...],
    names: tuple[str, ...],
    options: list[dict[str, str]],
    at: tuple[str, int, int],
    bind: bool,
    report: Report,
) -> tuple[list[Seat] | None, list[Span], int]:
    """Every op against its limits, and bound where that is asked for; head rows of a launch.

    No seats at all where ops are of the other parallelism: what they exchange would be missing
    everywhere.
    """
    arch, q, rows = at
    seats, spans, heads, fits = [], [], 0, True
    for word, op, given, ahead in zip(words, names, options, ancestors(words), strict=True):
        contract = resolved.contracts.get(op)
        if contract is None or word.verb != "launch":
            continue
        place = _place(resolved, word, op, arch, q, rows)
        if not check_limits(
            contract, resolved.spec, resolved.dims, arch, (q,), rows, place, report
        ):
            fits = False
            continue
        if bind:
            name = resolved.slots[word.name].stage
            stage, path = resolved.spec.stages[name], ("stages", name)
            targets = bind_operands(contract, op, stage, path, resolved.memory, place, report)
            seats.append(Seat(contract, targets, given, ahead, word.name))
            spans.append(word.span)
        heads = max(
            heads, head_rows(contract, resolved.dims, resolved.context_parallel, place, report)
        )
    return seats if fits else None, spans, heads


def _launches(
    resolved: Resolved,
    mode: Mode,
    words: tuple[Word, ...],
    seats: list[Seat],
    spans: list[Span],
    at: tuple[str, int, int],
    report: Report,
) -> tuple[Launch, ...]:
    """The launches of a mode's ops; none where the report holds a finding."""
    flags = derive_flags(seats, resolved.context_parallel)
    columns = {c: b.name for b in resolved.buffers for c, _, _ in b.columns}
    labels = [seat.contract.name for seat in seats]
    where = f"mode `{mode.name}`"
    check_dataflow(resolved.spec, labels, seats, flags, spans, columns, where, report)
    repair_late_joins(mode, report)
    if not any(finding.code in _BINDING for finding in report.found):
        check_types(resolved.spec, labels, seats, flags, spans, columns, where, report)
    _check_conditional(resolved, seats, flags, spans, report)
    if report.found:
        return ()
    launched = [word for word in words if word.verb == "launch"]
    pdls = _pdls(resolved, launched, seats, flags)
    bases = {seat.contract.lse_base for seat in seats if seat.contract.lse_base}
    return tuple(
        _launch(resolved, index, word, seat, flags[index], pdls[index], at, bases)
        for index, (word, seat) in enumerate(zip(launched, seats, strict=True))
    )


def _tiled(resolved: Resolved, launch: Launch, at: tuple[str, int, int]) -> Launch:
    """The launch with the tiles of these rows."""
    tactic = tactic_at(resolved.slots[launch.word], launch.contract, resolved.dims, *at)
    return launch if tactic == launch.tactic else replace(launch, tactic=tactic)


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


def _options_at(resolved: Resolved, word: str, op: str, at: tuple[str, int, int]) -> dict[str, str]:
    """What the stage's tables say for the options of an op; empty for a fork or join."""
    contract = resolved.contracts.get(op)
    options = {}
    for option in contract.options if contract else ():
        table = resolved.slots[word].options.get(option.name)
        cell = table.at(*at) if table else None
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
