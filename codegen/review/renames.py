"""What was only renamed: matched by structure, so that it is not reported as gone and new.

Two things are one renamed thing where each is known to one side only, and they are alike in all
that the plan says of them but the name.  Where several are alike they are paired in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from kpipe.codegen.plan.model import (
    MAIN,
    Binding,
    Fork,
    Item,
    Join,
    Launch,
    PipelinePlan,
    StepPlan,
)
from kpipe.codegen.plan.modes import Mode, Word
from kpipe.codegen.review.model import Rename
from kpipe.codegen.review.side import Side

_NAME = re.compile(r"`([A-Za-z_@][\w@]*)`")


@dataclass(frozen=True)
class Names:
    """Old name -> new name, per kind of thing; what is not in a mapping keeps its name."""

    memory: Mapping[str, str] = field(default_factory=dict)
    streams: Mapping[str, str] = field(default_factory=dict)
    instances: Mapping[str, str] = field(default_factory=dict)  # names of launches
    words: Mapping[str, str] = field(default_factory=dict)  # as modes say them
    modes: Mapping[str, str] = field(default_factory=dict)
    stages: Mapping[str, str] = field(default_factory=dict)


def find_renames(old: Side, new: Side) -> tuple[Names, tuple[Rename, ...]]:
    """The new names of what the old side names otherwise; both sides have a plan."""
    before, after = old.pipeline, new.pipeline
    assert before is not None and after is not None
    found: list[Rename] = []

    def matched(kind: str, first: Mapping, second: Mapping) -> dict[str, str]:
        pairs = _matched(first, second)
        found.extend(Rename(kind, *pair) for pair in pairs.items())
        return pairs

    if before.name != after.name:
        found.append(Rename("pipeline", before.name, after.name))
    memory: dict[str, str] = {}
    for kind, declared in (
        ("buffer", _buffers),
        ("column", _columns),
        ("mailbox", _mailboxes),
        ("cache", _caches),
    ):
        memory |= matched(kind, declared(before), declared(after))
    stages = matched("stage", _stages(before), _stages(after))
    instances = matched("op instance", _instances(before, stages), _instances(after, {}))
    words = _word_names(before, after, instances)
    streams = matched("stream", _streams(old, words), _streams(new, {}))
    words_of = {name: _mode_words(mode, words, streams) for name, mode in old.modes.items()}
    modes = matched(
        "mode",
        {name: (listed, old.modes[name].requires) for name, listed in words_of.items()},
        {n: (_mode_words(mode, {}, {}), mode.requires) for n, mode in new.modes.items()},
    )
    return Names(memory, streams, instances, words, modes, stages), tuple(found)


def _matched(old: Mapping[str, Hashable], new: Mapping[str, Hashable]) -> dict[str, str]:
    """Names that only one side has, paired where what they stand for is equal."""
    free: dict[Hashable, list[str]] = {}
    for name, structure in new.items():
        if name not in old:
            free.setdefault(structure, []).append(name)
    pairs = {}
    for name, structure in old.items():
        if name not in new and free.get(structure):
            pairs[name] = free[structure].pop(0)
    return pairs


def _uses(plan: PipelinePlan) -> dict[str, frozenset[tuple[str, str]]]:
    """Memory -> who binds which operand to it, over all steps."""
    found: dict[str, set[tuple[str, str]]] = {}
    for step in plan.plans:
        for launch in step.launches:
            for binding in launch.bindings:
                found.setdefault(binding.target, set()).add((launch.op, binding.operand))
    return {name: frozenset(uses) for name, uses in found.items()}


def _buffers(plan: PipelinePlan) -> dict[str, Hashable]:
    uses = _uses(plan)
    return {
        b.name: (
            *(b.shape, b.dtype, b.scope, b.zeroed, uses.get(b.name)),
            *((offset, width) for _, offset, width in b.columns),
        )
        for b in plan.buffers
    }


def _columns(plan: PipelinePlan) -> dict[str, Hashable]:
    uses = _uses(plan)
    return {
        name: (offset, width, buffer.dtype, uses.get(name))
        for buffer in plan.buffers
        for name, offset, width in buffer.columns
    }


def _mailboxes(plan: PipelinePlan) -> dict[str, Hashable]:
    uses = _uses(plan)
    return {m.name: (replace(m, name=""), uses.get(m.name)) for m in plan.mailboxes}


def _caches(plan: PipelinePlan) -> dict[str, Hashable]:
    uses = _uses(plan)
    return {c.name: (replace(c, name=""), uses.get(c.name)) for c in plan.caches}


def _stages(plan: PipelinePlan) -> dict[str, Hashable]:
    ops: dict[str, list[str]] = {}
    for op, stage in plan.stages.items():
        ops.setdefault(stage, []).append(op)
    return {stage: tuple(sorted(listed)) for stage, listed in ops.items()}


def _launches(plan: PipelinePlan) -> Iterable[Launch]:
    return (launch for step in plan.plans for launch in step.launches)


def _instances(plan: PipelinePlan, stages: Mapping[str, str]) -> dict[str, Hashable]:
    found: dict[str, tuple[str, str]] = {}
    for launch in _launches(plan):
        found.setdefault(launch.name, (launch.op, stages.get(launch.stage, launch.stage)))
    return found  # type: ignore[return-value]


def _word_names(
    old: PipelinePlan, new: PipelinePlan, instances: Mapping[str, str]
) -> dict[str, str]:
    """Words of modes whose launches were renamed."""
    words = {launch.name: launch.word for launch in _launches(new)}
    return {
        launch.word: words[instances[launch.name]]
        for launch in _launches(old)
        if launch.name in instances
    }


def _streams(side: Side, words: Mapping[str, str]) -> dict[str, Hashable]:
    """Side stream -> what every mode runs on it."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for mode in side.modes.values():
        lists: dict[str, list[str]] = {}
        for word in mode.words:
            if word.stream != MAIN and word.verb == "launch":
                lists.setdefault(word.stream, []).append(words.get(word.name, word.name))
        for stream, listed in lists.items():
            found.setdefault(stream, set()).add(tuple(listed))
    return {stream: frozenset(listed) for stream, listed in found.items()}


