"""The rows grammar and total tables, including every malformed key with its own error."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kpipe.codegen.diagnostics import Diagnostic, Span
from kpipe.codegen.spec.rows import (
    TEXT_LIMIT,
    RowRange,
    RowsError,
    check_table,
    format_rows,
    lookup,
    parse_range,
    parse_rows,
)

DECLARED = parse_rows("1-8, 16, 32, 33, 64")
RANGE_HELP = "write `4`, `5-64` or, as the last entry, `65-`"
ROWS_HELP = 'write for example "1-8, 16, 32, 64"'


def table(keys: list[str], declared=DECLARED) -> tuple:
    """Checks quoted keys, one a line from line 10, at column 5."""
    entries = [
        (key, Span("x.yaml", line, 5, line, 7 + len(key))) for line, key in enumerate(keys, 10)
    ]
    return check_table(entries, declared, "overlap.table", Span("x.yaml", 9, 3, 20, 1))


def findings(keys: list[str], declared=DECLARED) -> list[tuple[str, str, str]]:
    ranges, diagnostics = table(keys, declared)
    assert ranges == ()
    return [(finding.code, finding.message, finding.help) for finding in diagnostics]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("1-8, 16, 32, 64", (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)),
        ("16,1-3", (1, 2, 3, 16)),
        (" 4 ", (4,)),
        ("5-5", (5,)),
        ("1 , 3", (1, 3)),
        ("1048576", (1048576,)),
    ],
)
def test_parse_rows(text: str, rows: tuple[int, ...]) -> None:
    assert parse_rows(text) == rows


@pytest.mark.parametrize(
    ("text", "code", "message", "help", "place"),
    [
        ("", "KP120", "empty list of row counts", ROWS_HELP, (0, 0)),
        ("  ", "KP120", "empty list of row counts", ROWS_HELP, (0, 2)),
        ("1,,2", "KP120", "nothing between two commas in `1,,2`", "delete the comma", (2, 1)),
        ("1-8,", "KP120", "`1-8,` ends with a comma", "delete the comma", (3, 1)),
        (",1", "KP120", "`,1` starts with a comma", "delete the comma", (0, 1)),
        (
            "1-8, 8",
            "KP122",
            "row 8 is listed twice: in `1-8` and `8`",
            "list every row count once",
            (5, 1),
        ),
        (
            "1-8, 9-",
            "KP120",
            "open range `9-` in a list of row counts",
            "write the last row count, as in `9-64`",
            (5, 2),
        ),
        ("1, 8-2", "KP120", "`8-2` runs backwards", "write `2-8`", (3, 3)),
        ("0, 1", "KP120", "`0` names row 0: rows count from 1", "start at 1", (0, 1)),
        ("1 2", "KP120", "blank inside the row range `1 2`", ROWS_HELP, (1, 1)),
        ("1;2", "KP120", "`;` in `1;2` is not part of a row range", ROWS_HELP, (1, 1)),
        ("all", "KP120", "`all` is not a row range", ROWS_HELP, (0, 3)),
        ("1-4097", "KP120", "more than 4,096 row counts", "declare fewer row counts", (0, 6)),
        ("1-4096, 9999", "KP120", "more than 4,096 row counts", "declare fewer row counts", (8, 4)),
        (
            "1048577",
            "KP120",
            "`1048577` is above the largest row count, 1,048,576",
            "write a smaller number, or `9-` for no end",
            (0, 7),
        ),
        (
            "1," * 101,
            "KP120",
            "list of row counts of 202 characters; the limit is 200",
            ROWS_HELP,
            (0, 202),
        ),
    ],
)
def test_malformed_rows(
    text: str, code: str, message: str, help: str, place: tuple[int, int]
) -> None:
    with pytest.raises(RowsError) as caught:
        parse_rows(text)
    error = caught.value
    assert (error.code, error.message, error.help) == (code, message, help)
    assert (error.offset, error.length) == place


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5-64", RowRange(5, 64)),
        ("4", RowRange(4, 4)),
        ("9-", RowRange(9, None)),
        (" 1-8 ", RowRange(1, 8)),
        ("4-4", RowRange(4, 4)),
    ],
)
def test_parse_range(text: str, expected: RowRange) -> None:
    assert parse_range(text) == expected
    assert parse_range(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "message", "help", "place"),
    [
        ("", "empty row range", RANGE_HELP, (0, 0)),
        (
            "1-8:pdl",
            "`1-8:pdl` is a row range with a value in one text",
            "write the pair as `1-8: pdl`, without quotes around both",
            (3, 4),
        ),
        (
            "1-8 : PDL",
            "`1-8 : PDL` is a row range with a value in one text",
            "write the pair as `1-8: PDL`, without quotes around both",
            (3, 6),
        ),
        (
            "1-8=pdl",
            "`1-8=pdl` is a row range with a value in one text",
            "write the pair as `1-8: pdl`, without quotes around both",
            (3, 4),
        ),
        (
            "9-:stream",
            "`9-:stream` is a row range with a value in one text",
            "write the pair as `9-: stream`, without quotes around both",
            (2, 7),
        ),
        (
            "1-8:pdl,",
            "`1-8:pdl,` is a row range with a value in one text",
            "write the pair as `1-8: pdl`, without quotes around both",
            (3, 5),
        ),
        (
            "1-8:pdl;9-32:stream",
            "`1-8:pdl;9-32:stream` holds several entries",
            "write one `rows: value` pair per entry",
            (7, 1),
        ),
        (
            "1-8;9-32",
            "`1-8;9-32` holds several entries",
            "write one `rows: value` pair per entry",
            (3, 1),
        ),
        ("1-8,", "`1-8,` ends with a comma", f"delete the comma; {RANGE_HELP}", (3, 1)),
        (
            "1-8, 16",
            "`1-8, 16` lists several ranges in one key",
            "write one entry per range",
            (3, 1),
        ),
        ("1..8", "`1..8` writes a range with `..`", "write `1-8`", (1, 2)),
        ("1\u20138", "`1\u20138` writes a range with `\u2013`", "write `1-8`", (1, 1)),
        ("8-1", "`8-1` runs backwards", "write `1-8`", (0, 3)),
        ("0-8", "`0-8` names row 0: rows count from 1", "start at 1", (0, 1)),
        ("0", "`0` names row 0: rows count from 1", "start at 1", (0, 1)),
        ("08", "`08` has a number that starts with 0", "write 8", (0, 2)),
        ("-8", "`-8` has no first row", "write `1-8`", (0, 2)),
        ("-", "`-` has no first row", RANGE_HELP, (0, 1)),
        ("1 - 8", "blank inside the row range `1 - 8`", "write `1-8`", (1, 1)),
        ("1-8-9", "`1-8-9` is not a row range", RANGE_HELP, (0, 5)),
        ("turbo", "`turbo` is not a row range", RANGE_HELP, (0, 5)),
        ("9+", "`+` in `9+` is not part of a row range", RANGE_HELP, (1, 1)),
        (">=9", "`>` in `>=9` is not part of a row range", RANGE_HELP, (0, 1)),
        ("\uff11-8", "`\uff11` in `\uff11-8` is not part of a row range", RANGE_HELP, (0, 1)),
        (
            "99999999",
            "`99999999` is above the largest row count, 1,048,576",
            "write a smaller number, or `9-` for no end",
            (0, 8),
        ),
        ("1" * 201, "row range of 201 characters; the limit is 200", RANGE_HELP, (0, 201)),
    ],
)
def test_malformed_keys(text: str, message: str, help: str, place: tuple[int, int]) -> None:
    with pytest.raises(RowsError) as caught:
        parse_range(text)
    error = caught.value
    assert (error.code, error.message, error.help) == ("KP120", message, help)
    assert (error.offset, error.length) == place


def test_a_total_table_loads_and_every_row_finds_its_entry() -> None:
    ranges, diagnostics = table(["1-8", "9-32", "33-"])
    assert diagnostics == ()
    found = [lookup(ranges, row) for row in (1, 8, 9, 32, 33, 10**6)]
    assert [rows.entry for rows in found if rows] == [0, 0, 1, 1, 2, 2]
    assert lookup(ranges, 0) is None


def test_unsorted_keys_are_normalised_and_keep_their_entry() -> None:
    ranges, diagnostics = table(["9-32", "33-64", "1-8"])
    assert diagnostics == ()
    assert ranges == (RowRange(1, 8), RowRange(9, 32), RowRange(33, 64))
    assert [rows.entry for rows in ranges] == [2, 0, 1]
    assert lookup(ranges, 65) is None


def test_ranges_may_span_undeclared_rows() -> None:
    assert table(["1-15", "16-31", "32-64"])[1] == ()


def test_gap_names_every_uncovered_row() -> None:
    assert findings(["1-8", "9-32"]) == [
        ("KP121", "overlap.table: rows 33, 64 not covered", "add an entry, for example `33: ...`")
    ]
    assert findings(["1-8", "9-32", "64-128"], range(1, 257)) == [
        (
            "KP121",
            "overlap.table: rows 33-63, 129-256 not covered",
            "add an entry, for example `33-63: ...`",
        )
    ]
    assert findings(["1-33"])[0][1] == "overlap.table: row 64 not covered"


def test_gap_points_at_the_key_before_it_or_at_the_table() -> None:
    def line(keys: list[str]) -> int:
        span = table(keys)[1][0].span
        assert span is not None
        return span.line

    assert line(["1-8", "33-64"]) == 10
    assert line(["9-64"]) == 10
    assert line([]) == 9


def test_overlap_names_rows_and_both_entries() -> None:
    assert findings(["1-8", "8-32", "33-64"]) == [
        (
            "KP122",
            "overlap.table: row 8 in entries `1-8` and `8-32`",
            "give every row to one entry, for example `1-8` and `9-32`",
        )
    ]
    finding = table(["8-32", "1-8", "33-64"])[1][0]
    assert finding.message == "overlap.table: row 8 in entries `1-8` and `8-32`"
    assert finding.span == Span("x.yaml", 10, 5, 10, 11)
    assert finding.related == (("other entry", Span("x.yaml", 11, 5, 11, 10)),)


def test_nested_overlaps_are_all_found() -> None:
    assert [message for _, message, _ in findings(["1-64", "2-3", "16-20"])] == [
        "overlap.table: rows 2-3 in entries `1-64` and `2-3`",
        "overlap.table: rows 16-20 in entries `1-64` and `16-20`",
    ]
    assert findings(["1-64", "4", "4-4"])[1][1] == "overlap.table: row 4 in entries `1-64` and `4`"


def test_a_key_without_declared_rows_is_unreachable() -> None:
    assert findings(["1-8", "9-33", "34-63", "64-"]) == [
        (
            "KP123",
            "overlap.table: `34-63` selects none of the declared rows (1-8, 16, 32, 33, 64)",
            'delete the entry or declare its rows, for example `rows: {batches: "1-8, 16"}`',
        )
    ]
    assert table(["1-64", "65-"])[1][0].code == "KP123"


def test_open_range_must_be_last() -> None:
    assert findings(["9-", "1-8", "33-64"]) == [
        (
            "KP120",
            "overlap.table: open range `9-` must be the last entry, but `33-64` comes after it",
            "close it, for example `9-32`",
        )
    ]
    assert findings(["1-8", "9-", "9-"])[0][2] == "keep one of the two"
    assert table(["33-", "1-8", "9-32"])[1] == ()


def test_malformed_keys_point_into_the_key_and_hide_follow_up_findings() -> None:
    diagnostics = table(["1-8:pdl", "8-1", "16-64"])[1]
    assert diagnostics[0] == Diagnostic(
        "KP120",
        "overlap.table: `1-8:pdl` is a row range with a value in one text",
        Span("x.yaml", 10, 9, 10, 13),
        help="write the pair as `1-8: pdl`, without quotes around both",
    )
    assert [finding.message for finding in diagnostics[1:]] == [
        "overlap.table: `8-1` runs backwards"
    ]


def test_empty_key_is_an_error_of_its_own() -> None:
    assert findings(["", "1-64"]) == [("KP120", "overlap.table: empty row range", RANGE_HELP)]


def test_format_rows() -> None:
    assert format_rows([8, 1, 2, 3, 33, 34]) == "1-3, 8, 33, 34"
    assert format_rows([]) == ""


@given(st.sets(st.integers(1, 300), min_size=1, max_size=60))
@example(rows=set(range(100, 200, 2)))
def test_format_and_parse_are_inverse(rows: set[int]) -> None:
    text = format_rows(rows)
    if len(text) <= TEXT_LIMIT:
        assert parse_rows(text) == tuple(sorted(rows))
    else:
        with pytest.raises(RowsError, match=f"of {len(text)} characters; the limit is 200"):
            parse_rows(text)


@given(
    st.sets(st.integers(1, 40), min_size=1),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12), st.booleans()), max_size=6),
)
def test_verdict_agrees_with_counting(declared: set[int], drawn: list) -> None:
    """Oracle: write down for each row which keys hold it, and count."""
    keys = [f"{first}-" if is_open else f"{first}-{first + more}" for first, more, is_open in drawn]
    holds = [
        {row for row in range(1, 60) if row >= first and (is_open or row <= first + more)}
        for first, more, is_open in drawn
    ]
    total = all(sum(row in rows for rows in holds) == 1 for row in declared)
    apart = all(sum(row in rows for rows in holds) <= 1 for row in range(1, 60))
    reachable = all(rows & declared for rows in holds)
    ranges, diagnostics = table(keys, declared)
    assert (diagnostics == ()) == (total and apart and reachable)
    if ranges:
        for row in declared:
            found = lookup(ranges, row)
            assert found is not None
            assert row in holds[found.entry]


@given(st.text(alphabet="0123456789-,;:=. x", max_size=12))
def test_any_text_is_a_range_or_a_placed_error(text: str) -> None:
    for parse in (parse_range, parse_rows):
        try:
            parse(text)
        except RowsError as error:
            assert error.message and error.help
            assert 0 <= error.offset <= len(text)
            assert error.offset + error.length <= max(len(text), 1)
