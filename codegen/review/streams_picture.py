"""What the host issues, stream by stream, as text and as SVG: time of issue runs downwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kpipe.codegen.plan.model import Fork, Join, Launch, StepPlan
from kpipe.codegen.review import svg
from kpipe.codegen.review.captions import Caption, heading, text_heading, wrapped

BOX_WIDTH, BOX_HEIGHT, ROW, COLUMN_GAP = 190.0, 26.0, 36.0, 60.0
NOTES = 440.0  # room for words beside the launches: two lines for the longest reason
TOP = 92.0  # of the first row, below the heading
ABOUT = (
    "Rows are the order of issue. An event is recorded behind all that its stream holds; the next "
    "launch of the stream that waits starts behind it."
)


@dataclass(frozen=True)
class StreamsView:
    """A step whose order of issue is shown."""

    caption: Caption
    step: StepPlan


@dataclass(frozen=True)
class _Event:
    """A fork or join: `before` records event `number`, `behind` waits for it."""

    number: int
    before: str
    behind: str
    verb: str


def _rows(step: StepPlan) -> list[Launch | _Event]:
    rows: list[Launch | _Event] = []
    events = 0
    for item in step.items:
        if isinstance(item, Launch):
            rows.append(item)
            continue
        ends = (item.origin, item.stream) if isinstance(item, Fork) else (item.stream, item.target)
        verb = "join" if isinstance(item, Join) else "fork"
        rows.append(_Event(events, *ends, verb))
        events += 1
    return rows


def _facts(step: StepPlan) -> str:
    counts = {s: sum(launch.stream == s for launch in step.launches) for s in step.streams}
    events = sum(not isinstance(item, Launch) for item in step.items)
    launches = [_counted(count, "launch", "es") + f" on {s}" for s, count in counts.items()]
    return ", ".join([*launches, _counted(events, "event", "s")])


def _counted(count: int, word: str, plural: str) -> str:
    return f"{count} {word}{'' if count == 1 else plural}"


def _remarks(launch: Launch) -> str:
    parts = ["pdl" if launch.pdl.attribute else launch.pdl.attribute_reason]
    if not launch.pdl.release and not launch.contract.release.fixed:
        parts.append(launch.pdl.release_reason)
    return "; ".join(parts)


def streams_text(views: Sequence[StreamsView]) -> str:
    """One ladder a launch list, a column a stream; lines stay within 100 columns."""
    parts = []
    for view in views:
        step = view.step
        names = {stream: [stream] for stream in step.streams}
        for row in _rows(step):
            for stream in step.streams:
                names[stream].append(_cell(row, stream))
        widths = {stream: max(map(len, cells)) for stream, cells in names.items()}
        lines = [
            "  ".join(["    ", *(names[s][0].ljust(widths[s]) for s in step.streams)]).rstrip()
        ]
        for number, row in enumerate(_rows(step), 1):
            cells = [names[stream][number].ljust(widths[stream]) for stream in step.streams]
            start = "  ".join([f"{number:>4}", *cells])
            remark = _remarks(row) if isinstance(row, Launch) else ""
            lines += wrapped(f"{start}  {remark}".rstrip(), " " * (len(start) + 2))
        parts.append([*text_heading(view.caption), *wrapped(_facts(step)), "", *lines])
    return "\n\n".join("\n".join(lines) for lines in [*parts, wrapped(ABOUT)]) + "\n"


def _cell(row: Launch | _Event, stream: str) -> str:
    if isinstance(row, Launch):
        return row.name if row.stream == stream else ""
    if stream == row.before:
        return f"record e{row.number}"
    return f"wait e{row.number}" if stream == row.behind else ""


def streams_svg(views: Sequence[StreamsView]) -> str:
    """One picture of the launch lists, one below the other."""
    width = max(svg.WIDTH, *(_notes(view.step) + NOTES + svg.PAD for view in views))
    parts: list[str] = []
    top = 0.0
    for view in views:
        drawn, top = _panel(view, top)
        parts += drawn
    lines = svg.wrapped(ABOUT, svg.SMALL, width - 2 * svg.PAD)
    parts += svg.paragraph(svg.PAD, top, lines)
    name = views[0].caption.pipeline
    return svg.document(top + 16 * len(lines) + 10, f"{name}: order of issue", parts, width)


def _notes(step: StepPlan) -> float:
    """Where the words beside the launches begin."""
    return svg.PAD + len(step.streams) * (BOX_WIDTH + COLUMN_GAP)


def _panel(view: StreamsView, top: float) -> tuple[list[str], float]:
    step = view.step
    rows = _rows(step)
    columns = {stream: number for number, stream in enumerate(step.streams)}
    first, end = top + TOP, top + TOP + ROW * len(rows)
    parts = heading(view.caption, _facts(step), "", top)
    for stream, column in columns.items():
        x = _middle(column)
        parts.append(svg.text(x, first - 14, stream, mono=True, anchor="middle", kind="b"))
        parts.append(svg.line(x, first - 6, x, end, "axis"))
    notes = _notes(step)
    for number, row in enumerate(rows):
        y = first + ROW * number
        if isinstance(row, _Event):
            parts += _event(row, columns, y + BOX_HEIGHT / 2)
        else:
            parts += _launch(view, row, columns[row.stream], y, notes)
    return parts, end + 24


def _middle(column: int) -> float:
    return svg.PAD + column * (BOX_WIDTH + COLUMN_GAP) + BOX_WIDTH / 2


def _launch(view: StreamsView, launch: Launch, column: int, y: float, notes: float) -> list[str]:
    x = _middle(column) - BOX_WIDTH / 2
    kind = f"s{view.caption.colour(launch.stage)}"
    label = svg.text(
        x + BOX_WIDTH / 2, y + BOX_HEIGHT / 2 + 4, launch.name, mono=True, anchor="middle"
    )
    box = svg.rect(x, y, BOX_WIDTH, BOX_HEIGHT, kind, radius=5)
    remark = _remarks(launch)
    parts = [svg.titled(f"{launch.name}: stage {launch.stage}\n{remark}", [box, label])]
    lines = svg.wrapped(remark, svg.SMALL, NOTES)
    start = y + BOX_HEIGHT / 2 + 4 - 7 * (len(lines) - 1)
    for number, words in enumerate(lines):
        parts.append(svg.text(notes, start + 14 * number, words, svg.SMALL, kind="soft"))
    return parts


def _event(event: _Event, columns: dict[str, int], y: float) -> list[str]:
    """An arrow from the stream that records to the stream that waits."""
    x1, x2 = _middle(columns[event.before]), _middle(columns[event.behind])
    towards = "right" if x2 > x1 else "left"
    back = -7 if x2 > x1 else 7
    words = f"{event.verb}: record e{event.number} -> wait"
    middle = (x1 + x2) / 2
    return [
        svg.line(x1, y, x2 + back, y, "hot"),
        svg.rect(x1 - 3, y - 3, 6, 6, "fill-hot", radius=3),
        svg.head(x2, y, "fill-hot", towards),
        svg.text(middle, y - 5, words, svg.SMALL, mono=True, anchor="middle"),
    ]