def _mode_words(mode: Mode, words: Mapping[str, str], streams: Mapping[str, str]) -> Hashable:
    return tuple((w.verb, w.name, w.stream) for w in _renamed_words(mode.words, words, streams))


def _renamed_words(
    listed: Iterable[Word], words: Mapping[str, str], streams: Mapping[str, str]
) -> tuple[Word, ...]:
    return tuple(
        replace(
            word,
            name=(words if word.verb == "launch" else streams).get(word.name, word.name),
            stream=streams.get(word.stream, word.stream),
        )
        for word in listed
    )


def renamed(side: Side, names: Names) -> Side:
    """The old side under the new names, so that what is left differs in more than names."""
    plan = side.pipeline
    assert plan is not None
    modes = {
        names.modes.get(name, name): replace(
            mode,
            name=names.modes.get(name, name),
            words=_renamed_words(mode.words, names.words, names.streams),
        )
        for name, mode in side.modes.items()
    }
    step = _step_of(names)
    pipeline = replace(
        _renamed_memory(plan, names.memory),
        stages={op: names.stages.get(s, s) for op, s in plan.stages.items()},
        plans=tuple(map(step, plan.plans)),
        methods=tuple(replace(one, plan=step(one.plan)) for one in plan.methods),
        modes=tuple(modes),
        streams=tuple((names.streams.get(s, s), p) for s, p in plan.streams),
        fallbacks=tuple(
            (names.modes.get(m, m), names.modes.get(o, o), reason)
            for m, o, reason in plan.fallbacks
        ),
    )
    return replace(side, pipeline=pipeline, modes=modes)


def _renamed_memory(plan: PipelinePlan, memory: Mapping[str, str]) -> PipelinePlan:
    def own(entries: tuple) -> tuple:
        return tuple(replace(e, name=memory.get(e.name, e.name)) for e in entries)

    buffers = tuple(
        replace(buffer, columns=tuple((memory.get(c, c), o, w) for c, o, w in buffer.columns))
        for buffer in own(plan.buffers)
    )
    return replace(plan, buffers=buffers, mailboxes=own(plan.mailboxes), caches=own(plan.caches))


def _step_of(names: Names) -> Callable[[StepPlan], StepPlan]:
    """Renames a step, the reasons of its launches included."""
    known = {**names.memory, **names.instances}

    def said(text: str) -> str:
        text = _NAME.sub(lambda match: f"`{known.get(match[1], match[1])}`", text)
        for name, other in names.instances.items():  # reasons name launches without quotes
            text = re.sub(rf"(?<![\w`]){re.escape(name)}(?!\w)", other, text)
        return text

    def step(one: StepPlan) -> StepPlan:
        return replace(
            one,
            mode=names.modes.get(one.mode, one.mode),
            asked_mode=names.modes.get(one.asked_mode, one.asked_mode),
            items=tuple(_item(item, names, said) for item in one.items),
        )

    return step


def _item(one: Item, names: Names, said: Callable[[str], str]) -> Item:
    streams = names.streams
    if isinstance(one, Fork):
        stream, origin = streams.get(one.stream, one.stream), streams.get(one.origin, one.origin)
        return replace(one, stream=stream, origin=origin)
    if isinstance(one, Join):
        stream, target = streams.get(one.stream, one.stream), streams.get(one.target, one.target)
        return replace(one, stream=stream, target=target)

    def bound(binding: Binding) -> Binding:
        return replace(binding, target=names.memory.get(binding.target, binding.target))

    return replace(
        one,
        name=names.instances.get(one.name, one.name),
        word=names.words.get(one.word, one.word),
        stage=names.stages.get(one.stage, one.stage),
        stream=streams.get(one.stream, one.stream),
        bindings=tuple(map(bound, one.bindings)),
        pdl=replace(
            one.pdl,
            attribute_reason=said(one.pdl.attribute_reason),
            release_reason=said(one.pdl.release_reason),
        ),
    )
