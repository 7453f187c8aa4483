"""Positioned YAML: values, places, and one asserted sentence per refusal."""

from __future__ import annotations

import subprocess
import sys

import pydantic
import pytest

from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError, subspan
from kpipe.codegen.spec.document import (
    Mapping,
    RawFloat,
    RawInt,
    Scalar,
    find,
    read_document,
    span_of,
    to_plain,
)

SPEC = """\
# a comment
kpipe: 1
targets: [9.0, sm_100a]   # trailing
rows: {batches: "1-8, 16", queries: [1, 4]}

buffers:
  q_c:
    shape: [rows, heads*v_dim]
    sentinel: 0xFFFFFFFF
  4: {on: off}
stages:
- name: norm
  pdl: {trigger: early}
- wait
doc: |
  two
  lines
"""


def errors(source: str | bytes) -> tuple[Diagnostic, ...]:
    with pytest.raises(SpecError) as caught:
        read_document("x.yaml", source)
    return caught.value.diagnostics


def lines(source: str | bytes) -> list[str]:
    return str(SpecError(errors(source))).split("\n")


def value(text: str) -> object:
    node = find(read_document("x.yaml", f"a: {text}\n"), ("a",))
    assert isinstance(node, Scalar)
    return node.value


def test_plain_data() -> None:
    assert to_plain(read_document("x.yaml", SPEC)) == {
        "kpipe": 1,
        "targets": [9.0, "sm_100a"],
        "rows": {"batches": "1-8, 16", "queries": [1, 4]},
        "buffers": {
            "q_c": {"shape": ["rows", "heads*v_dim"], "sentinel": 0xFFFFFFFF},
            "4": {"on": "off"},
        },
        "stages": [{"name": "norm", "pdl": {"trigger": "early"}}, "wait"],
        "doc": "two\nlines\n",
    }


@pytest.mark.parametrize(
    ("loc", "key", "place", "text"),
    [
        (("kpipe",), False, (2, 8), "1"),
        (("kpipe",), True, (2, 1), "kpipe"),
        (("targets", 0), False, (3, 11), "9.0"),
        (("targets",), False, (3, 10), "[9.0, sm_100a]"),
        (("rows", "batches"), False, (4, 17), '"1-8, 16"'),
        (("rows", "queries", 1), False, (4, 41), "4"),
        (("buffers", "q_c", "shape", 1), False, (8, 19), "heads*v_dim"),
        (("buffers", "4", "on"), True, (10, 7), "on"),
        (("buffers", 4), True, (10, 3), "4"),
        (("stages", 0, "pdl", "trigger"), False, (13, 18), "early"),
        (("stages", 1), False, (14, 3), "wait"),
        (("stages", 1), True, (14, 3), "wait"),
        (("kpipe", "deeper", 3), False, (2, 8), "1"),
        (("kpipe", "deeper", 3), True, (2, 8), "1"),
        (("rows", "batches", "[key]"), False, (4, 8), "batches"),
        (("targets", 7), False, (3, 10), "[9.0, sm_100a]"),
    ],
)
def test_places(loc: tuple, key: bool, place: tuple[int, int], text: str) -> None:
    span = span_of(read_document("x.yaml", SPEC), loc, key=key)
    assert (span.line, span.column) == place
    assert span.end_line == span.line
    assert SPEC.split("\n")[span.line - 1][span.column - 1 : span.end_column - 1] == text


def test_block_collections_end_with_their_last_child() -> None:
    root = read_document("x.yaml", SPEC)
    assert span_of(root, ("buffers",)) == Span("x.yaml", 7, 3, 10, 15)
    assert span_of(root, ("stages",)) == Span("x.yaml", 12, 1, 14, 7)
    assert span_of(root, ("no such key",)) == root.span


def test_find() -> None:
    root = read_document("x.yaml", SPEC)
    assert find(root, ()) is root
    node = find(root, ("stages", 0, "name"))
    assert isinstance(node, Scalar)
    assert (node.value, node.raw, node.quoted) == ("norm", "norm", False)
    assert find(root, ("stages", 0, "nope")) is None
    assert find(root, ("stages", -1)) is None
    assert find(root, ("kpipe", "deeper")) is None
    assert isinstance(root, Mapping)
    assert root.entry("nope") is None


