"""A review for a terminal: the same content without markup."""

from __future__ import annotations

import textwrap

from kpipe.codegen.review.model import Review
from kpipe.codegen.review.sections import Bullets, Picture, Section, Table, sections_of
from kpipe.codegen.review.verdict import verdict_line

WIDTH = 110


def render_text(review: Review) -> str:
    """The verdict line, then every section in full."""
    parts = [f"{verdict_line(review)}\n", *map(_section, sections_of(review))]
    return "\n".join(parts)


def _section(section: Section) -> str:
    indent = "" if section.level == 1 else "  "
    lines = [*_wrap(_plain(section.title), indent, f"{indent}  ")]
    for block in section.blocks:
        lines += _block(block, f"{indent}  ")
    return "\n".join(lines) + "\n"


def _block(block: Table | Bullets | Picture, indent: str) -> list[str]:
    if isinstance(block, Picture):
        return [f"{indent}{line}".rstrip() for line in block.lines]
    if isinstance(block, Bullets):
        return [text for line in block.lines for text in _wrap(_plain(line), indent, f"{indent}  ")]
    rows = [block.header, *block.rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    fits = sum(widths) + 2 * len(widths) + len(indent) <= WIDTH
    if fits or block.header[-2:] != ("before", "after"):
        return [
            indent + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
    lines = []
    for row in block.rows:
        lines += _wrap(" ".join(row[:-2]), indent, f"{indent}  ")
        lines += _wrap(row[-2], f"{indent}  - ", f"{indent}    ")
        lines += _wrap(row[-1], f"{indent}  + ", f"{indent}    ")
    return lines


def _plain(line: str) -> str:
    return line.replace("`", "").replace("**", "")


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
