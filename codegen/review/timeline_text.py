"""A schedule in time for a terminal: one launch a line, in host order, its bar on the axis."""

from __future__ import annotations

from collections.abc import Sequence

from kpipe.codegen.review.captions import TEXT_WIDTH, text_heading, wrapped
from kpipe.codegen.review.timed_schedule import Bar, TimedSchedule

NARROWEST = 24  # of the axis
TICKS = (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000)
TICK_ROOM = 8  # columns between two ticks at least
LEGEND = (
    "# on the critical path, = off it, ~ may start early by PDL, | no overlap across it [reason]"
)


def timeline_text(schedules: Sequence[TimedSchedule]) -> str:
    """The schedules one below the other, at most 100 columns wide; what holds for all stands at the
    end."""
    shared = len({schedule.basis for schedule in schedules}) == 1
    panels = [_panel(schedule, with_basis=not shared) for schedule in schedules]
    foot = [*wrapped(LEGEND), *(wrapped(schedules[0].basis) if shared else ())]
    return "\n\n".join("\n".join(lines) for lines in [*panels, foot]) + "\n"


def _panel(schedule: TimedSchedule, *, with_basis: bool) -> list[str]:
    names = " > ".join(bar.name for bar in schedule.path)
    facts = f"{schedule.total:.1f} us a layer, {schedule.label}; critical path {names}"
    return [
        *text_heading(schedule.caption),
        *wrapped(facts),
        "",
        *_chart(schedule),
        *(
            line
            for number, note in enumerate(schedule.notes, 1)
            for line in wrapped(f"[{number}] {note}", "    ")
        ),
        *(wrapped(schedule.basis) if with_basis else ()),
    ]


def _chart(schedule: TimedSchedule) -> list[str]:
    """The table: what is fixed on the left and right, the axis in what is left between."""
    rows = [
        (bar.stream, bar.name, f"{bar.start:.1f}", f"{bar.duration:.1f}") for bar in schedule.bars
    ]
    head = ("stream", "op", "from", "us")
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(4)]
    remarks = [_remark(schedule, number) for number in range(len(schedule.bars))]
    taken = sum(widths) + 2 * 4 + 2 + max(map(len, remarks), default=0)
    room = max(TEXT_WIDTH - taken, NARROWEST)
    scale = (room - 1) / max(schedule.total, 1e-3)
    lines = [f"{_fixed(head, widths)}  {_axis(schedule.total, scale, room)}".rstrip()]
    for row, bar, remark in zip(rows, schedule.bars, remarks, strict=True):
        lines.append(f"{_fixed(row, widths)}  {_drawn(bar, scale):<{room}}  {remark}".rstrip())
    return lines


def _fixed(row: tuple[str, ...], widths: Sequence[int]) -> str:
    left = f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}"
    return f"{left}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}"


def _axis(total: float, scale: float, room: int) -> str:
    step = next((tick for tick in TICKS if tick * scale >= TICK_ROOM), TICKS[-1])
    cells = ""
    for count in range(int(total / step) + 1):
        label = str(count * step)
        column = round(count * step * scale)
        if column + len(label) <= room:
            cells = cells.ljust(column) + label
    return cells


def _drawn(bar: Bar, scale: float) -> str:
    """`  ~|####|`: the bar in its columns, at least one character beside its walls."""
    first = round(bar.start * scale)
    walls = bool(bar.plain) + bool(bar.held)
    last = max(round(bar.end * scale), first + 1 + walls)
    body = list(("#" if bar.critical else "=") * (last - first))
    if bar.held:
        body[-1] = "|"
    if bar.plain:
        body[0] = "|"
    line = " " * first + "".join(body)
    if bar.early and first:
        line = line[: first - 1] + "~" + line[first:]
    return line


_VERBS = {"fork": "behind", "join": "joins", "words": "waits for words of"}


def _remark(schedule: TimedSchedule, number: int) -> str:
    """Where a launch forks from, what it joins, whose words it needs, and reasons about it."""
    words = []
    for link in schedule.links:
        if link.second == number and link.kind != "stream":
            verb = _VERBS[link.kind]
            words.append(f"{verb} {schedule.bars[link.first].name}")
    bar = schedule.bars[number]
    marks = (("plain", bar.plain), ("held", bar.held))
    return ", ".join([*words, *(f"{word} [{note}]" for word, note in marks if note)])
