"""A plan as two or three lines of text: what runs beside what."""

from __future__ import annotations

from kpipe.codegen.plan.model import MAIN, Fork, Join, Launch, StepPlan


def timeline(plan: StepPlan) -> tuple[str, ...]:
    """One line per stream.  Columns are order, not time: an op stands right of all that it waits
    for; dots lead to a join."""
    ends: dict[str, int] = {MAIN: 0}
    pieces: dict[str, list[tuple[int, str]]] = {MAIN: []}
    for item in plan.items:
        if isinstance(item, Fork):
            pieces.setdefault(item.stream, [])
            ends[item.stream] = ends[item.origin]
        elif isinstance(item, Join):
            meet = max(ends[item.stream], ends[item.target])
            pieces[item.stream].append((ends[item.stream], "." * (meet - ends[item.stream]) + "/"))
            if ends[item.target] < meet:
                waiting = "." * (meet - ends[item.target] - 1)
                pieces[item.target].append((ends[item.target], waiting))
            ends[item.target] = meet
            ends[item.stream] = meet
        elif isinstance(item, Launch):
            start = ends[item.stream]
            pieces[item.stream].append((start, item.name))
            ends[item.stream] = start + len(item.name) + 1
    width = max(len(stream) for stream in pieces)
    return tuple(f"{stream:<{width}}  {_line(parts)}" for stream, parts in pieces.items())


def _line(parts: list[tuple[int, str]]) -> str:
    line = ""
    for start, text in parts:
        line = line.ljust(start) + text
    return line.rstrip()
