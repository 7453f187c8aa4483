"""Rows: "1-8, 16, 32, 64" and the keys of tables over rows.

A row count is the number of token rows of a step, from 1. Two small grammars:

    rows  := item ("," item)*          row counts that exist, for example "1-8, 16, 32, 64"
    range := N | N "-" M | N "-"       a table key; `9-` is open and stands last in its table

Numbers are plain decimal without sign or leading zeros. Blanks are allowed around a comma and at
both ends, nowhere else. A table is total over the declared row counts: each of them is covered
by exactly one key, and each key covers at least one. Keys may stand in any order.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kpipe.codegen.diagnostics import Diagnostic, Span, subspan

GRAMMAR, GAP, OVERLAP, UNREACHABLE = "KP120", "KP121", "KP122", "KP123"
ROW_LIMIT = 1 << 20  # far above any decode batch; keeps "1-999999999" from filling the memory
COUNT_LIMIT = 4096  # row counts that one specification may declare
TEXT_LIMIT = 200  # characters
RANGE_EXAMPLE = "write `4`, `5-64` or, as the last entry, `65-`"
ROWS_EXAMPLE = 'write for example "1-8, 16, 32, 64"'

_NUMBER = re.compile(r"[0-9]+")
_RANGE = re.compile(r"([0-9]+)(?:(-)([0-9]*))?")
_FOREIGN = re.compile(r"[^0-9 \-]")


@dataclass(frozen=True)
class RowRange:
    """Rows `first` to `last`, both included; `last` None means no upper end.

    `entry` is the position of the key in its table as written; it does not take part in equality.
    """

    first: int
    last: int | None
    entry: int = field(default=0, compare=False)

    def __contains__(self, row: int) -> bool:
        return self.first <= row and (self.last is None or row <= self.last)

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.first}-"
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class RowsError(ValueError):
    """A text that is not in the rows grammar.

    `message` names the offending text, `help` shows the right syntax, `offset` and `length` say
    where in the text the trouble sits, `code` is KP120 (grammar) or KP122 (listed twice).
    """

    def __init__(
        self, message: str, offset: int, length: int, help: str, code: str = GRAMMAR
    ) -> None:
        super().__init__(message)
        self.message, self.offset, self.length = message, offset, length
        self.help, self.code = help, code

    def diagnostic(self, text: str, span: Span, where: str = "") -> Diagnostic:
        """The finding for `text` written at `span`; `where` ("rows.batches") leads the message."""
        message = f"{where}: {self.message}" if where else self.message
        place = subspan(span, text, self.offset, self.length)
        return Diagnostic(self.code, message, place, help=self.help)


def parse_range(text: str) -> RowRange:
    """A table key as a range: "4", "5-64" or "9-". Raises RowsError KP120 for anything else."""
    body = text.strip(" ")
    offset = len(text) - len(text.lstrip(" "))
    if not body:
        raise RowsError("empty row range", 0, len(text), RANGE_EXAMPLE)
    _check_length(text, "row range", RANGE_EXAMPLE)
    _check_table_key(body, offset)
    return _range(body, offset, RANGE_EXAMPLE)


def parse_rows(text: str) -> tuple[int, ...]:
    """Declared row counts, ascending: "1-8, 16" gives (1, 2, ..., 8, 16).

    Items may stand in any order. Raises RowsError: KP120 for malformed text, open ranges, empty
    items, numbers above 1,048,576 and more than 4,096 counts; KP122 for a row that is listed
    twice.
    """
    if not text.strip(" "):
        raise RowsError("empty list of row counts", 0, len(text), ROWS_EXAMPLE)
    _check_length(text, "list of row counts", ROWS_EXAMPLE)
    owner: dict[int, str] = {}
    offset = 0
    for item in text.split(","):
        body = item.strip(" ")
        start = offset + len(item) - len(item.lstrip(" "))
        if not body:
            raise _empty_item(text, offset, item)
        rows = _range(body, start, ROWS_EXAMPLE)
        if rows.last is None:
            message = f"open range `{body}` in a list of row counts"
            raise RowsError(message, start, len(body), "write the last row count, as in `9-64`")
        if len(owner) + rows.last - rows.first + 1 > COUNT_LIMIT:
            message = f"more than {COUNT_LIMIT:,} row counts"
            raise RowsError(message, start, len(body), "declare fewer row counts")
        for row in range(rows.first, rows.last + 1):
            if row in owner:
                message = f"row {row} is listed twice: in `{owner[row]}` and `{body}`"
                raise RowsError(message, start, len(body), "list every row count once", OVERLAP)
            owner[row] = body
        offset += len(item) + 1
    return tuple(sorted(owner))


def check_table(
    entries: Sequence[tuple[str, Span]],
    declared: Iterable[int],
    where: str,
    span: Span | None = None,
    wider: Collection[str] = (),
) -> tuple[tuple[RowRange, ...], tuple[Diagnostic, ...]]:
    """Keys of one table, checked to be total over the declared row counts.

    `entries` are the keys as written with their places, `where` names the table in messages
    ("overlap.table"), `span` is the table's own place, used when it has no key. Keys in the files
    `wider` may select none of the rows: they were written for more of them. Returns
    (ranges, diagnostics), and one of the two is empty: the ranges ascend and their `entry` leads
    back to `entries`. Grammar errors (KP120) are reported alone, since a key that cannot be read
    would look like a gap; otherwise overlaps (KP122), unreachable keys (KP123) and the gap
    (KP121) are reported together.
    """
    rows = sorted(set(declared))
    ranges, findings = [], []
    for position, (text, place) in enumerate(entries):
        try:
            parsed = parse_range(text)
        except RowsError as error:
            findings.append(error.diagnostic(text, place, where))
        else:
            ranges.append(RowRange(parsed.first, parsed.last, position))
    ranges.sort(key=lambda item: (item.first, item.last is None, item.last or 0))
    findings += _open_not_last(ranges, entries, where)
    if not findings:
        findings += _overlaps(ranges, entries, where)
        findings += _unreachable(ranges, rows, entries, where, wider)
        findings += _gap(ranges, rows, entries, where, span)
    return ((), tuple(findings)) if findings else (tuple(ranges), ())


def lookup(ranges: Sequence[RowRange], row: int) -> RowRange | None:
    """The range of a checked table that holds `row`, or None when no range does."""
    position = bisect_right(ranges, row, key=lambda item: item.first) - 1
    return ranges[position] if position >= 0 and row in ranges[position] else None


def format_rows(rows: Iterable[int]) -> str:
    """Row counts in the rows grammar: (1, 2, 3, 8) is "1-3, 8". Runs of two stay apart."""
    runs: list[list[int]] = []
    for row in sorted(set(rows)):
        if runs and runs[-1][-1] == row - 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    parts = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(row) for row in run]
    return ", ".join(parts)


def _check_length(text: str, what: str, example: str) -> None:
    if len(text) > TEXT_LIMIT:
        message = f"{what} of {len(text)} characters; the limit is {TEXT_LIMIT}"
        raise RowsError(message, 0, len(text), example)


def _check_table_key(body: str, offset: int) -> None:
    """Refuses what other notations for tables would put into a key."""

    def refuse(message: str, position: int, length: int, help: str) -> RowsError:
        return RowsError(message, offset + position, length, help)

    if ";" in body:
        message = f"`{body}` holds several entries"
        raise refuse(message, body.index(";"), 1, "write one `rows: value` pair per entry")
    valued = re.match(r"([0-9][0-9 -]*?) *[:=] *([^,]*)", body)
    if valued:
        start = valued.end(1)
        message = f"`{body}` is a row range with a value in one text"
        help = (
            f"write the pair as `{valued[1]}: {valued[2] or 'value'}`, without quotes around both"
        )
        raise refuse(message, start, len(body) - start, help)
    if body.endswith(","):
        message = f"`{body}` ends with a comma"
        raise refuse(message, len(body) - 1, 1, f"delete the comma; {RANGE_EXAMPLE}")
    if "," in body:
        message = f"`{body}` lists several ranges in one key"
        raise refuse(message, body.index(","), 1, "write one entry per range")


def _range(body: str, offset: int, example: str) -> RowRange:
    """One range without blanks around it; `offset` is where it starts in the whole text."""
    match = _RANGE.fullmatch(body)
    if match is None:
        raise _malformed(body, offset, example)
    first = _number(body, match[1], offset)
    if match[2] is None:
        return RowRange(first, first)
    last = _number(body, match[3], offset + match.start(3)) if match[3] else None
    if last is not None and last < first:
        message = f"`{body}` runs backwards"
        raise RowsError(message, offset, len(body), f"write `{last}-{first}`")
    return RowRange(first, last)


def _number(body: str, digits: str, offset: int) -> int:
    if digits.strip("0") == "":
        message = f"`{body}` names row 0: rows count from 1"
        raise RowsError(message, offset, len(digits), "start at 1")
    if digits[0] == "0":
        message = f"`{body}` has a number that starts with 0"
        raise RowsError(message, offset, len(digits), f"write {digits.lstrip('0')}")
    if len(digits) > 7 or int(digits) > ROW_LIMIT:
        message = f"`{body}` is above the largest row count, {ROW_LIMIT:,}"
        raise RowsError(message, offset, len(digits), "write a smaller number, or `9-` for no end")
    return int(digits)


def _malformed(body: str, offset: int, example: str) -> RowsError:
    """The most telling error for a text that is not a range."""
    dots = re.search(r"\.\.+|[\u2010-\u2015\u2212]", body)
    if dots:
        fixed = re.sub(r"\s*(\.\.+|[\u2010-\u2015\u2212])\s*", "-", body)
        message = f"`{body}` writes a range with `{dots[0]}`"
        return RowsError(message, offset + dots.start(), len(dots[0]), f"write `{fixed}`")
    foreign = _FOREIGN.search(body)
    if foreign and re.search("[0-9]", body):
        message = f"`{foreign[0]}` in `{body}` is not part of a row range"
        return RowsError(message, offset + foreign.start(), 1, example)
    if " " in body:
        message = f"blank inside the row range `{body}`"
        help = f"write `{body.replace(' ', '')}`" if "-" in body else example
        return RowsError(message, offset + body.index(" "), 1, help)
    if body.startswith("-"):
        message = f"`{body}` has no first row"
        help = f"write `1{body}`" if _NUMBER.fullmatch(body[1:]) else example
        return RowsError(message, offset, len(body), help)
    return RowsError(f"`{body}` is not a row range", offset, len(body), example)


def _empty_item(text: str, offset: int, item: str) -> RowsError:
    if offset + len(item) == len(text):
        comma = offset - 1
        return RowsError(f"`{text.strip()}` ends with a comma", comma, 1, "delete the comma")
    message = f"nothing between two commas in `{text.strip()}`"
    if not text[:offset].strip(" "):
        message = f"`{text.strip()}` starts with a comma"
    return RowsError(message, offset + len(item), 1, "delete the comma")


def _open_not_last(
    ranges: list[RowRange], entries: Sequence[tuple[str, Span]], where: str
) -> list[Diagnostic]:
    findings = []
    for position, rows in enumerate(ranges[:-1]):
        if rows.last is None:
            message = f"{where}: open range `{rows}` must be the last entry"
            message += f", but `{ranges[position + 1]}` comes after it"
            help = f"close it, for example `{rows}{ranges[position + 1].first - 1}`"
            if ranges[position + 1].first <= rows.first:
                help = "keep one of the two"
            place = entries[rows.entry][1]
            related = (("after it", entries[ranges[position + 1].entry][1]),)
            findings.append(Diagnostic(GRAMMAR, message, place, help=help, related=related))
    return findings


def _overlaps(
    ranges: list[RowRange], entries: Sequence[tuple[str, Span]], where: str
) -> list[Diagnostic]:
    """Each range against the one before it that reaches furthest, so nested ranges are found."""
    findings = []
    reach: RowRange | None = None
    for rows in ranges:
        if reach is not None and (reach.last is None or rows.first <= reach.last):
            ends = [end for end in (reach.last, rows.last) if end is not None]
            shared = RowRange(rows.first, min(ends) if ends else None)
            what = f"row {shared}" if shared.first == shared.last else f"rows {shared}"
            pair = sorted((reach, rows), key=lambda item: (item.first, item.entry))
            message = f"{where}: {what} in entries `{pair[0]}` and `{pair[1]}`"
            place, other = entries[rows.entry][1], entries[reach.entry][1]
            help = "give every row to one entry, for example `1-8` and `9-32`"
            related = (("other entry", other),)
            findings.append(Diagnostic(OVERLAP, message, place, help=help, related=related))
        if reach is None or (
            reach.last is not None and (rows.last is None or rows.last > reach.last)
        ):
            reach = rows
    return findings


def _unreachable(
    ranges: list[RowRange],
    declared: list[int],
    entries: Sequence[tuple[str, Span]],
    where: str,
    wider: Collection[str],
) -> list[Diagnostic]:
    findings = []
    for rows in ranges:
        inherited = entries[rows.entry][1].path in wider
        if not inherited and not any(row in rows for row in declared):
            known = format_rows(declared) or "none"
            message = f"{where}: `{rows}` selects none of the declared rows ({known})"
            help = 'delete the entry or declare its rows, for example `rows: {batches: "1-8, 16"}`'
            findings.append(Diagnostic(UNREACHABLE, message, entries[rows.entry][1], help=help))
    return findings


def _gap(
    ranges: list[RowRange],
    declared: list[int],
    entries: Sequence[tuple[str, Span]],
    where: str,
    span: Span | None,
) -> list[Diagnostic]:
    """One finding for all uncovered rows, at the last key before the first of them."""
    missing = [row for row in declared if not any(row in rows for rows in ranges)]
    if not missing:
        return []
    place = span
    before = [rows for rows in ranges if rows.first < missing[0]] or ranges[:1]
    if before:
        place = entries[before[-1].entry][1]
    plural = "row" if len(missing) == 1 else "rows"
    message = f"{where}: {plural} {format_rows(missing)} not covered"
    example = format_rows(missing).split(",")[0]
    return [Diagnostic(GAP, message, place, help=f"add an entry, for example `{example}: ...`")]
