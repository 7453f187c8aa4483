"""Positioned YAML, hostile and broken input: syntax in words, encodings, sizes, property tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError
from kpipe.codegen.spec.document import (
    Mapping,
    decode_source,
    read_document,
    read_source,
    span_of,
    to_plain,
)


def errors(source: str | bytes) -> tuple[Diagnostic, ...]:
    with pytest.raises(SpecError) as caught:
        read_document("x.yaml", source)
    return caught.value.diagnostics


def lines(source: str | bytes) -> list[str]:
    return str(SpecError(errors(source))).split("\n")


ALIGN = "align it with its siblings"


@pytest.mark.parametrize(
    ("source", "place", "message", "help"),
    [
        ("a: 1\n b: 2\n", "2:2", "`b` reads as a continuation of line 1", ALIGN),
        (
            "a:1\nb: 2\n",
            "2:1",
            "`b` reads as a continuation of line 1",
            f"{ALIGN}; line 1 needs a colon and a space after its key",
        ),
        (
            "a:\n  b: 1\n c: 2\n",
            "3:2",
            "this line does not line up with the mapping that starts on line 1",
            "indent it like its siblings",
        ),
        (
            "- a\nb: 1\n",
            "2:1",
            "this line does not line up with the list that starts on line 1",
            "indent it like its siblings",
        ),
        (
            "a: b: c\n",
            "1:5",
            "a second `:` in one value",
            "quote the text if the colon belongs to it, or write `{key: value}`",
        ),
        (
            "a: 1\nb\n",
            "2:1",
            "expected `key: value`",
            "write a space after the colon, and the value behind it or indented below",
        ),
        ("{tp:8}\n", "1:2", "no space after the colon in `tp:8`", "write `tp: 8`"),
        ("a: [1, 2", "1:4", "`[` is never closed", "close it with `]`"),
        ("a: {\n", "1:4", "`{` is never closed", "close it with `}`"),
        (
            "a: [1, 2\nb: 3\n",
            "2:2",
            "expected `,` or `]`, found `:`",
            "separate items with `,`, close with `]`, quote text that contains `:`",
        ),
        (
            "a: {b: [1, 2}\n",
            "1:13",
            "expected `,` or `]`, found `}`",
            "separate items with `,`, close with `]`, quote text that contains `:`",
        ),
        (
            "a: {b: c d: e}\n",
            "1:11",
            "expected `,` or `}`, found `:`",
            "separate items with `,`, close with `}`, quote text that contains `:`",
        ),
        (
            "a: ['x' 'y']\n",
            "1:9",
            "expected `,` or `]`, found more text",
            "separate items with `,`, close with `]`, quote text that contains `:`",
        ),
        ("a: [1]]\n", "1:7", "`]` closes nothing", "delete it or open it before"),
        (
            "a: 'x' y\n",
            "1:8",
            "more text after the end of the value",
            "quote the whole value (inside single quotes a quote is written '')",
        ),
        ("a: 'x\nb: 1\n", "1:4", "quoted text is never closed", "close it with '"),
        ('a: "x\n', "1:4", "quoted text is never closed", 'close it with "'),
        (
            'a: "\\d"\n',
            "1:6",
            "unknown escape in double-quoted text",
            "write \\\\ for a backslash, or use 'single quotes'",
        ),
        ('a: "\\UFFFFFFFF"\n', "1:7", "not YAML from here on", "check the escapes"),
        ("a: @x\n", "1:4", "`@` cannot start a value", "quote the text"),
        ("a: `x`\n", "1:4", "a backtick cannot start a value", "quote the text"),
        ("a: %x\n", "1:4", "`%` cannot start a value", "quote the text"),
        ("a: ?\n", "1:4", "unexpected `?`", "quote the text"),
        ("a: - 1\n", "1:4", "a list cannot start here", "start it on a new line or use `[a, b]`"),
        ("a: [,]\n", "1:5", "expected a value, found `,`", "write a value here"),
        ("a: ]\n", "1:4", "expected a value, found `]`", "write a value here"),
        (
            "a: |x\n",
            "1:4",
            "malformed block text after `|` or `>`",
            "put the text on the lines below, all indented alike",
        ),
        (
            "a: 1\n... x\n",
            "2:5",
            "text after the end of the mapping",
            "one mapping holds the whole specification",
        ),
        (
            "{a: 1}\nb: 2\n",
            "2:1",
            "text after the end of the mapping",
            "one mapping holds the whole specification",
        ),
        ("a:\n\tb: 1\n", "2:1", "tab in the indentation", "indent with spaces"),
        ("a:\n  \tb: 1\n", "2:3", "tab in the indentation", "indent with spaces"),
        ("a:\tb\n", "1:3", "tab where a space belongs", "use spaces"),
    ],
)
def test_syntax_errors_in_words(source: str, place: str, message: str, help: str) -> None:
    (finding,) = errors(source)
    assert finding.span is not None
    assert (finding.code, finding.span.place) == ("KP105", f"x.yaml:{place}")
    assert (finding.message, finding.help) == (message, help)


def test_an_unclosed_bracket_shows_where_it_was_opened() -> None:
    (finding,) = errors("a: [1, 2\nb: 3\n")
    assert finding.related == (("`[` opened", Span("x.yaml", 1, 4, 1, 5)),)


def test_a_line_of_nothing_but_tabs_is_refused_too() -> None:
    assert lines("a: 1\n\t\nb: 2\n") == ["x.yaml:2:1: error[KP105]: tab where a space belongs"]


def test_encoding_and_hidden_characters() -> None:
    assert lines(b"a: 1\nb: \xff\n") == [
        "x.yaml:2:4: error[KP100]: not UTF-8: byte 0xff at offset 8 (line 2)"
    ]
    assert lines("a: 1\n".encode("utf-16")) == [
        "x.yaml:1:1: error[KP100]: not UTF-8: byte 0xff at offset 0 (line 1); "
        "this looks like UTF-16"
    ]
    assert lines("a: 1\nb: x\0\n") == ["x.yaml:2:5: error[KP100]: invisible character U+0000 (NUL)"]
    assert lines("a: \u202ex\n") == ["x.yaml:1:4: error[KP100]: invisible character U+202E"]
    assert lines("a: \x1b[1m\n") == ["x.yaml:1:4: error[KP100]: invisible character U+001B"]


def test_byte_order_mark_and_windows_line_ends_do_not_move_places() -> None:
    root = read_document("x.yaml", b"\xef\xbb\xbfa: 1\r\nb: {c: 2}\r\n")
    assert to_plain(root) == {"a": 1, "b": {"c": 2}}
    assert span_of(root, ("b", "c"), key=True) == Span("x.yaml", 2, 5, 2, 6)
    assert decode_source("x.yaml", "\ufeffa: 1\r\n") == "a: 1\n"


def test_size_limit_is_checked_before_parsing() -> None:
    assert lines(b"[" * (1 << 20) + b"[") == [
        "x.yaml:1:1: error[KP100]: the file has 1,048,577 bytes; "
        "the limit is 1,048,576 bytes (1 MiB)"
    ]


def test_read_source(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(SpecError) as caught:
            read_source(path)
        (finding,) = caught.value.diagnostics
        assert (finding.code, finding.span) == ("KP100", Span(path.as_posix(), 1, 1, 1, 1))
        return finding.message

    good, large = tmp_path / "good.yaml", tmp_path / "large.yaml"
    good.write_bytes(b"a: 1\n")
    large.write_bytes(b"#" * ((1 << 20) + 1))
    assert read_source(good) == b"a: 1\n"
    assert message(tmp_path / "none.yaml") == "no such file"
    assert message(tmp_path) == "not a regular file"
    assert message(large).startswith("the file has 1,048,577 bytes; the limit is")


def test_findings_of_a_hostile_file_are_bounded() -> None:
    found = errors("".join(f"k{index}: !x 1\n" for index in range(1000)))
    assert len(found) == 100


def test_long_names_are_cut_in_messages() -> None:
    assert errors(f"{'k' * 200}: 1\n{'k' * 200}: 1\n")[0].message == (
        f"duplicate key `{'k' * 57}...`: written on lines 1 and 2"
    )


TEXTS = st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), max_size=12)
DATA = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63), TEXTS),
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.dictionaries(TEXTS.filter(bool), children, max_size=4),
    ),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS.filter(bool), DATA, min_size=1, max_size=4))
def test_every_json_object_reads_as_itself(data: dict) -> None:
    assert to_plain(read_document("x.yaml", json.dumps(data))) == data
    assert to_plain(read_document("x.yaml", json.dumps(data, indent=2))) == data


WORDS = st.sampled_from(["a", "b", "c1", "- ", "{", "}", "[", "]", ": ", ":", ", ", "\n", "\n  ",
                         " ", "#x", "'", '"', "|\n", "? ", "1-8", "a*b", "\t", "x y"])  # fmt: skip


@given(st.lists(WORDS, max_size=24).map("".join))
def test_agrees_with_the_stock_loader_wherever_a_file_is_accepted(source: str) -> None:
    """The shortened scanner must not read anything differently; other texts are findings."""
    try:
        plain = to_plain(read_document("x.yaml", source))
    except SpecError as error:
        assert all(finding.message and finding.span for finding in error.diagnostics)
        return
    stock = YAML(typ="safe", pure=True)
    assert plain == stock.load(source)


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_any_input_is_a_mapping_or_findings(source: str | bytes) -> None:
    try:
        assert isinstance(read_document("x.yaml", source), Mapping)
    except SpecError as error:
        assert error.diagnostics
