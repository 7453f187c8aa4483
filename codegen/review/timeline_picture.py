"""A schedule in time as SVG: streams as lanes, launches as bars, what binds them.

Names that do not fit a bar stand on flags: above the first lane, below the others.  A flag is
higher than every flag right of it that it would run into, so that no pole crosses a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kpipe.codegen.review import svg
from kpipe.codegen.review.captions import heading
from kpipe.codegen.review.timed_schedule import Bar, Link, TimedSchedule

BAR, LEVEL, BETWEEN = 28.0, 17.0, 34.0  # heights: a bar, a level of flags, between two lanes
HEAD = 62.0  # ahead of the first lane's flags
TAB = 16.0  # how far an early start reaches back: a symbol, the model does not know it
WALL = 4.0
TICKS = (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000)
TICK_ROOM = 56.0  # pixels between two ticks at least


class _Name(NamedTuple):
    """Where the name of a bar stands: level 0 is inside, others are flags."""

    words: str
    level: int


class _Plot(NamedTuple):
    """Where everything is: pixels of a time, of a lane."""

    left: float
    scale: float  # pixels per us
    names: tuple[_Name, ...]
    tops: dict[str, float]  # stream -> top of its bars
    bottom: float

    def x(self, time: float) -> float:
        return self.left + time * self.scale


def timeline_svg(schedules: Sequence[TimedSchedule]) -> str:
    """One picture of the schedules, one below the other."""
    parts: list[str] = []
    top = 0.0
    for number, schedule in enumerate(schedules):
        if number:
            parts.append(svg.line(svg.PAD, top + 4, svg.WIDTH - svg.PAD, top + 4, "axis"))
            top += 8
        drawn, top = _panel(schedule, top)
        parts += drawn
    names = ", ".join(dict.fromkeys(schedule.caption.method for schedule in schedules))
    labels = ", ".join(dict.fromkeys(schedule.label for schedule in schedules))
    label = f"{schedules[0].caption.pipeline}: {names} in time, {labels}"
    return svg.document(top + 6, label, parts)


def _panel(schedule: TimedSchedule, top: float) -> tuple[list[str], float]:
    """The parts of one schedule, and where it ends."""
    plot = _plot(schedule, top)
    facts = (
        f"{schedule.total:.1f} µs a layer; "
        f"critical path {len(schedule.path)} of {len(schedule.bars)} launches"
    )
    parts = heading(schedule.caption, facts, schedule.label, top)
    parts += _grid(schedule, plot, top)
    parts += [part for link in schedule.links for part in _link(schedule, plot, link)]
    for bar, name in zip(schedule.bars, plot.names, strict=True):
        parts.append(_bar(schedule, plot, bar, name))
    below, end = _below(schedule, plot.bottom + 40)
    return parts + below, end


def _plot(schedule: TimedSchedule, top: float) -> _Plot:
    left = svg.PAD + max(svg.width(s, svg.TEXT, mono=True) for s in schedule.streams) + 16
    right = svg.WIDTH - svg.PAD
    total = max(schedule.total, 1e-3)
    names: tuple[_Name, ...] = ()
    for _ in range(3):  # flags at the right end take room, which shortens the bars
        scale = (right - left) / total
        names = _names(schedule, scale)
        ends = (
            left + bar.start * scale + _width(name.words)
            for bar, name in zip(schedule.bars, names, strict=True)
            if name.level
        )
        over = max((end - (svg.WIDTH - svg.PAD) for end in ends), default=0.0)
        if over <= 0:
            break
        right -= over + 1
    tops: dict[str, float] = {}
    y = top + HEAD + LEVEL * _levels(schedule, names, schedule.streams[0])
    for stream in schedule.streams:
        tops[stream] = y
        below = 0 if stream == schedule.streams[0] else _levels(schedule, names, stream)
        y += BAR + BETWEEN + LEVEL * below
    return _Plot(left, (right - left) / total, names, tops, y - BETWEEN + 8)


def _levels(schedule: TimedSchedule, names: Sequence[_Name], stream: str) -> int:
    pairs = zip(schedule.bars, names, strict=True)
    return max((name.level for bar, name in pairs if bar.stream == stream), default=0)


def _names(schedule: TimedSchedule, scale: float) -> tuple[_Name, ...]:
    """Inside where the bar has the room; else on the lowest level that is free to the right."""
    found: dict[int, _Name] = {}
    for stream in schedule.streams:
        flags: list[tuple[float, int]] = []  # start and level of what stands further right
        own = [(number, bar) for number, bar in enumerate(schedule.bars) if bar.stream == stream]
        for number, bar in reversed(own):
            words = _words(bar)
            if _width(words) + 14 <= bar.duration * scale:
                found[number] = _Name(words, 0)
                continue
            start = bar.start * scale
            met = [level for at, level in flags if at < start + _width(words) + 8]
            level = max(met, default=0) + 1
            flags.append((start, level))
            found[number] = _Name(words, level)
    return tuple(found[number] for number in sorted(found))


def _words(bar: Bar) -> str:
    marks = "".join(f" [{note}]" for note in bar.notes)
    return f"{bar.name} {bar.duration:.1f}{marks}"


def _width(words: str) -> float:
    return svg.width(words, svg.SMALL, mono=True)


def _grid(schedule: TimedSchedule, plot: _Plot, top: float) -> list[str]:
    """Lanes with their names, and the axis in us."""
    step = next((t for t in TICKS if t * plot.scale >= TICK_ROOM), TICKS[-1])
    above, axis = top + HEAD - 2, plot.bottom + 4
    parts = []
    for count in range(int(schedule.total / step) + 1):
        x = plot.x(count * step)
        parts.append(svg.line(x, above, x, axis, "grid"))
        words = f"{count * step} µs" if count == 0 else str(count * step)
        parts.append(svg.text(x, axis + 15, words, svg.SMALL, anchor="middle", kind="soft"))
    parts.append(svg.line(plot.left, axis, plot.x(schedule.total), axis, "axis"))
    for stream, y in plot.tops.items():
        middle = y + BAR / 2
        parts.append(svg.line(plot.left, middle, plot.x(schedule.total), middle, "axis"))
        parts.append(svg.text(svg.PAD, middle + 4, stream, svg.TEXT, mono=True, kind="b"))
    return parts


def _bar(schedule: TimedSchedule, plot: _Plot, bar: Bar, name: _Name) -> str:
    x, y, long = plot.x(bar.start), plot.tops[bar.stream], max(bar.duration * plot.scale, 2.0)
    number = schedule.caption.colour(bar.stage)
    parts = _flag(plot, bar, name, x) if name.level else []
    if bar.early:
        back = min(TAB, max(x - plot.left, 0.0))
        parts.append(svg.rect(x - back, y + BAR + 2, back + 3, 4, "fill-pdl", radius=2))
    parts.append(svg.rect(x, y, long, BAR, f"s{number}", radius=3))
    if bar.critical:
        parts.append(svg.rect(x, y, long, BAR, "hot", radius=3))
    if bar.plain:
        parts.append(svg.rect(x - 1, y - 3, WALL, BAR + 6, "wall", radius=1))
    if bar.held:
        parts.append(svg.rect(x + long - WALL + 1, y - 3, WALL, BAR + 6, "wall", radius=1))
    if not name.level:
        middle = svg.text(
            x + long / 2, y + BAR / 2 + 4, name.words, svg.SMALL, mono=True, anchor="middle"
        )
        parts.append(middle)
    return svg.titled(bar_title(schedule, bar), parts)


def _flag(plot: _Plot, bar: Bar, name: _Name, x: float) -> list[str]:
    """The name on its pole, up from the first lane and down from the others."""
    y = plot.tops[bar.stream]
    pole = x + 1
    if bar.stream == next(iter(plot.tops)):
        baseline = y - LEVEL * (name.level - 1) - 8
        start, stop = y, baseline + 2
    else:
        baseline = y + BAR + LEVEL * name.level + 2
        start, stop = y + BAR, baseline - 10
    return [
        svg.line(pole, start, pole, stop, "lead"),
        svg.text(x, baseline, name.words, svg.SMALL, mono=True, kind="halo"),
    ]


def bar_title(schedule: TimedSchedule, bar: Bar) -> str:
    """Everything that is known of a launch, in a few lines."""
    how = "measured" if bar.measured else "estimated"
    lines = [
        f"{bar.name}: stage {bar.stage}, stream {bar.stream}",
        f"{bar.duration:.1f} µs {how}, from {bar.start:.1f} to {bar.end:.1f} µs",
        f"{bar.bytes / 1e6:.2f} MB moved",
    ]
    if bar.critical:
        lines.append("on the critical path")
    else:
        lines.append(f"{bar.slack:.1f} µs of slack")
    if bar.early:
        lines.append("starts early by PDL")
    lines += [schedule.notes[note - 1] for note in bar.notes]
    return "\n".join(lines)


def _link(schedule: TimedSchedule, plot: _Plot, link: Link) -> list[str]:
    """A step to the next bar of the lane, or a curve from lane to lane."""
    first, second = schedule.bars[link.first], schedule.bars[link.second]
    kind = "hot" if link.critical else "link"
    x1, x2 = plot.x(first.end), plot.x(second.start)
    y1, y2 = plot.tops[first.stream] + BAR / 2, plot.tops[second.stream] + BAR / 2
    if link.kind == "words" and first.stream == second.stream:
        return []  # the bars between them stand in the way; the gap says it
    if link.kind == "stream":
        return [svg.line(x1, y1, x2, y2, f"{kind} dash" if second.early else kind)]
    down = y2 > y1
    out, into = (BAR / 2, -BAR / 2) if down else (-BAR / 2, BAR / 2)
    n = svg.number
    a = x1 - 3
    b = x2 + min(9.0, second.duration * plot.scale / 2)  # clear of the tab of an early start
    bend = (y2 + into - y1 - out) * 0.55
    points = (
        f"M{n(a)} {n(y1 + out)}C{n(a)} {n(y1 + out + bend)} {n(b)} {n(y2 + into - bend)} "
        f"{n(b)} {n(y2 + into)}"
    )
    fill = "fill-hot" if link.critical else "fill-soft"
    return [svg.path(points, kind), svg.head(b, y2 + into, fill, "down" if down else "up")]


def _below(schedule: TimedSchedule, y: float) -> tuple[list[str], float]:
    """Legend, reasons and what the durations rest on; returns the parts and where they end."""
    parts, y = _legend(schedule, y)
    room = svg.WIDTH - 2 * svg.PAD
    notes = [
        words
        for number, note in enumerate(schedule.notes, 1)
        for words in svg.wrapped(f"[{number}] {note}", svg.SMALL, room, mono=True)
    ]
    parts += svg.paragraph(svg.PAD, y + 24, notes, mono=True)
    y += 28 + 16 * len(notes)
    basis = svg.wrapped(schedule.basis.replace(" us", " µs"), svg.SMALL, room)
    parts += svg.paragraph(svg.PAD, y, basis)
    return parts, y + 16 * len(basis) - 2


def _legend(schedule: TimedSchedule, y: float) -> tuple[list[str], float]:
    """Stages and symbols in a flow of lines; returns the parts and the last baseline."""
    stages = dict.fromkeys(bar.stage for bar in schedule.bars)
    entries = [(_swatch(schedule.caption.colour(stage)), stage) for stage in stages]
    entries.append((_outline, "critical path"))
    if any(bar.early for bar in schedule.bars):
        entries.append((_tab, "may start early, by PDL (how early is not modelled)"))
    if schedule.notes:
        entries.append((_wall, "no overlap across it [reason]"))
    parts: list[str] = []
    x = svg.PAD
    for symbol, words in entries:
        taken = 22 + svg.width(words, svg.SMALL)
        if x > svg.PAD and x + taken > svg.WIDTH - svg.PAD:
            x, y = svg.PAD, y + 20
        parts += [*symbol(x, y), svg.text(x + 20, y, words, svg.SMALL)]
        x += taken + 14
    return parts, y


_Symbol = Callable[[float, float], list[str]]


def _swatch(number: int) -> _Symbol:
    return lambda x, y: [svg.rect(x, y - 10, 14, 12, f"s{number}", radius=2)]


def _outline(x: float, y: float) -> list[str]:
    return [svg.rect(x, y - 10, 14, 12, "hot", radius=2)]


def _tab(x: float, y: float) -> list[str]:
    return [svg.rect(x, y - 6, 14, 4, "fill-pdl", radius=2)]


def _wall(x: float, y: float) -> list[str]:
    return [svg.rect(x + 5, y - 11, WALL, 14, "wall", radius=1)]
