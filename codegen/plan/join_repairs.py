"""Repairs of modes: where a join that is missing, or that stands too late, belongs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kpipe.codegen.diagnostics import Diagnostic, Edit
from kpipe.codegen.edits import append_item, insert_item, remove_item
from kpipe.codegen.ops.contract import Contract, Derive, Kind, Operand
from kpipe.codegen.plan.model import MAIN
from kpipe.codegen.plan.modes import Mode, Word
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.stages import Slot
from kpipe.codegen.spec.models import Pipeline


def repair_missing_joins(
    spec: Pipeline,
    modes: Mapping[str, Mode],
    slots: Mapping[str, Slot],
    contracts: Mapping[str, Contract],
    report: Report,
) -> None:
    """Give each KP306 of the report its repair.

    The join goes in front of the first op, on a stream that reaches main, that reads what the
    stream writes; where none does, to the end of main.  What an op on those streams has written
    by then is not counted as the stream's: ops write it only where nobody else does.
    """
    forks = {
        word.span: (mode, word)
        for mode in modes.values()
        for word in mode.words
        if word.verb == "fork"
    }
    touched = _Touched(spec, slots, contracts)
    for index, finding in enumerate(report.found):
        if finding.code == "KP306" and finding.span in forks:
            mode, fork = forks[finding.span]
            if any(edit.text == fork.name for other in report.found for edit in other.fix):
                continue  # the join is there, misspelt: correcting it is the repair
            fix = _missing_join(mode, fork, touched, report)
            report.found[index] = replace(finding, fix=fix)


def repair_late_joins(mode: Mode, report: Report) -> None:
    """Give a KP201 its repair where the writer's stream is joined behind the reader: the join
    moves in front of the reader."""
    for index, finding in enumerate(report.found):
        if finding.code == "KP201" and not finding.fix:
            report.found[index] = replace(finding, fix=_moved_join(mode, finding, report))


class _Touched:
    """Buffers and caches that a word may write, or that it must read.

    An op that reads an operand only where somebody has written it ahead does without it.
    """

    def __init__(
        self, spec: Pipeline, slots: Mapping[str, Slot], contracts: Mapping[str, Contract]
    ) -> None:
        self.spec, self.slots, self.contracts = spec, slots, contracts

    def of(self, word: Word, *, write: bool) -> set[str]:
        slot = self.slots.get(word.name) if word.verb == "launch" else None
        if slot is None or slot.section != "stages":
            return set()
        renamed = self.spec.stages[slot.stage].bind
        return {
            renamed.get(f"{op}.{operand.name}") or renamed.get(operand.name) or operand.name
            for op in slot.choices
            if op in self.contracts
            for operand in self.contracts[op].operands
            if operand.kind in (Kind.BUFFER, Kind.CACHE)
            and (operand.access.writes if write else _must_read(self.contracts[op], operand))
        }


def _must_read(contract: Contract, operand: Operand) -> bool:
    optional = {flag.name for flag in contract.flags if flag.derive is Derive.IS_WRITTEN}
    return operand.access.reads and operand.when not in optional


def _missing_join(mode: Mode, fork: Word, touched: _Touched, report: Report) -> tuple[Edit, ...]:
    words, texts = mode.words, report.source.texts
    joins = {(word.stream, word.name) for word in words if word.verb == "join"}
    reached = {MAIN}
    while more := {name for stream, name in joins if stream in reached} - reached:
        reached |= more
    written: set[str] = set()
    for word in words:
        if word.stream == fork.name:
            written |= touched.of(word, write=True)
    join = f"join {fork.name}"
    for word in words[: words.index(fork)]:
        written -= touched.of(word, write=True)
    for word in words[words.index(fork) :]:
        if word.stream not in reached:
            continue
        if written & touched.of(word, write=False):
            return insert_item(texts, word.span, join)
        written -= touched.of(word, write=True)
    last = [word for word in words if word.stream == MAIN][-1]
    return append_item(texts, last.span, join)


def _moved_join(mode: Mode, finding: Diagnostic, report: Report) -> tuple[Edit, ...]:
    places = {word.span: position for position, word in enumerate(mode.words)}
    writers = [places.get(span) for role, span in finding.related if role == "writer"]
    reader = places.get(finding.span) if finding.span else None
    if reader is None or not writers or writers[0] is None:
        return ()
    stream = mode.words[writers[0]].stream
    if not any(w.verb == "fork" and w.name == stream for w in mode.words[:reader]):
        return ()  # not even started where its result is read
    target = mode.words[reader]
    late = [
        word
        for word in mode.words[reader:]
        if word.verb == "join" and word.name == stream and word.stream == target.stream
    ]
    if not late:
        return ()
    texts = report.source.texts
    removed = remove_item(texts, late[0].span)
    return (*insert_item(texts, target.span, f"join {stream}"), *removed) if removed else ()
