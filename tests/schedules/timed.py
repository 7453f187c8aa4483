"""A GPU with a clock: executes the rows of stand-ins in the time that they take.

What each launch waits for is said by the independent explorer's host side (`explorer.enqueue`);
nothing here knows an order relation, or what the checker claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from explorer.enqueue import Task, enqueue

from kpipe.codegen.proof.program import Action, Kernel, Program, Record, Segment, Wait
from kpipe.codegen.proof.schedule_form import decode
from kpipe.runtime.schedules.form import from_json
from kpipe.runtime.schedules.memory import Layout, lay_out
from kpipe.runtime.schedules.work import READ, SLEEP, WRITE

Moment = dict[str, int]
Event = tuple[int, int, int, Any]  # time, launch, row number, row


def wrong_values(
    schedule: Mapping[str, Any],
    delays: Mapping[tuple[int, bool], int],
    holds: Mapping[int, int],
) -> int:
    """Words that a timed execution finds wrong, reads and what is left behind together."""
    form = from_json(schedule)
    layout = lay_out(form, delays, holds)
    events: list[Event] = []
    moments: list[Moment] = []
    for position, task in enumerate(enqueue(_joined(decode(schedule)))):
        moments.append(_moments(position, task, moments, layout, events))
    words = [0] * layout.size
    wrong = 0
    for *_, row in sorted(events, key=lambda event: event[:3]):
        if callable(row):
            row(words)
            continue
        kind, first, count, value, *_ = row
        if kind == WRITE:
            words[first : first + count] = [value] * count
        if kind == READ:
            wrong += sum(word != value for word in words[first : first + count])
    left = (
        words[i] != final.value for final in layout.finals for i in range(final.first, final.end)
    )
    return wrong + sum(left)


def _joined(program: Program) -> Program:
    """Graphs whose streams are all forked in front of everything and joined behind everything, as
    CUDA demands; no launch depends on either."""
    return Program(tuple(_whole(one) if one.captured else one for one in program.segments))


def _whole(segment: Segment) -> Segment:
    actions: tuple[Action, ...] = segment.actions
    for stream in sorted({action.stream for action in actions} - {segment.stream}):
        fork = Record(segment.stream, 1000 + stream), Wait(stream, 1000 + stream)
        join = Record(stream, 2000 + stream), Wait(segment.stream, 2000 + stream)
        actions = (*fork, *actions, *join)
    return replace(segment, actions=actions)


def _moments(
    position: int, task: Task, before: list[Moment], layout: Layout, events: list[Event]
) -> Moment:
    done = [before[other]["E"] for other in task.flushed]
    start = max([position, *done, *(before[other]["T"] for other in task.parents)])
    if position in layout.copies:
        events.append((start, position, 0, _copying(layout, position)))
        return {"S": start, "T": start + 1, "E": start + 1}
    early, body = layout.work[position]
    waited = returned = _run(early, start, position, 0, events)
    node = task.node
    assert isinstance(node, Kernel)
    if node.waits:
        returned = max([waited, *(before[other]["E"] for other in task.parents)])
    ended = _run(body, returned, position, len(early), events)
    trigger = {"early": start, "after_wait": returned, "never": ended}[node.trigger]
    return {"S": start, "T": trigger, "E": ended}


def _run(rows: Any, now: int, position: int, number: int, events: list[Event]) -> int:
    for place, row in enumerate(rows):
        if row[0] == SLEEP:
            now += row[3]
            continue
        events.append((now, position, number + place, row))
        now += 1
    return now


def _copying(layout: Layout, position: int) -> Any:
    copying = layout.copies[position]
    size = copying.end - copying.first

    def copy(words: list[int]) -> None:
        source = words[copying.first : copying.end]
        if copying.target < 0:
            words[copying.first : copying.end] = [copying.value] * size
        else:
            words[copying.target : copying.target + size] = source

    return copy