def test_a_quoted_scalar_can_be_cut_into_parts() -> None:
    node = find(read_document("x.yaml", SPEC), ("rows", "batches"))
    assert isinstance(node, Scalar)
    part = subspan(node.span, node.raw, 5, 2)
    assert SPEC.split("\n")[part.line - 1][part.column - 1 : part.end_column - 1] == "16"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("false", False),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("'off'", "off"),
        ("12", 12),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        ("0o12", 10),
        ("0x1F", 31),
        ("18446744073709551615", 2**64 - 1),
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-0.5e+3", -500.0),
        ("9.0", 9.0),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("1-8", "1-8"),
        ("9-", "9-"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("e5", "e5"),
        (".", "."),
        ("1.2.3", "1.2.3"),
        ('"12"', "12"),
        ("'012'", "012"),
        ('"a\\n\\u00e9"', "a\né"),
        ("'it''s'", "it's"),
        ("heads*v_dim", "heads*v_dim"),
        ("a#b", "a#b"),
        ("http://x/y", "http://x/y"),
    ],
)
def test_scalars(text: str, expected: object) -> None:
    found = value(text)
    assert type(found) is type(expected)
    assert found == expected


@pytest.mark.parametrize(
    ("text", "message", "help"),
    [
        ("012", "`012`: an integer does not start with 0", "write 12 or 0o12"),
        ("089", "`089`: an integer does not start with 0", "write 89"),
        ("-012", "`-012`: an integer does not start with 0", "write -12"),
        ("00", "`00`: an integer does not start with 0", "write 0 or 0o0"),
        (
            ".inf",
            "`.inf` is refused: numbers are finite",
            'write a finite number, or ".inf" if the text is meant',
        ),
        (
            ".nan",
            "`.nan` is refused: numbers are finite",
            'write a finite number, or ".nan" if the text is meant',
        ),
        ("1e400", "`1e400` is too large for a 64-bit float", "write a smaller number"),
        (
            "18446744073709551616",
            "`18446744073709551616` does not fit into 64 bits",
            "write a smaller number, or quote it",
        ),
        (
            "9" * 5000,
            f"`{'9' * 21}...` does not fit into 64 bits",
            "write a smaller number, or quote it",
        ),
        (
            "True",
            "`True` is not how true is spelled",
            'write true, or "True" if the text is meant',
        ),
        (
            "NULL",
            "`NULL` is not how null is spelled",
            'write null, or "NULL" if the text is meant',
        ),
        (
            '"\\x1b[31m"',
            "escape for the invisible character U+001B",
            "delete it",
        ),
    ],
)
def test_refused_scalars(text: str, message: str, help: str) -> None:
    width = min(len(text), 5000)
    span = Span("x.yaml", 1, 4, 1, 4 + width)
    assert errors(f"a: {text}\n") == (Diagnostic("KP107", message, span, help=help),)


def test_numbers_remember_their_spelling_and_pydantic_takes_them() -> None:
    plain = to_plain(read_document("x.yaml", "a: [9.0, 0x10, 1e-5, true]\n"))["a"]
    assert [type(item) for item in plain] == [RawFloat, RawInt, RawFloat, bool]
    assert [item.raw for item in plain[:3]] == ["9.0", "0x10", "1e-5"]
    for strict in (True, False):
        assert pydantic.TypeAdapter(float).validate_python(plain[0], strict=strict) == 9.0
        assert pydantic.TypeAdapter(int).validate_python(plain[1], strict=strict) == 16
        with pytest.raises(pydantic.ValidationError):
            pydantic.TypeAdapter(str).validate_python(plain[1], strict=strict)


def test_keys_are_text_as_written() -> None:
    source = "4: a\non: b\n1-8: c\n'9-': d\ntrue: e\n012: f\n~: g\n1.50: h\n"
    assert list(to_plain(read_document("x.yaml", source))) == [
        "4",
        "on",
        "1-8",
        "9-",
        "true",
        "012",
        "~",
        "1.50",
    ]


def test_all_duplicates_are_reported_with_both_lines() -> None:
    found = errors("rows: 8\na: {x: 1, x: 2}\nrows: 16\nrows: 32\n")
    assert found == (
        Diagnostic(
            "KP106",
            "duplicate key `x`: written twice on line 2",
            Span("x.yaml", 2, 11, 2, 12),
            help="keep one of the two",
            related=(("first", Span("x.yaml", 2, 5, 2, 6)),),
        ),
        Diagnostic(
            "KP106",
            "duplicate key `rows`: written on lines 1 and 3",
            Span("x.yaml", 3, 1, 3, 5),
            help="keep one of the two",
            related=(("first", Span("x.yaml", 1, 1, 1, 5)),),
        ),
        Diagnostic(
            "KP106",
            "duplicate key `rows`: written on lines 1 and 4",
            Span("x.yaml", 4, 1, 4, 5),
            help="keep one of the two",
            related=(("first", Span("x.yaml", 1, 1, 1, 5)),),
        ),
    )


def test_quoting_does_not_hide_a_duplicate() -> None:
    assert lines("a: 1\n'a': 2\n") == [
        "x.yaml:2:1: error[KP106]: duplicate key `a`: written on lines 1 and 2"
    ]


