"""Findings: order, suggestions and the four renderings, text for text."""

from __future__ import annotations

import json
import pickle

import pytest

from kpipe.codegen.diagnostics import (
    Diagnostic,
    Span,
    SpecError,
    count_line,
    did_you_mean,
    printable,
    render_concise,
    render_github,
    render_json,
    render_text,
    subspan,
)

SOURCE = "stages:\n  norm:\n    pdl: {trigerr: early}\n"
PLACE = Span("a/x.yaml", 3, 11, 3, 18)


def at(line: int, column: int, width: int = 1, path: str = "x.yaml") -> Span:
    return Span(path, line, column, line, column + width)


def test_text_rendering_in_full() -> None:
    finding = Diagnostic(
        "KP101",
        "unknown key `trigerr` at stages.norm.pdl",
        PLACE,
        allowed=("trigger", "wait"),
        help="did you mean `trigger`?",
        related=(("table", Span("a/x.yaml", 1, 1, 1, 7)),),
    )
    assert render_text([finding], {"a/x.yaml": SOURCE}) == (
        "a/x.yaml:3:11: error[KP101]: unknown key `trigerr` at stages.norm.pdl\n"
        "  2 |   norm:\n"
        "  3 |     pdl: {trigerr: early}\n"
        "    |           ^^^^^^^\n"
        "   = allowed: trigger, wait\n"
        "   = help: did you mean `trigger`?\n"
        "   = note: table: a/x.yaml:1:1\n"
        "   = explain: kpipe explain KP101\n"
    )


def test_findings_are_separated_by_a_blank_line_and_may_lack_place_or_source() -> None:
    findings = [Diagnostic("KP1", "no place", None), Diagnostic("KP2", "no source", at(1, 1))]
    assert render_text(findings, {}) == (
        "error[KP1]: no place\n   = explain: kpipe explain KP1\n"
        "\nx.yaml:1:1: error[KP2]: no source\n   = explain: kpipe explain KP2\n"
    )
    assert render_text([], {}) == ""


def excerpt(source: str, span: Span) -> list[str]:
    return render_text([Diagnostic("KP1", "m", span)], {"x.yaml": source}).split("\n")[1:-2]


def test_the_line_before_is_left_out_when_it_is_blank_or_a_comment() -> None:
    assert excerpt("\na: 1\n", at(2, 4)) == ["  2 | a: 1", "    |    ^"]
    assert excerpt("# why\na: 1\n", at(2, 4)) == ["  2 | a: 1", "    |    ^"]


def test_tabs_are_expanded_and_the_caret_stays_below_its_text() -> None:
    assert excerpt("a:\tbc\td\n", at(1, 4, 2)) == ["  1 | a:  bc  d", "    |     ^^"]


def test_wide_characters_count_two_cells() -> None:
    assert excerpt("層: 値x\n", at(1, 4, 1)) == ["  1 | 層: 値x", "    |     ^^"]


def test_a_span_over_lines_underlines_the_rest_of_its_first_line() -> None:
    assert excerpt("a: [1,\n 2]\n", Span("x.yaml", 1, 4, 2, 4)) == ["  1 | a: [1,", "    |    ^^^"]


def test_an_empty_span_and_one_behind_the_file_still_render() -> None:
    assert excerpt("a:\n", Span("x.yaml", 1, 3, 1, 3)) == ["  1 | a:", "    |   ^"]
    assert excerpt("a:\n", at(9, 1)) == []


@pytest.mark.parametrize("column", [1, 60, 117, 150, 299, 300])
def test_long_lines_are_cut_to_120_with_the_caret_on_its_character(column: int) -> None:
    text = "".join(chr(ord("a") + index % 26) for index in range(300))
    shown, caret = excerpt(text + "\n", at(1, column))
    assert len(shown) <= 120
    assert "..." in shown
    assert shown[caret.index("^")] == text[column - 1]


def test_long_underline_is_cut_at_the_width() -> None:
    assert max(map(len, excerpt("x" * 300, at(1, 100, 200)))) <= 120


def test_crlf_and_byte_order_mark_do_not_shift_the_excerpt() -> None:
    assert excerpt("\ufeffa: 1\r\nb: 2\r\n", at(2, 1)) == ["  1 | a: 1", "  2 | b: 2", "    | ^"]


def test_terminal_escapes_of_a_hostile_file_do_not_reach_the_terminal() -> None:
    finding = Diagnostic("KP1", "bad `\x1b[31m\nnext`", at(1, 4), help="x\x07")
    assert render_text([finding], {"x.yaml": "a: \x1b[31m\n"}) == (
        "x.yaml:1:4: error[KP1]: bad `\\x1b[31m\\nnext`\n"
        "  1 | a: ?[31m\n"
        "    |    ^\n"
        "   = help: x\\x07\n"
        "   = explain: kpipe explain KP1\n"
    )
    assert printable("a\u202eb") == "a\\u202eb"


def test_allowed_values_are_capped_at_twelve() -> None:
    finding = Diagnostic("KP1", "m", None, allowed=tuple(f"v{index}" for index in range(15)))
    expected = ", ".join(f"v{index}" for index in range(12)) + " and 3 more"
    assert f"   = allowed: {expected}\n" in render_text([finding], {})


