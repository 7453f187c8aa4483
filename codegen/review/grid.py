"""A table of letters over launches, as SVG and as text: rows are memory, columns are launches.

Both pictures of memory are drawn with it; what the letters mean is theirs to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, radians, sin

from kpipe.codegen.review import svg
from kpipe.codegen.review.captions import TEXT_WIDTH

CELL, LINE = 32.0, 24.0  # a column and a row of the picture, in pixels
TILT = 50  # degrees of the column heads
GAP = 22.0  # between the table and the words right of it


@dataclass(frozen=True)
class GridRow:
    """One row: its name, a text a column, the stretches that are shaded (both ends included), and
    words for the columns right of the table.  `inner` rows belong to the one above."""

    name: str
    cells: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    words: tuple[str, ...] = ()
    inner: bool = False
    title: str = ""


@dataclass(frozen=True)
class Grid:
    """Columns with their heads, in groups of equal size with a name each (or one without)."""

    heads: tuple[str, ...]
    groups: tuple[str, ...]
    rows: tuple[GridRow, ...]
    word_heads: tuple[str, ...] = ()


def grid_width(grid: Grid) -> float:
    """Pixels that the picture needs, margins included."""
    table = _left(grid) + len(grid.heads) * CELL
    tail = cos(radians(TILT)) * max(svg.width(h, svg.SMALL, mono=True) for h in grid.heads)
    words = sum(_word_widths(grid)) + GAP * len(grid.word_heads)
    return table + max(words, tail) + svg.PAD


def _left(grid: Grid) -> float:
    names = (svg.width(row.name, svg.SMALL, mono=True) + 14 * row.inner for row in grid.rows)
    return svg.PAD + max(names) + 14


def _word_widths(grid: Grid) -> list[float]:
    cells = [grid.word_heads, *(row.words for row in grid.rows)]
    return [
        max(svg.width(words[number], svg.SMALL, mono=True) for words in cells if words)
        for number in range(len(grid.word_heads))
    ]


def grid_svg(grid: Grid, top: float) -> tuple[list[str], float]:
    """The parts of the table from `top` on, and where it ends."""
    left = _left(grid)
    longest = max(svg.width(head, svg.SMALL, mono=True) for head in grid.heads)
    head = top + sin(radians(TILT)) * longest + 12 + (18 if any(grid.groups) else 0)
    bottom = head + 8 + LINE * len(grid.rows)
    right = left + CELL * len(grid.heads)
    parts = []
    per_group = len(grid.heads) // len(grid.groups)
    for number, name in enumerate(grid.groups):
        x = left + number * per_group * CELL
        if number:
            parts.append(svg.line(x, head + 4, x, bottom, "axis"))
        if name:
            parts.append(svg.text(x + 6, top + 10, name, svg.SMALL, kind="b"))
    for column, words in enumerate(grid.heads):
        x = left + (column + 0.5) * CELL
        parts.append(svg.text(x, head, words, svg.SMALL, mono=True, tilt=-TILT))
    x = right + GAP
    for words, width in zip(grid.word_heads, _word_widths(grid), strict=True):
        parts.append(svg.text(x, head, words, svg.SMALL, kind="soft"))
        x += width + GAP
    for number, row in enumerate(grid.rows):
        parts += _row(grid, row, left, right, head + 8 + LINE * number)
    return parts, bottom


def _row(grid: Grid, row: GridRow, left: float, right: float, y: float) -> list[str]:
    base = y + LINE / 2 + 4
    name = svg.text(
        svg.PAD + 14 * row.inner, base, row.name, svg.SMALL, mono=True, kind="soft" * row.inner
    )
    drawn = [name]
    for first, last in row.spans:
        x, long = left + first * CELL + 4, (last - first + 1) * CELL - 8
        drawn.append(svg.rect(x, y + 3, long, LINE - 6, "span", radius=4))
    for column, letters in enumerate(row.cells):
        if letters:
            x = left + (column + 0.5) * CELL
            kind = "" if row.inner else "b"
            drawn.append(
                svg.text(x, base, letters, svg.SMALL, mono=True, anchor="middle", kind=kind)
            )
    x = right + GAP
    for words, width in zip(row.words, _word_widths(grid), strict=True):
        if words:
            drawn.append(svg.text(x, base, words, svg.SMALL, mono=True, kind="soft"))
        x += width + GAP
    rule = svg.line(svg.PAD, y, right, y, "grid")
    return [rule, svg.titled(row.title, drawn) if row.title else "".join(drawn)]


def grid_text(grid: Grid) -> list[str]:
    """The table with numbered columns; where it is too wide, some groups at a time.

    The words beside it stand below instead where one group and they are too wide together.
    """
    names = [f"{'  ' * row.inner}{row.name}" for row in grid.rows]
    words = [grid.word_heads, *(row.words for row in grid.rows)]
    widths = [max(len(line[n]) for line in words if line) for n in range(len(grid.word_heads))]
    left = max(map(len, names)) + 2
    per_group = len(grid.heads) // len(grid.groups)
    cell = 1 + max(
        len(str(per_group)), *(len(letters) for row in grid.rows for letters in row.cells)
    )
    tails = [_tail(line, widths) for line in words]
    beside = left + cell * per_group + 1 + max(map(len, tails)) <= TEXT_WIDTH
    room = TEXT_WIDTH - left - (max(map(len, tails)) if beside else 0)
    fit = max(room // (cell * per_group + 1), 1)
    lines: list[str] = []
    for start in range(0, len(grid.groups), fit):
        groups = range(start, min(start + fit, len(grid.groups)))
        lines += [""] if lines else []
        if any(grid.groups):
            titles = "".join(f"{grid.groups[group]:<{cell * per_group + 1}}" for group in groups)
            lines.append((" " * left + titles).rstrip())
        numbers = [str(number + 1).ljust(cell) for number in range(per_group)]
        heads = ("".join(numbers) + " ") * len(groups)
        lines.append((" " * left + heads + tails[0] * beside).rstrip())
        for name, row, tail in zip(names, grid.rows, tails[1:], strict=True):
            drawn = _drawn(row, cell)
            parts = (drawn[group * per_group : (group + 1) * per_group] for group in groups)
            cells = "".join("".join(part) + " " for part in parts)
            lines.append(f"{name:<{left}}{cells}{tail * beside}".rstrip())
    if not beside:
        below = zip(["", *names], tails, strict=True)
        lines += ["", *(f"{name:<{left}}{tail}".rstrip() for name, tail in below)]
    return lines


def _drawn(row: GridRow, cell: int) -> list[str]:
    """The letters, dashes where a stretch goes on to the next column, dots elsewhere."""
    found = []
    for column, letters in enumerate(row.cells):
        inside = any(first <= column < last for first, last in row.spans)
        text = letters or ("-" if inside else ".")
        found.append(text.ljust(cell, "-" if inside else " "))
    return found


def _tail(words: Sequence[str], widths: Sequence[int]) -> str:
    """The words beside the table; numbers stand right."""
    return "  ".join(
        word.rjust(width)
        if word[:1].isdigit() or word[:1] == "<" or word == "MiB"
        else word.ljust(width)
        for word, width in zip(words, widths, strict=False)
    )
