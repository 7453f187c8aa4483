"""The places of a stage in a mode, each planned and proved in memory, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError
from kpipe.codegen.places.layout import Layout, Place, groups, places
from kpipe.codegen.plan.build import mode_table, plan_mode
from kpipe.codegen.plan.cost import layer_time
from kpipe.codegen.plan.model import MAIN, Fork, Item, Join, Launch, PipelinePlan, StepPlan
from kpipe.codegen.plan.modes import Mode, Word, ancestors, mode_of
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.resolve import Resolved
from kpipe.codegen.plan.tables import Table
from kpipe.codegen.proof.mailboxes import mailbox_findings
from kpipe.codegen.repair.moves import Words
from kpipe.codegen.repair.trial import proved_outcome

Tick = Callable[[int, int], None]  # places tried, of how many
_NAME = re.compile(r"`\w+`")


@dataclass(frozen=True)
class Legal:
    """One schedule that is proved: its place, and how many places came to the same.

    `time` is the predicted time of a layer in us, the mean over the steps; `flags` are those of
    kernels that differ from the mode as it is.
    """

    place: Place
    time: float
    flags: tuple[str, ...] = ()
    alike: int = 1
    current: bool = False
    step: StepPlan | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Blocked:
    """What forbids places: two accesses of two ops under one rule, over one or more buffers.

    Nothing else forbids the places in `alone`; `help` is what would unblock them.
    """

    code: str
    sentences: tuple[str, ...]
    help: str
    places: tuple[Place, ...]
    alone: tuple[Place, ...]


@dataclass(frozen=True)
class Survey:
    """The places of some ops in one mode, for the steps that the table gives to it."""

    mode: str
    asked: tuple[str, ...]  # what the table says for these steps, before a fallback
    steps: tuple[StepPlan, ...]
    ops: tuple[str, ...]
    layout: Layout
    time: float
    legal: tuple[Legal, ...]  # by predicted time
    blocked: tuple[Blocked, ...]  # what blocks most places first
    added: bool = False  # the mode does not launch the op as it is

    @property
    def illegal(self) -> int:
        """Places at which something is wrong."""
        return len({id(place) for block in self.blocked for place in block.places})


@dataclass(frozen=True)
class _Tried:
    place: Place
    found: tuple[Diagnostic, ...]
    pipeline: PipelinePlan | None = None
    steps: tuple[StepPlan, ...] = ()


def survey(resolved: Resolved, steps: Sequence[StepPlan], ops: Sequence[str], tick: Tick) -> Survey:
    """Try every place of the ops, words of modes, in the mode that all `steps` take.

    The order of ops inside what moves, and everything else in the mode, stay.  An op that the mode
    does not launch is put in.  `tick` hears of progress.  Raises SpecError where the mode is
    refused as it is.
    """
    mode = resolved.modes[steps[0].mode]
    layout = layout_of(resolved, mode.name)
    present = tuple(word for word in mode.ops if word in ops)
    added = not present
    wanted = list(_wanted(layout, present or tuple(ops)))
    table = mode_table(resolved, Report(resolved.source))  # read once, not for every place
    base = _tried(resolved, table, mode, Place(layout, present, "as it is"), steps)
    if base.found:
        raise SpecError(base.found)
    found = []
    for number, place in enumerate(wanted, 1):
        found.append(_tried(resolved, table, mode, place, steps))
        tick(number, len(wanted))
    return Survey(
        mode.name,
        tuple(dict.fromkeys(step.asked_mode for step in steps)),
        tuple(steps),
        present or tuple(ops),
        layout,
        _time(base),
        _legal(base, found),
        _blocked(mode.name, found),
        added,
    )


def layout_of(resolved: Resolved, mode: str) -> Layout:
    """The lists of a mode as the spec writes them, `main` first."""
    lists = {
        stream: tuple(" ".join(word.text.split()) for word in words)
        for (name, stream), words in Words(resolved.source.root).lists.items()
        if name == mode
    }
    return Layout(tuple(sorted(lists.items(), key=lambda item: item[0] != MAIN)))


def laid_out(resolved: Resolved, mode: Mode, layout: Layout, report: Report) -> Mode:
    """The mode with other lists; words stand where they did in the text, new ones at its name."""
    spans = {_text(word): word.span for word in mode.words}
    lists = {
        stream: tuple(_word(text, stream, spans.get(text, mode.span)) for text in words)
        for stream, words in layout.streams
    }
    return mode_of(mode.name, lists, mode.span, mode.requires, report)


def _word(text: str, stream: str, span: Span) -> Word:
    verb, _, name = text.rpartition(" ")
    return Word(verb or "launch", name, stream, span)


def _text(word: Word) -> str:
    return word.name if word.verb == "launch" else f"{word.verb} {word.name}"


def _wanted(layout: Layout, ops: tuple[str, ...]) -> Iterator[Place]:
    """Each layout once: the whole stage first, then its parts."""
    seen: set[frozenset] = set()
    for moved in groups(ops):
        for place in places(layout, moved, regroup=moved == ops):
            key = frozenset(place.layout.streams)
            if key not in seen:
                seen.add(key)
                yield place


def _tried(
    resolved: Resolved, table: Table, mode: Mode, place: Place, steps: Sequence[StepPlan]
) -> _Tried:
    """Plan and prove the mode with this layout; nothing is written."""
    report = Report(resolved.source)
    try:
        moved = laid_out(resolved, mode, place.layout, report)
        report.stop_on_errors()
        at = [(step.arch, step.q, step.rows) for step in steps]
        pipeline = plan_mode(resolved, moved, at, report, table)
        outcome = proved_outcome(pipeline, pipeline.plans)
    except SpecError as error:
        return _Tried(place, error.diagnostics)
    found = outcome.found
    if any(finding.span is None for finding in found):  # a protocol, of which no more was asked
        found = tuple(mailbox_findings(pipeline))
    return _Tried(place, found, pipeline, outcome.steps)


def _time(tried: _Tried) -> float:
    assert tried.pipeline is not None  # the spec is proved as it is
    times = [layer_time(tried.pipeline, step) for step in tried.steps]
    return sum(times) / len(times)


def _legal(base: _Tried, found: Sequence[_Tried]) -> tuple[Legal, ...]:
    """Schedules that differ, the fastest first; the one that there is comes first of its time."""
    current = schedule_key(base.steps)
    merged: dict[tuple, Legal] = {}
    for tried in (base, *found):
        if tried.found or tried.pipeline is None or not tried.place.moved:
            continue
        key = schedule_key(tried.steps)
        if key in merged:
            merged[key] = replace(merged[key], alike=merged[key].alike + 1)
            continue
        merged[key] = Legal(
            tried.place,
            _time(tried),
            _changed_flags(base.steps[0], tried.steps[0]),
            current=key == current,
            step=tried.steps[0],
        )
    return tuple(sorted(merged.values(), key=lambda one: (round(one.time, 2), not one.current)))


def schedule_key(steps: Sequence[StepPlan]) -> tuple:
    """What makes two layouts the same schedule, whatever streams are called and whichever of two
    forks at one point stands first: launches, their predecessors, and what is over before each."""
    return tuple(_schedule_of(step.items) for step in steps)


def _schedule_of(items: Sequence[Item]) -> frozenset:
    words = tuple(_schedule_word(item) for item in items)
    last: dict[str, str] = {}
    found = set()
    for item, ahead in zip(items, ancestors(words), strict=True):
        if isinstance(item, Launch):
            over = frozenset(words[position].name for position in ahead)
            pdl = (item.pdl.attribute, item.pdl.release)
            found.add((item.name, item.flags, pdl, last.get(item.stream, ""), over))
            last[item.stream] = item.name
    return frozenset(found)


def _schedule_word(item: Item) -> Word:
    if isinstance(item, Fork):
        return Word("fork", item.stream, item.origin, item.span)
    if isinstance(item, Join):
        return Word("join", item.stream, item.target, item.span)
    return Word("launch", item.name, item.stream, item.span)


def _changed_flags(before: StepPlan, after: StepPlan) -> tuple[str, ...]:
    """Kernel flags that differ, as `op flag` and `op not flag`."""
    old = {launch.name: dict(launch.flags) for launch in before.launches}
    return tuple(
        f"{launch.name} {'' if value else 'not '}{flag}"
        for launch in after.launches
        for flag, value in launch.flags
        if launch.name in old and old[launch.name].get(flag) != value
    )


def _blocked(mode: str, found: Sequence[_Tried]) -> tuple[Blocked, ...]:
    """Places by what blocks them; a place stands under everything that does."""
    rules: dict[tuple[str, str, str], tuple[dict[str, None], list[Place], list[Place]]] = {}
    for tried in found:
        keys = set()
        for finding in tried.found:
            sentence = finding.message.removeprefix(f"mode `{mode}`: ")
            key = (finding.code, finding.help, "".join(_NAME.findall(sentence)[:1]))
            rules.setdefault(key, ({}, [], []))[0][sentence] = None
            keys.add(key)
        for key in keys:
            rules[key][1].append(tried.place)
            if len(keys) == 1:
                rules[key][2].append(tried.place)
    blocks = (
        Blocked(code, tuple(sentences), help, tuple(every), tuple(alone))
        for (code, help, _), (sentences, every, alone) in rules.items()
    )
    return tuple(sorted(blocks, key=lambda b: (-len(b.alone), -len(b.places), b.code, b.sentences)))
