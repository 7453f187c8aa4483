"""The planner: specification to plan, for every (arch, q, rows)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kpipe.codegen.diagnostics import Span, SpecError
from kpipe.codegen.ops.contract import Contract, Kind
from kpipe.codegen.plan.bind import bind_operands, collect_tensors
from kpipe.codegen.plan.dataflow import check_dataflow
from kpipe.codegen.plan.flags import Seat, active, derive_flags
from kpipe.codegen.plan.limits import check_limits, head_rows
from kpipe.codegen.plan.methods import name_methods
from kpipe.codegen.plan.model import (
    Binding,
    Fork,
    Item,
    Join,
    Launch,
    Pdl,
    PipelinePlan,
    UnprovedPlan,
)
from kpipe.codegen.plan.modes import Mode, Word, ancestors
from kpipe.codegen.plan.pdl import Neighbour, derive_pdl
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.resolve import Resolved
from kpipe.codegen.plan.tables import Cell, Table, read_table
from kpipe.codegen.spec.document import Mapping as MappingNode
from kpipe.codegen.spec.document import Scalar, find


def build_plan(resolved: Resolved, report: Report) -> PipelinePlan:
    """The plan of a resolved spec.  Raises SpecError with every error found."""
    table = _mode_table(resolved, report)
    report.stop_on_errors()
    plans: list[UnprovedPlan] = []
    fallbacks: dict[tuple[str, str, str], None] = {}
    for arch in resolved.targets:
        for q, counts in resolved.rows.items():
            for rows in counts:
                cell = table.at(arch, q, rows)
                mode = _legal_mode(resolved, cell, fallbacks, report) if cell else None
                if mode is not None and cell is not None:
                    plan = _plan_step(resolved, arch, q, rows, mode, cell, report)
                    plans.append(plan)
    _check_used(resolved, plans, report)
    report.stop_on_errors()
    return _assemble(resolved, tuple(plans), tuple(fallbacks), report)


def _mode_table(resolved: Resolved, report: Report) -> Table:
    overlap = resolved.spec.overlap
    key = "table"
    if not resolved.spec.features.fused_indexer and overlap.table_unfused is not None:
        key = "table_unfused"
    node = find(resolved.source.root, ("overlap", key))
    assert node is not None  # the model requires the table
    table = read_table(node, f"overlap.{key}", resolved.targets, resolved.rows, report)
    for cell in table.values():
        name = cell.value.raw if isinstance(cell.value, Scalar) else ""
        if name not in resolved.modes:
            report.unknown("mode", name, cell.value.span, resolved.modes)
    for mode, replacement in overlap.fallback.items():
        for word, is_key in ((mode, True), (replacement, False)):
            if word not in resolved.modes:
                span = report.source.span("overlap", "fallback", mode, key=is_key)
                report.unknown("mode", word, span, resolved.modes)
    return table


def _legal_mode(
    resolved: Resolved, cell: Cell, fallbacks: dict[tuple[str, str, str], None], report: Report
) -> Mode | None:
    """The mode of a cell, or what replaces it where it is not legal here."""
    name = cell.value.raw if isinstance(cell.value, Scalar) else ""
    tried: list[str] = []
    while True:
        reason = _illegal(resolved, name, report)
        if not reason:
            return resolved.modes[name]
        tried.append(name)
        replacement = resolved.spec.overlap.fallback.get(name)
        if replacement is None or replacement in tried:
            report.error(
                "KP104",
                f"mode `{name}` is not legal here: {reason}",
                cell.value.span,
                help=f"choose another mode, or say what replaces it: `fallback: {{{name}: ...}}`",
            )
            return None
        fallbacks[(name, replacement, reason)] = None
        name = replacement


def _illegal(resolved: Resolved, name: str, report: Report) -> str:
    node = find(resolved.source.root, ("overlap", "modes", name, "requires"))
    if node is None:
        return ""
    if not isinstance(node, MappingNode):
        report.error("KP101", f"mode `{name}`: `requires` takes a mapping", node.span)
        return ""
    facts = {
        "dcp": resolved.context_parallel,
        "fused_indexer": resolved.spec.features.fused_indexer,
    }
    for entry in node.entries:
        wanted = entry.value.value if isinstance(entry.value, Scalar) else None
        if entry.key not in facts:
            report.unknown("requirement", entry.key, entry.key_span, facts)
        elif not isinstance(wanted, bool):
            report.error("KP101", f"`requires.{entry.key}` is true or false", entry.value.span)
        elif facts[entry.key] != wanted:
            return f"it {'needs' if wanted else 'excludes'} {entry.key}"
    return ""


def _plan_step(
    resolved: Resolved, arch: str, q: int, rows: int, mode: Mode, cell: Cell, report: Report
) -> UnprovedPlan:
    words, names, chosen = _expand(resolved, arch, q, rows, mode)
    seats, spans, heads = [], [], 0
    for word, op, ahead in zip(words, names, ancestors(words), strict=True):
        contract = resolved.contracts.get(op)
        if contract is None or word.verb != "launch":
            continue
        stage = resolved.spec.stages[resolved.slots[word.name].stage]
        path = ("stages", resolved.slots[word.name].stage)
        targets = bind_operands(contract, op, stage, path, resolved.memory, word.span, report)
        options = _options_at(resolved, contract, word.name, arch, q, rows)
        seats.append(Seat(contract, targets, options, ahead))
        spans.append(word.span)
        check_limits(
            contract, resolved.spec, resolved.dims, arch, (q,), rows, word.span, report
        )
        heads = max(
            heads,
            head_rows(contract, resolved.dims, resolved.context_parallel, word.span, report),
        )
    seats = _renumber(words, seats)
    flags = derive_flags(seats, resolved.context_parallel)
    columns = {c: b.name for b in resolved.buffers for c, _, _ in b.columns}
    launch_words = [w for w in words if w.verb == "launch"]
    labels = [seat.contract.name for seat in seats]
    where = f"mode `{mode.name}`"
    check_dataflow(resolved.spec, labels, seats, flags, spans, columns, where, report)
    _check_conditional(resolved, seats, flags, spans, report)
    if report.found:  # a broken mode has no launches worth planning
        return UnprovedPlan(rows, q, arch, mode.name, _asked(cell), (), (), 0)
    pdls = _pdls(resolved, launch_words, seats, flags)
    bases = {seat.contract.lse_base for seat in seats if seat.contract.lse_base}
    launches = tuple(
        _launch(resolved, index, word, seat, flags[index], pdls[index], (arch, q, rows), bases)
        for index, (word, seat) in enumerate(zip(launch_words, seats, strict=True))
    )
    items = _items(words, launches)
    return UnprovedPlan(rows, q, arch, mode.name, _asked(cell), items, chosen, heads)


def _asked(cell: Cell) -> str:
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
    return [
        Seat(s.contract, s.targets, s.options, frozenset(numbers[p] for p in s.ahead)) for s in seats
    ]


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
                    f"({', '.join(operand.shape)}, {operand.dtype}), which nothing declares",
                    span,
                    help="declare it under `buffers` or `mailboxes`",
                )


def _pdls(
    resolved: Resolved,
    words: list[Word],
    seats: list[Seat],
    flags: tuple[dict[str, bool], ...],
) -> list[Pdl]:
    environment = resolved.spec.environment
    neighbours = [
        Neighbour(
            seat.contract.name,
            seat.contract,
            flags[i],
            resolved.spec.stages[resolved.slots[words[i].name].stage].pdl.get(seat.contract.name, ""),
        )
        for i, seat in enumerate(seats)
    ]
    pdls = []
    for i, word in enumerate(words):
        same = [j for j, other in enumerate(words) if other.stream == word.stream]
        place = same.index(i)
        before = neighbours[same[place - 1]] if place else None
        behind = neighbours[same[place + 1]] if place + 1 < len(same) else None
        pdls.append(
            derive_pdl(
                neighbours[i],
                before,
                behind,
                heads_stream=before is None and word.stream != "main",
                between_layers=environment.between_layers,
                spin_overlap=environment.spin_overlap == "allow",
            )
        )
    return pdls


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
        Binding(o.name, seat.targets[o.name], o.kind, o.access, o.phase, bool(o.when))
        for o in contract.operands
        if active(o, flags)
    )
    tag = word.name.partition("@")[2]
    table = slot.tactics.get(contract.name)
    cell = table.at(*at) if table else None
    tactic = ()
    # Whoever merges must know the base that the core of this plan writes.
    merges = "lse_base" in contract.constants and not contract.lse_base
    arguments = tuple(("lse_base", base) for base in sorted(lse_bases) if merges and base != "2")
    if cell is not None and isinstance(cell.value, MappingNode):
        tactic = tuple((e.key, e.value.value) for e in cell.value.entries)  # type: ignore[union-attr]
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
        tactic,
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


def _check_used(resolved: Resolved, plans: list[UnprovedPlan], report: Report) -> None:
    """Declared memory that no op of any declared mode binds is a mistake."""
    bound: set[str] = set()
    for op, slot in _inventory(resolved).items():
        stage = resolved.spec.stages[slot]
        for operand in resolved.contracts[op].operands:
            bound.add(stage.bind.get(f"{op}.{operand.name}") or stage.bind.get(operand.name) or operand.name)
    columns = {c: b.name for b in resolved.buffers for c, _, _ in b.columns}
    bound |= {columns[name] for name in bound if name in columns}
    for section in ("buffers", "mailboxes", "caches"):
        for name in getattr(resolved.spec, section):
            if name not in bound:
                report.error(
                    "KP109",
                    f"no op reads or writes `{name}`",
                    report.source.span(section, name, key=True),
                    help="delete it, or bind an operand to it",
                )
    for stage_name, stage in resolved.spec.stages.items():
        ops = {op for op, owner in _inventory(resolved).items() if owner == stage_name}
        operands = {o.name for op in ops for o in resolved.contracts[op].operands}
        for key in stage.bind:
            op, _, operand = key.rpartition(".")
            known = {o.name for o in resolved.contracts[op].operands} if op in ops else operands
            if (op and op not in ops) or operand not in known:
                span = report.source.span("stages", stage_name, "with", key, key=True)
                report.unknown(f"operand of stage `{stage_name}`:", key, span, sorted(operands))
        for op in stage.pdl:
            if op not in ops:
                span = report.source.span("stages", stage_name, "pdl", op, key=True)
                report.unknown(f"op of stage `{stage_name}`:", op, span, sorted(ops))


def _inventory(resolved: Resolved) -> dict[str, str]:
    """Every op that any declared mode may launch -> its stage, whatever the table selects."""
    found: dict[str, str] = {}
    for mode in resolved.modes.values():
        for word in mode.ops:
            slot = resolved.slots.get(word)
            for op in slot.choices if slot else ():
                if op in resolved.contracts:
                    found.setdefault(op, slot.stage)
    return dict(sorted(found.items()))


def _assemble(
    resolved: Resolved,
    plans: tuple[UnprovedPlan, ...],
    fallbacks: tuple[tuple[str, str, str], ...],
    report: Report,
) -> PipelinePlan:
    spec, dims = resolved.spec, resolved.dims
    ops = tuple(resolved.contracts[name] for name in _inventory(resolved))
    parallel = resolved.context_parallel
    softmax_dim = dims_value(str(resolved.geometry.scalars.softmax_dim), dims)
    scalars = resolved.geometry.scalars
    return PipelinePlan(
        name=spec.name,
        doc=spec.doc,
        path=resolved.source.path,
        geometry=spec.geometry,
        dims=MappingProxyType(dict(dims)),
        scalars=MappingProxyType(
            {
                "rms_eps": scalars.rms_eps,
                "index_eps": scalars.index_eps,
                "softmax_scale": softmax_dim**-0.5 * scalars.softmax_mscale**2,
            }
        ),
        numerics=MappingProxyType(
            {
                **{f"round_{k}": v for k, v in spec.numerics.round.model_dump().items()},
                "sigmoid": spec.numerics.sigmoid,
                "index_quant": spec.numerics.index_quant,
            }
        ),
        parallel=MappingProxyType(spec.parallel.model_dump()),
        targets=resolved.targets,
        rows=tuple(resolved.rows.items()),
        buffers=resolved.buffers,
        mailboxes=resolved.mailboxes,
        caches=resolved.caches,
        weights=collect_tensors(ops, Kind.WEIGHT, resolved.memory, parallel, report),
        step=collect_tensors(ops, Kind.STEP, resolved.memory, parallel, report),
        ops=ops,
        stages=MappingProxyType(_inventory(resolved)),
        plans=plans,
        methods=name_methods(plans),
        modes=tuple(resolved.modes),
        fallbacks=fallbacks,
        environment=MappingProxyType(spec.environment.model_dump()),
        streams=_streams(resolved, plans),
    )


def dims_value(text: str, dims: Mapping[str, int]) -> int:
    """A shape expression over plain dimensions."""
    from kpipe.codegen.spec.expressions import evaluate, parse

    return evaluate(parse(text), dims)


def _streams(resolved: Resolved, plans: tuple[UnprovedPlan, ...]) -> tuple[tuple[str, int], ...]:
    names = dict.fromkeys(s for plan in plans for s in plan.streams if s != "main")
    declared = resolved.spec.streams
    return tuple((name, declared[name].priority if name in declared else 0) for name in names)


def refuse_unbuilt(resolved: Resolved) -> None:
    """Words of the language that the generator does not emit yet; raises SpecError."""
    report = Report(resolved.source)
    spec = resolved.spec
    if spec.draft:
        names = ", ".join(f"`{name}`" for name in spec.draft.missing)
        report.error(
            "KP130",
            f"`{spec.name}` is a draft: {names} have no contract yet",
            report.source.span("draft"),
            help="it can be checked, not generated",
        )
    for section in ("step", "external", "prefetch"):
        if getattr(spec, section):
            report.error(
                "KP130",
                f"`{section}` is part of the language, but kpipe does not generate it yet",
                report.source.span(section, key=True),
                help="mark the spec as a draft to have it checked",
            )
    if report.found:
        raise SpecError(tuple(report.found))
