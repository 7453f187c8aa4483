"""Text tables of a plan: titles, aligned columns, wrapped lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

WIDTH = 110
"""Columns of a terminal."""


def section(title: str, lines: list[str], empty: str = "") -> str:
    """A title above its lines; without any, above `empty`."""
    return "\n".join([title, *(lines or [f"  {empty}"])]) + "\n"


def columns(rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    """Rows as aligned lines; where they are too wide, the widest column is wrapped at spaces."""
    if not rows:
        return []
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    excess = 2 * len(widths) + sum(widths) - WIDTH
    if excess > 0:
        widest = widths.index(max(widths))
        widths[widest] = max(widths[widest] - excess, 12)
    lines = []
    for row in rows:
        cells = [_cell_lines(cell, width) for cell, width in zip(row, widths, strict=True)]
        for part in range(max(map(len, cells))):
            texts = [cell[part] if part < len(cell) else "" for cell in cells]
            line = "  ".join(
                f"{text:>{width}}" if index in right else f"{text:<{width}}"
                for index, (text, width) in enumerate(zip(texts, widths, strict=True))
            )
            lines.append(f"  {line}".rstrip())
    return lines


def _cell_lines(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)


def flow(cells: Iterable[str], indent: str = "  ") -> list[str]:
    """Cells in as many equal columns as fit, row by row."""
    listed = list(cells)
    if not listed:
        return []
    width = max(len(cell) for cell in listed) + 3
    count = max((WIDTH - len(indent)) // width, 1)
    return [
        indent + "".join(f"{cell:<{width}}" for cell in listed[start : start + count]).rstrip()
        for start in range(0, len(listed), count)
    ]


def wrap(text: str, first: str, rest: str) -> list[str]:
    """Lines of at most WIDTH columns; `first` and `rest` stand in front of them."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
