"""Findings about a specification: what is wrong, where, and what to write instead.

Everything here is pure and plain text. Text that came from a specification is treated as
hostile: control characters never reach the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note"]

TEXT_WIDTH = 120  # characters per excerpt line, gutter included
ALLOWED_CAP = 12  # values listed after "allowed:"
REPAIRS_CAP = 3  # repairs shown of one finding
TAB_WIDTH = 4
ELLIPSIS = "..."
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\u202a-\u202e\u2066-\u2069]"
)


@dataclass(frozen=True)
class Span:
    """A stretch of a source file.

    Lines and columns count from 1 in code points; the end is exclusive (a one-character span has
    `end_column == column + 1`). `path` is what the user typed, with forward slashes.
    """

    path: str
    line: int
    column: int
    end_line: int
    end_column: int

    @property
    def place(self) -> str:
        """`path:line:column`, the form that editors turn into a link."""
        return f"{self.path}:{self.line}:{self.column}"


def subspan(span: Span, text: str, offset: int, length: int) -> Span:
    """The part `text[offset:offset + length]` of the scalar `text` written at `span`.

    Exact for plain and for quoted scalars without escapes, which is decided by comparing widths;
    for anything else (several lines, escapes) the whole span is returned. The result covers at
    least one column.
    """
    extra = span.end_column - span.column - len(text)
    if span.line != span.end_line or extra not in (0, 2):
        return span
    column = span.column + extra // 2 + offset
    return Span(span.path, span.line, column, span.line, column + max(length, 1))


@dataclass(frozen=True)
class Edit:
    """`text` in place of what stands at `span`; a span of zero width is an insertion.

    A line feed in `text` becomes the line end of the file.
    """

    span: Span
    text: str


@dataclass(frozen=True)
class Repair:
    """One way out of a finding, tried out: with these edits it is gone, and no other is there.

    `cost` is what the predicted time of a layer changes by, in microseconds, over the schedule as
    written or, where that has no plan, over the first repair; None where nothing was predicted.
    `basis` says which of the two, and at which rows.  A `claim` says something about the engine
    that only its author knows: it is never applied unasked.
    """

    text: str
    edits: tuple[Edit, ...]
    cost: float | None = None
    basis: str = ""
    claim: bool = False


@dataclass(frozen=True)
class Diagnostic:
    """One finding. Sorts by (path, line, column, code); findings without a place come first.

    `message` is one sentence without a full stop, `allowed` the values that would have been
    accepted, `help` the repair, `related` other places with their role ("first", "opened here"),
    `story` lines that show how it comes about, step by step.  `fix` are the edits of the repair
    where it is plain text; two findings that differ only in it are the same finding.  `rests` are
    the rule and the measured rows behind it, `repairs` what was tried out, the best first.
    """

    code: str
    message: str
    span: Span | None
    severity: Severity = "error"
    allowed: tuple[str, ...] = ()
    help: str = ""
    related: tuple[tuple[str, Span], ...] = ()
    story: tuple[str, ...] = ()
    fix: tuple[Edit, ...] = field(default=(), compare=False)
    rests: tuple[str, ...] = field(default=(), compare=False)
    repairs: tuple[Repair, ...] = field(default=(), compare=False)

    @property
    def sort_key(self) -> tuple[str, int, int, str, str]:
        """Key that orders findings by place, then code; the message breaks ties."""
        if self.span is None:
            return ("", 0, 0, self.code, self.message)
        return (self.span.path, self.span.line, self.span.column, self.code, self.message)

    def __lt__(self, other: Diagnostic) -> bool:
        return self.sort_key < other.sort_key


class SpecError(Exception):
    """A specification cannot be used; carries every finding of the run.

    `diagnostics` is sorted by place and free of duplicates. Raises ValueError when built without
    any finding, because an error that says nothing helps nobody.
    """

    diagnostics: tuple[Diagnostic, ...]

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(dict.fromkeys(diagnostics)))
        if not self.diagnostics:
            raise ValueError("SpecError needs at least one diagnostic")
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        return render_concise(self.diagnostics).rstrip("\n")


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """The candidate that `word` most likely stands for, or "" when none is close.

    A candidate that differs only in case or in `-` against `_` wins; otherwise the closest by
    difflib's ratio (0.6 and up). Deterministic: ties go to the alphabetically first.
    """
    ordered = sorted(set(candidates) - {word})
    if not word or len(word) > 80:
        return ""

    def folded(text: str) -> str:
        return text.casefold().replace("-", "_")

    for candidate in ordered:
        if folded(candidate) == folded(word):
            return candidate
    from difflib import SequenceMatcher  # lazily: only a failing run pays for it

    best, best_ratio = "", 0.0
    for candidate in ordered:
        ratio = SequenceMatcher(None, folded(candidate), folded(word)).ratio()
        if ratio >= 0.6 and ratio > best_ratio:
            best, best_ratio = candidate, ratio
    return best


def render_text(diagnostics: Iterable[Diagnostic], sources: Mapping[str, str]) -> str:
    """Findings with source excerpts, in the given order, separated by blank lines.

    The first line of each is `path:line:column: error[CODE]: message`. `sources` maps a span's
    path to the file's text; a finding whose source is absent is printed without the excerpt.
    Empty input gives "".
    """
    blocks = []
    lines_of: dict[str, list[str]] = {}
    for diagnostic in diagnostics:
        block = [_headline(diagnostic)]
        span = diagnostic.span
        if span is not None and span.path in sources:
            if span.path not in lines_of:
                text = sources[span.path].removeprefix("\ufeff")
                lines_of[span.path] = re.split("\r\n|\r|\n", text)
            block += _excerpt(span, lines_of[span.path])
        block += _footer(diagnostic)
        blocks.append("\n".join(block) + "\n")
    return "\n".join(blocks)


def render_concise(diagnostics: Iterable[Diagnostic]) -> str:
    """One line per finding: `path:line:column: error[CODE]: message`."""
    return "".join(_headline(diagnostic) + "\n" for diagnostic in diagnostics)


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """A JSON list with one object per finding, for tools.

    Keys: code, severity, message, span (null or path/line/column/end_line/end_column), allowed,
    help, related (role and span). Text is not shortened; JSON escapes control characters.
    """
    import json

    return json.dumps([_as_dict(diagnostic) for diagnostic in diagnostics], indent=2) + "\n"


def render_github(diagnostics: Iterable[Diagnostic]) -> str:
    """GitHub workflow commands, one line per finding, that annotate the changed files.

    A finding over several lines has an `endLine`, and no columns, which GitHub then refuses.
    """
    commands = {"error": "error", "warning": "warning", "note": "notice"}
    lines = []
    for diagnostic in diagnostics:
        properties = []
        span = diagnostic.span
        if span is not None:
            properties += [("file", span.path), ("line", span.line)]
            if span.end_line == span.line:
                properties += [("col", span.column), ("endColumn", span.end_column)]
            else:
                properties.append(("endLine", span.end_line))
        properties.append(("title", diagnostic.code))
        listed = ",".join(f"{name}={_github_property(str(value))}" for name, value in properties)
        help = f"\n{diagnostic.help}" if diagnostic.help else ""
        told = f"{diagnostic.message}{help}\nkpipe explain {diagnostic.code}"
        message = _github_message(told)
        lines.append(f"::{commands[diagnostic.severity]} {listed}::{message}\n")
    return "".join(lines)


def count_line(diagnostics: Iterable[Diagnostic]) -> str:
    """How many findings of each severity: "3 errors, 1 warning"; "no findings" for none."""
    severities = [diagnostic.severity for diagnostic in diagnostics]
    parts = []
    for severity in ("error", "warning", "note"):
        count = severities.count(severity)
        if count:
            parts.append(f"{count} {severity}{'' if count == 1 else 's'}")
    return ", ".join(parts) or "no findings"


def printable(text: str) -> str:
    """`text` on one line with control and direction characters spelled as `\\x1b` or `\\u2028`.

    A specification may come from a stranger: no escape sequence may reach the terminal, and a
    finding stays one line for grep.
    """

    def spelled(match: re.Match[str]) -> str:
        character = match[0]
        if character in "\n\r\t":
            return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
        number = ord(character)
        return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"

    return _CONTROL.sub(spelled, text)


def _headline(diagnostic: Diagnostic) -> str:
    place = "" if diagnostic.span is None else printable(diagnostic.span.place) + ": "
    return f"{place}{diagnostic.severity}[{diagnostic.code}]: {printable(diagnostic.message)}"


def _footer(diagnostic: Diagnostic) -> list[str]:
    lines = []
    if diagnostic.allowed:
        shown = ", ".join(diagnostic.allowed[:ALLOWED_CAP])
        hidden = len(diagnostic.allowed) - ALLOWED_CAP
        more = f" and {hidden} more" if hidden > 0 else ""
        lines.append(f"   = allowed: {printable(shown)}{more}")
    if diagnostic.help and not diagnostic.repairs:
        lines.append(f"   = help: {printable(diagnostic.help)}")
    shown = diagnostic.repairs[:REPAIRS_CAP]
    for number, repair in enumerate(shown, 1):
        cost = "" if repair.cost is None else f" ({round(repair.cost, 1) + 0.0:+.1f} us)"
        lines.append(f"   = repair {number}{cost}: {printable(repair.text)}")
    for basis in dict.fromkeys(repair.basis for repair in shown if repair.basis):
        lines.append(f"   = cost: {printable(basis)}")
    lines += [f"   = rests on: {printable(line)}" for line in diagnostic.rests]
    for role, span in diagnostic.related:
        lines.append(f"   = note: {printable(role)}: {printable(span.place)}")
    lines += [f"   | {printable(line)}".rstrip() for line in diagnostic.story]
    lines.append(f"   = explain: kpipe explain {diagnostic.code}")
    return lines


def _excerpt(span: Span, lines: list[str]) -> list[str]:
    """The offending line, the one before when it gives context, and a caret underline."""
    if not 1 <= span.line <= len(lines):
        return []
    gutter = max(len(str(span.line)), 3)
    room = TEXT_WIDTH - gutter - 3
    text = lines[span.line - 1]
    last = span.end_column if span.end_line == span.line else len(text) + 1
    left = _display(text[: span.column - 1])
    marked = _display(text[: max(last, span.column + 1) - 1])[len(left) :]
    shown, start = _window(_display(text), len(left), room)
    before_caret = _cells(shown[: len(left) - start])
    carets = min(max(_cells(marked), 1), room - before_caret)
    excerpt = []
    before = lines[span.line - 2] if span.line > 1 else ""
    if before.strip() and not before.lstrip().startswith("#"):
        previous, _ = _window(_display(before), 0, room)
        if start == 0:
            excerpt.append(f"{span.line - 1:>{gutter}} | {previous}")
    excerpt.append(f"{span.line:>{gutter}} | {shown}")
    excerpt.append(f"{'':>{gutter}} | {' ' * before_caret}{'^' * carets}")
    return excerpt


def _display(text: str) -> str:
    """`text` with tabs expanded and every other control character shown as `?`."""
    expanded = text.expandtabs(TAB_WIDTH) if "\t" in text else text
    return _CONTROL.sub("?", expanded)


def _window(text: str, caret: int, room: int) -> tuple[str, int]:
    """A part of `text` at most `room` wide that shows index `caret`, and its shift.

    `shown[i]` stands for `text[i + shift]` except inside an ellipsis.
    """
    if _cells(text) <= room:
        return text, 0
    if _cells(text) != len(text):
        room //= 2  # wide characters take two cells; half the characters always fit
    start = 0 if caret < room - 20 else caret - room // 2
    shown = text[start : start + room]
    if start + room < len(text):
        shown = shown[: -len(ELLIPSIS)] + ELLIPSIS
    if start:
        shown = ELLIPSIS + shown[len(ELLIPSIS) :]
    return shown, start


def _cells(text: str) -> int:
    """Terminal columns that `text` takes: wide characters two, combining marks none."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(
        0 if combining(character) else 2 if east_asian_width(character) in "WF" else 1
        for character in text
    )


def _github_message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _github_property(text: str) -> str:
    return _github_message(text).replace(":", "%3A").replace(",", "%2C")


def _span_dict(span: Span | None) -> dict[str, object] | None:
    if span is None:
        return None
    return {
        "path": span.path,
        "line": span.line,
        "column": span.column,
        "end_line": span.end_line,
        "end_column": span.end_column,
    }


def _as_dict(diagnostic: Diagnostic) -> dict[str, object]:
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "message": diagnostic.message,
        "span": _span_dict(diagnostic.span),
        "allowed": list(diagnostic.allowed),
        "help": diagnostic.help,
        "related": [
            {"role": role, "span": _span_dict(place)} for role, place in diagnostic.related
        ],
        "story": list(diagnostic.story),
        "rests": list(diagnostic.rests),
        "repairs": [
            {
                "text": repair.text,
                "cost_us": None if repair.cost is None else round(repair.cost, 3),
                "basis": repair.basis,
                "claim": repair.claim,
                "edits": [
                    {"span": _span_dict(edit.span), "text": edit.text} for edit in repair.edits
                ],
            }
            for repair in diagnostic.repairs
        ],
    }