def test_concise_rendering_is_one_line_per_finding() -> None:
    findings = [Diagnostic("KP1", "a", at(1, 2)), Diagnostic("KP2", "b", None, "warning")]
    assert render_concise(findings) == "x.yaml:1:2: error[KP1]: a\nwarning[KP2]: b\n"


def test_json_rendering() -> None:
    related = (("first", at(3, 4)),)
    finding = Diagnostic("KP1", "m\n", at(1, 2), "note", ("a",), "h", related, ("step 1", "step 2"))
    assert json.loads(render_json([finding])) == [
        {
            "code": "KP1",
            "severity": "note",
            "message": "m\n",
            "span": {"path": "x.yaml", "line": 1, "column": 2, "end_line": 1, "end_column": 3},
            "allowed": ["a"],
            "help": "h",
            "related": [
                {
                    "role": "first",
                    "span": {
                        "path": "x.yaml",
                        "line": 3,
                        "column": 4,
                        "end_line": 3,
                        "end_column": 5,
                    },
                }
            ],
            "story": ["step 1", "step 2"],
            "rests": [],
            "repairs": [],
        }
    ]
    assert json.loads(render_json([Diagnostic("KP1", "m", None)]))[0]["span"] is None


def test_github_rendering_escapes_what_the_runner_would_read() -> None:
    findings = [
        Diagnostic("KP1", "50% of a:b,\nc", at(1, 2, 3, "a,b:c.yaml"), help="write d"),
        Diagnostic("KP2", "over lines", Span("x.yaml", 1, 2, 3, 4), "warning"),
        Diagnostic("KP3", "nowhere", None, "note"),
    ]
    assert render_github(findings) == (
        "::error file=a%2Cb%3Ac.yaml,line=1,col=2,endColumn=5,title=KP1::50%25 of a:b,%0Ac%0A"
        "write d%0Akpipe explain KP1\n"
        "::warning file=x.yaml,line=1,endLine=3,title=KP2::over lines%0Akpipe explain KP2\n"
        "::notice title=KP3::nowhere%0Akpipe explain KP3\n"
    )


def test_count_line() -> None:
    error, warning = Diagnostic("KP1", "m", None), Diagnostic("KP1", "m", None, "warning")
    note = Diagnostic("KP1", "m", None, "note")
    assert count_line([error, warning, error, error]) == "3 errors, 1 warning"
    assert count_line([error, note, note]) == "1 error, 2 notes"
    assert count_line([]) == "no findings"


def test_spec_error_sorts_and_drops_duplicates() -> None:
    findings = [
        Diagnostic("KP9", "m", at(2, 10)),
        Diagnostic("KP1", "m", at(2, 9)),
        Diagnostic("KP1", "m", at(2, 10)),
        Diagnostic("KP9", "m", at(2, 10)),
        Diagnostic("KP5", "m", at(1, 1, path="y.yaml")),
        Diagnostic("KP7", "m", None),
    ]
    error = SpecError(findings)
    order = [(d.code, d.span.place if d.span else "") for d in error.diagnostics]
    assert order == [
        ("KP7", ""),
        ("KP1", "x.yaml:2:9"),
        ("KP1", "x.yaml:2:10"),
        ("KP9", "x.yaml:2:10"),
        ("KP5", "y.yaml:1:1"),
    ]
    assert str(SpecError(findings[:1])) == "x.yaml:2:10: error[KP9]: m"
    assert pickle.loads(pickle.dumps(error)).diagnostics == error.diagnostics


def test_spec_error_without_findings_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one diagnostic"):
        SpecError([])


@pytest.mark.parametrize(
    ("word", "candidates", "expected"),
    [
        ("trigerr", ["wait", "trigger", "tile"], "trigger"),
        ("Trigger", ["trigger", "triggers"], "trigger"),
        ("top-k", ["top_q", "top_k"], "top_k"),
        ("xyz", ["trigger", "wait"], ""),
        ("", ["a"], ""),
        ("ab", ["ac", "bb"], ""),
        ("modes", ["modes"], ""),
        ("mode", ["models", "modes"], "modes"),
        ("z" * 81, ["z" * 80], ""),
    ],
)
def test_did_you_mean(word: str, candidates: list[str], expected: str) -> None:
    assert did_you_mean(word, candidates) == expected


def test_subspan_of_plain_quoted_and_escaped_scalars() -> None:
    assert subspan(at(3, 5, 7), "1-8:pdl", 3, 1) == at(3, 8, 1)
    assert subspan(at(3, 5, 9), "1-8:pdl", 3, 4) == at(3, 9, 4)
    assert subspan(at(3, 5, 12), "1-8:pdl", 3, 1) == at(3, 5, 12)
    assert subspan(at(3, 5, 2), "", 0, 0) == at(3, 6, 1)
    several = Span("x.yaml", 1, 1, 2, 8)
    assert subspan(several, "1-8:pdl", 3, 1) == several
