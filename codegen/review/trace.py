"""A schedule in time as a trace that ui.perfetto.dev and chrome://tracing open.

One process a schedule, one thread a stream, one complete event a launch, one flow a fork or join.
Times are in us, as the format wants them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kpipe.codegen.review.timed_schedule import Bar, TimedSchedule

NEAR_END = 0.01  # us ahead of a slice's end: a flow must begin inside its slice


def trace_json(schedules: Sequence[TimedSchedule]) -> str:
    """The schedules as one JSON object with `traceEvents`."""
    events: list[dict[str, Any]] = []
    for process, schedule in enumerate(schedules, 1):
        events += _process(process, schedule)
    payload = {
        "displayTimeUnit": "ns",
        "otherData": {
            "pipeline": schedules[0].caption.pipeline,
            "durations": {schedule.caption.method: schedule.basis for schedule in schedules},
        },
        "traceEvents": events,
    }
    return json.dumps(payload, indent=1) + "\n"


def _process(process: int, schedule: TimedSchedule) -> list[dict[str, Any]]:
    threads = {stream: number for number, stream in enumerate(schedule.streams, 1)}
    caption = schedule.caption
    title = f"{caption.pipeline} {caption.method}, {caption.step}, {schedule.label}"
    events = [_meta("process_name", process, 0, title)]
    events += [_meta("thread_name", process, thread, name) for name, thread in threads.items()]
    events += [_slice(schedule, bar, process, threads[bar.stream]) for bar in schedule.bars]
    for number, link in enumerate(schedule.links):
        if link.kind == "stream":
            continue
        first, second = schedule.bars[link.first], schedule.bars[link.second]
        flow = {"cat": link.kind, "name": link.kind, "id": 1000 * process + number}
        begin = max(first.end - NEAR_END, first.start)
        events.append(_flow(flow, "s", process, threads[first.stream], begin))
        end = _flow(flow, "f", process, threads[second.stream], second.start)
        events.append({**end, "bp": "e"})
    return events


def _meta(name: str, process: int, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": {"name": value}}


def _slice(schedule: TimedSchedule, bar: Bar, process: int, thread: int) -> dict[str, Any]:
    args = {
        "duration": "measured" if bar.measured else "estimated",
        "bytes": bar.bytes,
        "critical": bar.critical,
        "slack_us": round(bar.slack, 3),
        "starts_early": bar.early,
        "notes": [schedule.notes[note - 1] for note in bar.notes],
    }
    times = {"ts": round(bar.start, 3), "dur": round(bar.duration, 3)}
    where = {"pid": process, "tid": thread}
    return {"ph": "X", "name": bar.name, "cat": bar.stage, **where, **times, "args": args}


def _flow(
    flow: dict[str, Any], phase: str, process: int, thread: int, time: float
) -> dict[str, Any]:
    return {"ph": phase, **flow, "pid": process, "tid": thread, "ts": round(time, 3)}
