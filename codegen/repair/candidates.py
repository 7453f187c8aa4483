"""What might repair a finding: edits of modes, mailboxes, environment and table.

Nothing here is certain; `repair/trial.py` finds out.  Where the text does not look as expected an
edit is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kpipe.codegen.diagnostics import Diagnostic, Edit
from kpipe.codegen.edits import insert_item, remove_item, replace_word
from kpipe.codegen.plan.model import MAIN
from kpipe.codegen.plan.resolve import Resolved
from kpipe.codegen.repair.moves import (
    Candidate,
    Texts,
    Word,
    Words,
    moved_for_all,
    reordered,
)
from kpipe.codegen.spec.document import Mapping as MappingNode
from kpipe.codegen.spec.document import Node, Scalar, find
from kpipe.codegen.spec.load import Source

# Findings about the order of ops, about mailboxes, about ops that no mode launches; and about the
# meaning of values, where an op that converts can be put in.
REPAIRED = frozenset(
    (
        *("KP109", "KP201", "KP210", "KP211", "KP301", "KP302", "KP303", "KP306"),
        *("KP701", "KP702", "KP703", "KP704", "KP706"),
    )
)
# What another mode does not help against.
_IN_EVERY_MODE = frozenset(("KP306", "KP702", "KP703"))
_NAMES = re.compile(r"`(\w+)`")
_BEHIND = 3  # further parities that are tried


@dataclass(frozen=True)
class Context:
    """What candidates are made from; `resolved` is None where the spec does not get that far."""

    source: Source
    words: Words
    resolved: Resolved | None

    @property
    def texts(self) -> Texts:
        """The files as they were read."""
        return self.source.texts

    def scalar(self, *path: str) -> Scalar | None:
        """The leaf at a path."""
        node = find(self.source.root, path)
        return node if isinstance(node, Scalar) else None


def mode_of(finding: Diagnostic, words: Words) -> str:
    """The mode that a finding is about; empty where it is about none or about several."""
    for span in (finding.span, *(span for _, span in finding.related)):
        word = words.at(span)
        if word is not None:
            return word.mode
    return ""


def candidates(finding: Diagnostic, context: Context) -> list[Candidate]:
    """Edits that may repair the finding, the likeliest first, each once."""
    mode = mode_of(finding, context.words)
    found: list[Candidate] = []
    if finding.code == "KP306" and not finding.fix:
        return []  # a join that is there, misspelt
    if finding.fix:
        found.append(_known(finding, mode, context))
    if "between_layers" in finding.help:  # lost behind the engine: no order of ours helps
        return [*found, *_environment(context)]
    if finding.code == "KP109":
        return _unlaunched(finding, context)
    if mode:
        found += _moves(finding, mode, context)
        found += _additions(finding, mode, context)
    found += _mailboxes(finding, context)
    if mode and finding.code not in _IN_EVERY_MODE:
        found += _other_modes(mode, context)
    return first_of_each(found)


def for_all(group: Sequence[Diagnostic], context: Context) -> list[Candidate]:
    """Moves that serve several findings of one mode at once."""
    words = context.words
    pairs = []
    for finding in group:
        here = words.at(finding.span)
        others = (words.at(span) for _, span in finding.related)
        if here is not None and finding.code != "KP306":
            pairs += [(here, other) for other in others if other and other.mode == here.mode]
    return list(moved_for_all(context.texts, words, pairs))


def first_of_each(found: Iterable[Candidate]) -> list[Candidate]:
    """Each edit once, where it came first; none without edits."""
    unique: dict[tuple[Edit, ...], Candidate] = {}
    for candidate in found:
        if candidate.edits:
            unique.setdefault(candidate.edits, candidate)
    return list(unique.values())


def _known(finding: Diagnostic, mode: str, context: Context) -> Candidate:
    """The edit that the finding came with."""
    text = finding.help
    for edit in finding.fix:
        join = re.search(r"join \w+", edit.text)
        place = next((w for w in context.words.of(mode) if w.starts_at(edit.span)), None)
        if join:
            where = f"ahead of `{place.text}`" if place else "at the end"
            text = f"write `{join[0]}` {where}"
    return Candidate(text, finding.fix, (mode,) if mode else None)


def _unlaunched(finding: Diagnostic, context: Context) -> list[Candidate]:
    """An op that no mode launches taken out of its stage."""
    if finding.span is None or not finding.message.startswith("no mode launches"):
        return []
    op = _NAMES.findall(finding.message)[0]
    edits = remove_item(context.texts, finding.span)
    return [Candidate(f"take `{op}` out of its stage", edits, None)] if edits else []


def _moves(finding: Diagnostic, mode: str, context: Context) -> Iterator[Candidate]:
    """The two ops of the finding in another order, or on other streams."""
    words, texts = context.words, context.texts
    here = words.at(finding.span)
    if here is None:
        return
    others = [words.at(span) for _, span in finding.related]
    for box in _boxes(finding, context):
        if finding.code == "KP706" or "has not published" in finding.message:
            others += _touching(box, mode, context, "publishes")
        elif finding.code == "KP704":
            others += _touching(box, mode, context, "reads")
        elif finding.code == "KP701":
            others += _touching(box, mode, context, "polls")
    for other in others:
        if other is not None and other.mode == mode and other is not here:
            yield from reordered(texts, words, here, other)
    if finding.code == "KP306":
        yield from _joins(here, context)


def _joins(fork: Word, context: Context) -> Iterator[Candidate]:
    """A join of the forked stream ahead of each op of main behind the fork, the latest first."""
    join = f"join {fork.text.removeprefix('fork ')}"
    listed = context.words.lists.get((fork.mode, MAIN), ())
    for word in reversed(listed):
        if fork.stream != MAIN or word.index > fork.index:
            edits = insert_item(context.texts, word.span, join)
            yield Candidate(f"write `{join}` ahead of `{word.text}`", edits, (fork.mode,))


def _additions(finding: Diagnostic, mode: str, context: Context) -> Iterator[Candidate]:
    """An op of a stage that the mode lacks, ahead of the one that needs it."""
    here = context.words.at(finding.span)
    if context.resolved is None or here is None or finding.code == "KP306":
        return
    present = {word.text for word in context.words.of(mode)}
    named = set(_NAMES.findall(finding.message))
    for slot in context.resolved.slots.values():
        if slot.word in present or slot.section != "stages":
            continue
        touched = {
            context.resolved.spec.stages[slot.stage].bind.get(operand.name) or operand.name
            for op in slot.choices
            if op in context.resolved.contracts
            for operand in context.resolved.contracts[op].operands
            if operand.access.writes or operand.access.polls
        }
        if touched & named:
            edits = insert_item(context.texts, here.span, slot.word)
            yield Candidate(f"add `{slot.word}` ahead of `{here.text}`", edits, (mode,))


def _mailboxes(finding: Diagnostic, context: Context) -> Iterator[Candidate]:
    """More parities, another sentinel, another op that re-arms."""
    boxes = _boxes(finding, context)
    if finding.code == "KP702":
        for more in range(1, _BEHIND):
            for chosen in dict.fromkeys((boxes, tuple(_declared(context)))):
                yield _parities(chosen, more, context)
    for box in boxes:
        sentinel = context.scalar("mailboxes", box, "sentinel")
        if finding.code == "KP703" and sentinel is not None:
            for word in finding.allowed:
                edits = replace_word(context.texts, sentinel.span, sentinel.raw, word)
                yield Candidate(f"write `sentinel: {word}`", edits, None)
        rearmer = context.scalar("mailboxes", box, "rearmed_by")
        if finding.code == "KP704" and rearmer is not None and context.resolved is not None:
            for name, contract in context.resolved.contracts.items():
                able = any(o.access.rearms and o.name == box for o in contract.operands)
                if able and name != rearmer.raw:
                    edits = replace_word(context.texts, rearmer.span, rearmer.raw, name)
                    yield Candidate(f"write `rearmed_by: {name}` for `{box}`", edits, None)


def _parities(boxes: tuple[str, ...], more: int, context: Context) -> Candidate:
    edits: tuple[Edit, ...] = ()
    counts = []
    for box in boxes:
        count = context.scalar("mailboxes", box, "parities")
        if count is not None and isinstance(count.value, int):
            counts.append(count.value + more)
            edits += replace_word(context.texts, count.span, count.raw, str(count.value + more))
    every = "every mailbox" if len(boxes) > 1 else f"`{boxes[0]}`" if boxes else ""
    return Candidate(f"raise `parities` of {every} to {max(counts, default=0)}", edits, None)


def _environment(context: Context) -> Iterator[Candidate]:
    """Other declarations about what runs between two layers."""
    between = context.scalar("environment", "between_layers")
    truths = {"waits": "it waits for its predecessor", "full": "it is launched plain"}
    for word, truth in truths.items():
        if between is not None and between.raw != word:
            edits = replace_word(context.texts, between.span, between.raw, word)
            text = f"say `environment: {{between_layers: {word}}}`, if {truth}"
            yield Candidate(text, edits, None, rank=2)


def _other_modes(mode: str, context: Context) -> Iterator[Candidate]:
    """Another mode wherever the table selects this one."""
    cells = [cell for cell in _leaves(find(context.source.root, ("overlap", "table")))
             if cell.raw == mode]  # fmt: skip
    for other in context.words.modes:
        if other != mode and cells:
            edits = tuple(
                edit
                for cell in cells
                for edit in replace_word(context.texts, cell.span, mode, other)
            )
            text = f"select mode `{other}` where the table says `{mode}`"
            yield Candidate(text, edits, (other,), rank=1)


def _leaves(node: Node | None) -> Iterator[Scalar]:
    if isinstance(node, Scalar):
        yield node
    elif isinstance(node, MappingNode):
        for entry in node.entries:
            yield from _leaves(entry.value)


def _declared(context: Context) -> tuple[str, ...]:
    node = find(context.source.root, ("mailboxes",))
    return tuple(entry.key for entry in node.entries) if isinstance(node, MappingNode) else ()


def _boxes(finding: Diagnostic, context: Context) -> tuple[str, ...]:
    """Mailboxes that the finding names."""
    declared = _declared(context)
    return tuple(dict.fromkeys(n for n in _NAMES.findall(finding.message) if n in declared))


def _touching(box: str, mode: str, context: Context, act: str) -> list[Word | None]:
    """Words of a mode with an op that does this to the mailbox."""
    if context.resolved is None:
        return []
    slots, contracts = context.resolved.slots, context.resolved.contracts
    return [
        word
        for word in context.words.of(mode)
        if word.text in slots
        and any(
            getattr(operand.access, act) and operand.name == box
            for op in slots[word.text].choices
            if op in contracts
            for operand in contracts[op].operands
        )
    ]