def test_what_is_not_part_of_the_language_is_collected_in_one_run() -> None:
    source = (
        "base: &base {x: 1}\n"
        "use: *base\n"
        "more:\n"
        "  <<: *base\n"
        "bad: !!python/object/apply:os.system ['true']\n"
        "own: !x 1\n"
        "undefined: !e!x 1\n"
        "base: 012\n"
    )
    assert lines(source) == [
        "x.yaml:1:7: error[KP107]: anchor `&base`: "
        "anchors and aliases are not part of the language",
        "x.yaml:2:6: error[KP107]: alias `*base`: anchors and aliases are not part of the language",
        "x.yaml:4:3: error[KP107]: merge key `<<` is not part of the language",
        "x.yaml:4:7: error[KP107]: alias `*base`: anchors and aliases are not part of the language",
        "x.yaml:5:6: error[KP107]: tag `!!python/object/apply:os.system`: "
        "tags are refused: a spec is data",
        "x.yaml:6:6: error[KP107]: tag `!x`: tags are refused: a spec is data",
        "x.yaml:7:12: error[KP107]: tag `!e!x`: tags are refused: a spec is data",
        "x.yaml:8:1: error[KP106]: duplicate key `base`: written on lines 1 and 8",
        "x.yaml:8:7: error[KP107]: `012`: an integer does not start with 0",
    ]
    helps = {finding.message.split(" ")[0]: finding.help for finding in errors(source)}
    assert helps["anchor"] == "to share settings use `extends`; if the text is meant, quote it"
    assert helps["merge"] == "to share settings use `extends`"
    assert helps["tag"] == "delete the tag; if the text is meant, quote it"


def test_findings_before_a_syntax_error_are_kept() -> None:
    assert lines("a: !x 1\na: 2\nb: [1\n") == [
        "x.yaml:1:4: error[KP107]: tag `!x`: tags are refused: a spec is data",
        "x.yaml:2:1: error[KP106]: duplicate key `a`: written on lines 1 and 2",
        "x.yaml:3:4: error[KP105]: `[` is never closed",
    ]


@pytest.mark.parametrize(
    ("source", "place", "found"),
    [
        ("- a\n- b\n", "1:1", "a list"),
        ("hello\n", "1:1", "a string"),
        ("12\n", "1:1", "a number"),
        ("true\n", "1:1", "a boolean"),
        ("", "1:1", "nothing"),
        ("# only a comment\n", "1:1", "nothing"),
        ("---\n", "1:1", "nothing"),
        ("~\n", "1:1", "nothing"),
        ("a: 1\n---\nb: 2\n", "2:1", "2 documents"),
        ("a: 1\n---\nb: 2\n---\n---\n", "2:1", "4 documents"),
        ("a: 1\n...\nb: 1\n", "3:1", "2 documents"),
    ],
)
def test_root_is_one_mapping(source: str, place: str, found: str) -> None:
    assert lines(source) == [f"x.yaml:{place}: error[KP107]: expected one mapping, got {found}"]


def test_a_document_start_line_is_fine() -> None:
    assert to_plain(read_document("x.yaml", "---\na: 1\n...\n")) == {"a": 1}


@pytest.mark.parametrize(
    ("source", "place", "message", "help"),
    [
        (
            "%YAML 1.1\n---\na: 1\n",
            "1:1",
            "directive `%YAML 1.1` is not part of the language",
            "delete the line; if the text is meant, quote it",
        ),
        ("[1, 2]: x\n", "1:1", "a list cannot be a key", "quote it if the text is meant"),
        ("? {a: 1}\n: x\n", "1:3", "a mapping cannot be a key", "quote it if the text is meant"),
        (": x\n", "1:1", "empty key", "write a name before the colon"),
        ("a: " + "[" * 40 + "]" * 40, "1:43", "nested deeper than 40 levels", "flatten the spec"),
    ],
)
def test_other_refusals(source: str, place: str, message: str, help: str) -> None:
    finding = errors(source)[0]
    assert finding.span is not None
    assert (finding.code, finding.span.place) == ("KP107", f"x.yaml:{place}")
    assert (finding.message, finding.help) == (message, help)


def test_siblings_do_not_count_as_depth() -> None:
    items = ", ".join(["[1]"] * 100)
    assert to_plain(read_document("x.yaml", f"a: [{items}]\n")) == {"a": [[1]] * 100}


def test_importing_the_reader_does_not_import_ruamel() -> None:
    code = (
        "import sys, kpipe.codegen.spec.document, kpipe.codegen.diagnostics;"
        "sys.exit(any(name.startswith(('ruamel', 'difflib', 'json')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_depth_limit_is_exact_and_hostile_depth_is_cheap() -> None:
    read_document("x.yaml", "a: " + "[" * 39 + "]" * 39)
    assert len(errors("a: " + "[" * 500_000)) == 1
