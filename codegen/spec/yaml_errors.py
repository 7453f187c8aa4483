"""Errors of the YAML scanner and parser as sentences for a reader of the file."""

from __future__ import annotations

import re
from typing import Any

from kpipe.codegen.diagnostics import Diagnostic, Span

SYNTAX = "KP105"


class Mark:
    """A place in the text, counted from 0; what ruamel calls a mark."""

    __slots__ = ("column", "index", "line")

    def __init__(self, index: int, line: int, column: int) -> None:
        self.index, self.line, self.column = index, line, column


def short(text: str) -> str:
    """Text from the file as a message shows it: quoted, and cut when it is long."""
    return f"`{text}`" if len(text) <= 60 else f"`{text[:57]}...`"


def syntax(message: str, span: Span, help: str = "", related: Any = ()) -> Diagnostic:
    """A finding about the YAML itself."""
    return Diagnostic(SYNTAX, message, span, help=help, related=related)


def translate(parser: Any, error: Any) -> Diagnostic:
    """A scanner or parser error as one sentence that a reader of the file understands."""
    problem, context = error.problem or error.context or "", error.context or ""
    mark = error.problem_mark or error.context_mark or parser.get_mark()
    opened = error.context_mark or mark
    place, quote = parser.span(mark), "quote the text"
    if problem.startswith("mapping values"):
        return _misplaced_colon(parser, mark)
    if "could not find expected ':'" in problem:
        line = parser.text.split("\n")[opened.line].rstrip()
        place = parser.span(opened, Mark(0, opened.line, max(len(line), opened.column + 1)))
        repair = "write a space after the colon, and the value behind it or indented below"
        return syntax("expected `key: value`", place, repair)
    if problem.startswith("sequence entries"):
        return syntax("a list cannot start here", place, "start it on a new line or use `[a, b]`")
    if "cannot start any token" in problem:
        character = parser.peek()
        if character == "\t":
            return syntax("tab where a space belongs", place, "use spaces")
        shown = "a backtick" if character == "`" else f"`{character}`"
        return syntax(f"{shown} cannot start a value", place, quote)
    if context == "while scanning a quoted scalar":
        ending = f"close it with {parser.buffer[opened.index]}"
        return syntax("quoted text is never closed", parser.span(opened), ending)
    if context == "while scanning a double-quoted scalar":
        repair = "write \\\\ for a backslash, or use 'single quotes'"
        return syntax("unknown escape in double-quoted text", place, repair)
    if context == "while scanning a block scalar":
        repair = "put the text on the lines below, all indented alike"
        return syntax("malformed block text after `|` or `>`", parser.span(opened), repair)
    if context.startswith("while parsing a flow") and problem.startswith("expected ','"):
        return _open_bracket(parser, problem, opened, mark)
    if problem.startswith("expected the node content"):
        if parser.flow_context and "<stream end>" in problem:
            opened, expected = parser.marks[-1], "']'" if parser.flow_context[-1] == "[" else ""
            return _open_bracket(parser, expected + "<stream end>", opened, mark)
        return syntax(f"expected a value, found {_token(problem)}", place, "write a value here")
    if problem.startswith("expected <block end>"):
        return _misaligned(parser, problem, context, opened, mark)
    if "document start" in problem or "document end" in problem:
        repair = "one mapping holds the whole specification"
        return syntax("text after the end of the mapping", place, repair)
    return syntax(f"unexpected `{parser.buffer[mark.index]}`", place, quote)


def _misplaced_colon(parser: Any, colon: Mark) -> Diagnostic:
    """Two pairs on one line, or a line that YAML takes for the rest of the one above."""
    lines = parser.text.split("\n")
    before = lines[colon.line][: colon.column]
    if re.search(r":(\s|$)", before) or not before.strip():
        repair = "quote the text if the colon belongs to it, or write `{key: value}`"
        return syntax("a second `:` in one value", parser.span(colon), repair)
    start = len(before) - len(before.lstrip())
    above = next(row for row in range(colon.line - 1, -1, -1) if lines[row].strip())
    message = f"{short(before.strip())} reads as a continuation of line {above + 1}"
    repair = f"align it with its siblings; line {above + 1} needs a colon and a space after its key"
    if re.search(r":(\s|$)", lines[above]):
        repair = "align it with its siblings"
    place = parser.span(Mark(0, colon.line, start), colon)
    return syntax(message, place, repair)


def _open_bracket(parser: Any, problem: str, opened: Mark, mark: Mark) -> Diagnostic:
    bracket, closing = ("[", "]") if "']'" in problem else ("{", "}")
    if "<stream end>" in problem:
        message = f"`{bracket}` is never closed"
        return syntax(message, parser.span(opened), f"close it with `{closing}`")
    related = ((f"`{bracket}` opened", parser.span(opened)),)
    message = f"expected `,` or `{closing}`, found {_token(problem)}"
    repair = f"separate items with `,`, close with `{closing}`, quote text that contains `:`"
    return syntax(message, parser.span(mark), repair, related)


def _misaligned(parser: Any, problem: str, context: str, opened: Mark, mark: Mark) -> Diagnostic:
    place, found = parser.span(mark), _token(problem)
    if found in ("`]`", "`}`"):
        return syntax(f"{found} closes nothing", place, "delete it or open it before")
    if parser.text.split("\n")[mark.line][: mark.column].strip():
        repair = "quote the whole value (inside single quotes a quote is written '')"
        return syntax(f"{found} after the end of the value", place, repair)
    what = "mapping" if context.endswith("mapping") else "list"
    message = f"this line does not line up with the {what} that starts on line {opened.line + 1}"
    related = ((f"{what} starts", parser.span(opened)),)
    return syntax(message, place, "indent it like its siblings", related)


def _token(problem: str) -> str:
    """The token that a parser message names last, in words."""
    match = re.search(r"'([^']*)'[,)]*$", problem)
    name = match[1] if match else ""
    words = {
        "<scalar>": "more text",
        "<stream end>": "the end of the file",
        "<document end>": "the end of the document",
        "<document start>": "a new document",
        "<block mapping start>": "a mapping",
        "<block sequence start>": "a list",
    }
    return words.get(name, f"`{name}`")
