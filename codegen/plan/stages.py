"""Stages: which op owns which name, and what a word of a mode may become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kpipe.codegen.diagnostics import Span, did_you_mean
from kpipe.codegen.ops.contract import Contract
from kpipe.codegen.plan.modes import Mode
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.tables import Table, read_table
from kpipe.codegen.spec.document import Mapping as MappingNode
from kpipe.codegen.spec.document import Node, Scalar, Sequence, find
from kpipe.codegen.spec.models import Pipeline, Stage


@dataclass(frozen=True)
class Slot:
    """A word that modes may use: an op, or a choice of ops by rows."""

    word: str
    stage: str
    section: str  # stages or step
    table: Table | None  # None: always the op of that name
    choices: tuple[str, ...]  # every op that it can become, in file order
    options: Mapping[str, Table]
    tactics: Mapping[str, Table]  # by op

    def ops_at(self, arch: str, q: int, rows: int) -> tuple[str, ...]:
        """The ops that stand here in a step; empty where the table was refused."""
        if self.table is None:
            return (self.word.partition("@")[0],)
        cell = self.table.at(arch, q, rows)
        return op_names(cell.value) if cell else ()


def op_names(node: Node) -> tuple[str, ...]:
    """`op` or `[op, op]` as a tuple of names."""
    if isinstance(node, Sequence):
        return tuple(item.raw for item in node.items if isinstance(item, Scalar))
    return (node.raw,) if isinstance(node, Scalar) else ()


def resolve_stages(
    spec: Pipeline,
    contracts: Mapping[str, Contract],
    missing: frozenset[str],
    targets: tuple[str, ...],
    rows: Mapping[int, tuple[int, ...]],
    report: Report,
) -> dict[str, Slot]:
    """Every word that a mode may use.  Unknown, double and useless entries are reported."""
    slots: dict[str, Slot] = {}
    owners: dict[str, Span] = {}
    known = frozenset(contracts) | missing
    for section, stages in (("stages", spec.stages), ("step", spec.step)):
        for stage_name, stage in stages.items():
            path = (section, stage_name)
            variants = _variants(stage, path, known, targets, rows, report)
            options = _options(stage, path, contracts, missing, variants, targets, rows, report)
            tactics = _tactics(stage, path, contracts, missing, variants, targets, rows, report)
            for position, word in enumerate(stage.ops):
                span = report.source.span(*path, "ops", position)
                if word in owners:
                    twice = word in stage.ops[:position]
                    report.error(
                        "KP103",
                        f"stage `{stage_name}` lists `{word}` twice"
                        if twice
                        else f"`{word}` belongs to two stages; each op is owned by one",
                        span,
                        help="delete one of the two, or give a second launch a tag: `op@tag`",
                        related=[("first" if twice else "other stage", owners[word])],
                    )
                    continue
                owners[word] = span
                base = word.partition("@")[0]
                if word not in variants and base not in known:
                    report.unknown("op", base, span, sorted(contracts))
                    continue
                table = variants.get(word)
                choices = _choices(table) if table else (base,)
                slots[word] = Slot(word, stage_name, section, table, choices, options, tactics)
            for word in variants:
                if word not in stage.ops:
                    report.error(
                        "KP109",
                        f"variant `{word}` is not among the ops of stage `{stage_name}`, so "
                        "nothing reads it",
                        report.source.span(*path, "variants", word, key=True),
                        allowed=stage.ops,
                    )
    return slots


def _choices(table: Table) -> tuple[str, ...]:
    return tuple(dict.fromkeys(op for cell in table.values() for op in op_names(cell.value)))


def _variants(
    stage: Stage,
    path: tuple[str, str],
    known: frozenset[str],
    targets: tuple[str, ...],
    rows: Mapping[int, tuple[int, ...]],
    report: Report,
) -> dict[str, Table]:
    tables = {}
    for word in stage.variants:
        node = find(report.source.root, (*path, "variants", word))
        where = ".".join((*path, "variants", word))
        tables[word] = read_table(node, where, targets, rows, report)
        for cell in tables[word].values():
            names = op_names(cell.value)
            if not names:
                message = f"`{where}` takes an op or a list of ops"
                report.error("KP101", message, cell.value.span)
            for name in names:
                if name not in known:
                    report.unknown("op", name, cell.value.span, sorted(known))
    return tables


def _stage_ops(stage: Stage, variants: Mapping[str, Table]) -> tuple[str, ...]:
    """Every op that this stage can launch."""
    ops: dict[str, None] = {}
    for word in stage.ops:
        names = _choices(variants[word]) if word in variants else (word.partition("@")[0],)
        ops.update(dict.fromkeys(names))
    return tuple(ops)


def _options(
    stage: Stage,
    path: tuple[str, str],
    contracts: Mapping[str, Contract],
    missing: frozenset[str],
    variants: Mapping[str, Table],
    targets: tuple[str, ...],
    rows: Mapping[int, tuple[int, ...]],
    report: Report,
) -> dict[str, Table]:
    tables = {}
    ops = _stage_ops(stage, variants)
    declared = {o.name: o for op in ops if op in contracts for o in contracts[op].options}
    for name in stage.options:
        span = report.source.span(*path, "options", name, key=True)
        option = declared.get(name)
        if option is None:
            if not missing & set(ops):
                _unknown_option(name, path[1], sorted(declared), contracts, span, report)
            continue
        node = find(report.source.root, (*path, "options", name))
        where = ".".join((*path, "options", name))
        table = read_table(node, where, targets, rows, report)
        tables[name] = table
        if isinstance(node, MappingNode) and not option.table:
            message = f"`{where}` is one value for all rows"
            hint = f"write `{name}: {option.choices[0]}`"
            report.error("KP101", message, node.span, allowed=option.choices, help=hint)
        for cell in table.values():
            given = cell.value.raw if isinstance(cell.value, Scalar) else "a list"
            if given not in option.choices:
                message = f"`{given}` is not a value of `{where}`"
                near = did_you_mean(given, option.choices)
                hint = f"did you mean `{near}`?" if near else ""
                report.error(
                    "KP102",
                    message,
                    cell.value.span,
                    allowed=option.choices,
                    help=hint,
                    fix=report.replacement(cell.value.span, given, near),
                )
    return tables


def _unknown_option(
    name: str,
    stage: str,
    declared: list[str],
    contracts: Mapping[str, Contract],
    span: Span,
    report: Report,
) -> None:
    """An option that no op of the stage takes; another op may."""
    takers = sorted(c.name for c in contracts.values() if any(o.name == name for o in c.options))
    if not takers:
        report.unknown(f"option of stage `{stage}`:", name, span, declared)
        return
    named = ", ".join(f"`{taker}`" for taker in takers)
    report.error(
        "KP103",
        f"option `{name}` belongs to {named}; stage `{stage}` launches nothing that takes it",
        span,
        allowed=declared,
        help=f"delete it, or launch {named} in this stage",
    )


def _tactics(
    stage: Stage,
    path: tuple[str, str],
    contracts: Mapping[str, Contract],
    missing: frozenset[str],
    variants: Mapping[str, Table],
    targets: tuple[str, ...],
    rows: Mapping[int, tuple[int, ...]],
    report: Report,
) -> dict[str, Table]:
    tables = {}
    ops = _stage_ops(stage, variants)
    for op in stage.tactics:
        span = report.source.span(*path, "tactics", op, key=True)
        if op not in ops:
            report.error(
                "KP109",
                f"stage `{path[1]}` has tactics for `{op}`, which it never launches",
                span,
                allowed=ops,
            )
            continue
        node = find(report.source.root, (*path, "tactics", op))
        where = ".".join((*path, "tactics", op))
        tables[op] = read_table(node, where, targets, rows, report)
        if op in missing:
            continue
        for cell in tables[op].values():
            _check_tactic(contracts[op], cell.value, where, report)
    return tables


def _check_tactic(contract: Contract, node: Node, where: str, report: Report) -> None:
    op, fields = contract.name, contract.tile
    switches = {name for name, values in contract.tile_values if 0 in values}
    if not isinstance(node, MappingNode):
        message = f"`{where}` takes named fields, for example {{{fields[0] if fields else 'x'}: 1}}"
        report.error("KP101", message, node.span, allowed=fields)
        return
    for entry in node.entries:
        if entry.key not in fields:
            report.unknown(f"tactic field of `{op}`:", entry.key, entry.key_span, fields)
        elif (
            not isinstance(entry.value, Scalar)
            or type(entry.value.value) is bool
            or not isinstance(entry.value.value, int)
            or entry.value.value < (entry.key not in switches)
        ):
            given = entry.value.raw if isinstance(entry.value, Scalar) else "a list"
            kind = "0 or a positive" if entry.key in switches else "a positive"
            message = f"`{where}.{entry.key}` is {kind} whole number, not `{given}`"
            report.error("KP101", message, entry.value.span)


def check_words(
    spec: Pipeline, modes: Mapping[str, Mode], slots: Mapping[str, Slot], report: Report
) -> None:
    """Every word of every mode belongs to a stage, and every op of a stage is used."""
    used: set[str] = set()
    refused = {word for stage in spec.stages.values() for word in stage.ops} - set(slots)
    for mode in modes.values():
        seen: dict[str, Span] = {}
        for word in mode.words:
            if word.verb != "launch":
                continue
            used.add(word.name)
            if word.name in refused:
                continue  # reported where the stage lists it, or in an earlier mode
            if word.name not in slots:
                owner = next((s for s in slots.values() if word.name in s.choices), None)
                if owner is None:
                    refused.add(word.name)
                    report.unknown(
                        f"op in mode `{mode.name}`:", word.name, word.span, sorted(slots)
                    )
                else:
                    report.error(
                        "KP103",
                        f"mode `{mode.name}`: stage `{owner.stage}` does not list `{word.name}` "
                        "among its ops",
                        word.span,
                        help=f"use `{owner.word}`, or add `{word.name}` to "
                        f"`stages.{owner.stage}.ops`",
                    )
            elif slots[word.name].section == "step":
                message = f"mode `{mode.name}`: `{word.name}` runs once per step, not in a layer"
                report.error("KP103", message, word.span)
            if word.name in seen:
                report.error(
                    "KP103",
                    f"mode `{mode.name}` launches `{word.name}` twice",
                    word.span,
                    help="give the second launch a tag: `op@tag`",
                    related=[("first", seen[word.name])],
                )
            seen[word.name] = word.span
    _check_used(spec, slots, used, report)


def _check_used(spec: Pipeline, slots: Mapping[str, Slot], used: set[str], report: Report) -> None:
    for slot in slots.values():
        if slot.section == "stages" and slot.word not in used:
            position = spec.stages[slot.stage].ops.index(slot.word)
            report.error(
                "KP109",
                f"no mode launches `{slot.word}` of stage `{slot.stage}`",
                report.source.span("stages", slot.stage, "ops", position),
                help="name it in a mode, or delete it",
            )
