"""Edits of a specification's text, built from spans: words replaced, list items put in or out.

Each function returns the edits, or nothing where the text does not look as expected: a repair is
offered only where it is certain what it does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kpipe.codegen.diagnostics import Edit, Span

_ITEM = re.compile(r"^\s*- +$")  # what stands ahead of an item of a block list


def lines_of(text: str) -> list[str]:
    """Lines as spans count them, without line ends and without a byte order mark."""
    return re.split("\r\n|\r|\n", text.removeprefix("\ufeff"))


def replace_word(texts: Mapping[str, str], span: Span, word: str, new: str) -> tuple[Edit, ...]:
    """`new` in place of the only occurrence of `word` in the span's text, which is one line."""
    line = _line(texts, span)
    if line is None or not word:
        return ()
    inside = line[span.column - 1 : span.end_column - 1]
    found = list(re.finditer(rf"(?<![\w.]){re.escape(word)}(?![\w.])", inside))
    if len(found) != 1:
        return ()
    start = span.column + found[0].start()
    return (Edit(Span(span.path, span.line, start, span.line, start + len(word)), new),)


def insert_item(texts: Mapping[str, str], span: Span, item: str) -> tuple[Edit, ...]:
    """`item` as an item of its own in front of the list item at `span`."""
    line = _line(texts, span)
    if line is None:
        return ()
    ahead = line[: span.column - 1]
    behind = f"\n{ahead}" if _ITEM.match(ahead) else ", "
    return (Edit(_point(span, span.column), item + behind),)


def append_item(texts: Mapping[str, str], span: Span, item: str) -> tuple[Edit, ...]:
    """`item` as an item of its own behind the list item at `span`."""
    line = _line(texts, span)
    if line is None:
        return ()
    ahead = line[: span.column - 1]
    between = f"\n{ahead}" if _ITEM.match(ahead) else ", "
    return (Edit(_point(span, span.end_column), between + item),)


def remove_item(texts: Mapping[str, str], span: Span) -> tuple[Edit, ...]:
    """The list item at `span` taken out with its comma, or with its line in a block list.

    Nothing where the comma stands on another line, or where the line holds a comment.
    """
    line = _line(texts, span)
    if line is None:
        return ()
    ahead, behind = line[: span.column - 1], line[span.end_column - 1 :]
    if _ITEM.match(ahead):
        if behind.strip() or span.line >= len(lines_of(texts[span.path])):
            return ()
        return (Edit(Span(span.path, span.line, 1, span.line + 1, 1), ""),)
    comma = re.match(r",[ \t]*", behind)
    if comma:
        start, end = span.column, span.end_column + len(comma[0])
        if comma.end() == len(behind):  # leave no blank at the end of the line
            start -= len(ahead) - len(ahead.rstrip()) if ahead.strip() else 0
    else:
        before = re.search(r",[ \t]*$", ahead)
        if before is None:
            return ()
        start, end = before.start() + 1, span.end_column
    return (Edit(Span(span.path, span.line, start, span.line, end), ""),)


def edited(text: str, edits: Iterable[Edit]) -> str:
    """`text` with edits that do not overlap; line ends and a byte order mark are kept."""
    newline = "\r\n" if "\r\n" in text else "\n"
    for edit in sorted(edits, key=lambda edit: _start(edit.span), reverse=True):
        start, end = _offsets(text, edit.span)
        text = text[:start] + edit.text.replace("\n", newline) + text[end:]
    return text


def _point(span: Span, column: int) -> Span:
    return Span(span.path, span.line, column, span.line, column)


def _line(texts: Mapping[str, str], span: Span) -> str | None:
    """The line that the span is part of; None where it is not part of one line that is known."""
    if span.path not in texts or span.line != span.end_line:
        return None
    lines = lines_of(texts[span.path])
    return lines[span.line - 1] if 1 <= span.line <= len(lines) else None


def _start(span: Span) -> tuple[int, int]:
    return span.line, span.column


def _offsets(text: str, span: Span) -> tuple[int, int]:
    """Where a span begins and ends in the text of its file."""
    starts, offset = [], len(text) - len(text.removeprefix("\ufeff"))
    for line in lines_of(text):
        starts.append(offset)
        offset += len(line)
        offset += 2 if text[offset : offset + 2] == "\r\n" else 1
    return (
        starts[span.line - 1] + span.column - 1,
        starts[span.end_line - 1] + span.end_column - 1,
    )
