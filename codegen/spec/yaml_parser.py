"""Text -> nodes: ruamel's scanner and parser behind our reader, and the builder of the tree.

Neither ruamel's composer nor its constructors run, so nothing in a file can create an object.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError
from kpipe.codegen.spec.document import HIDDEN, Entry, Mapping, Node, Scalar, Sequence
from kpipe.codegen.spec.yaml_errors import Mark, short, syntax, translate
from kpipe.codegen.spec.yaml_scalars import plain_value

DEPTH_LIMIT = 40  # nested collections
FINDING_LIMIT = 100  # a hostile file must not produce megabytes of findings

DUPLICATE, FOREIGN = "KP106", "KP107"


@lru_cache(maxsize=32)  # specs share a geometry, trials of a repair all but one file
def parse_document(name: str, text: str) -> Mapping:
    """The root mapping of a text that `decode_source` has passed; equal texts are parsed once.

    Raises SpecError with all findings: KP105 (syntax), KP106 (duplicate keys), KP107 (not part
    of the language).
    """
    parser = _parser_class()(name, text)
    root: Node | None = None
    try:
        root = _Builder(parser).document()
    except _Stop:
        pass
    except _yaml_error() as error:
        parser.findings.append(translate(parser, error))
    except (ValueError, OverflowError, IndexError, AssertionError):
        # The scanner has a few unguarded conversions (an escape such as \UFFFFFFFF).
        place = parser.span(parser.get_mark())
        parser.findings.append(syntax("not YAML from here on", place, "check the escapes"))
    if parser.findings:
        raise SpecError(parser.findings)
    assert isinstance(root, Mapping)
    return root


# --- scanner and parser -------------------------------------------------------------------------


class _Stop(Exception):
    """Reading cannot go on; the findings say why."""


class _Reader:
    """What `ruamel`'s scanner and parser need, over a text that is already in memory.

    Stands in front of both in the method order. It replaces the character reader, collects tags,
    anchors and aliases instead of interpreting them, and shortens the hottest paths (words
    followed by an indicator), which halves the time of a file.
    """

    # The scanner looks these up on every step; in ruamel they are properties.
    reader = scanner = resolver = None
    scanner_processing_version = processing_version = (1, 2)
    _flow_word = re.compile(r"[^\0\s,:?\[\]{}#]+(?=[,\]}]|:[ \n])")
    _block_word = re.compile(r"[^\0\s:#]+(?=:[ \n])")
    _flow_blank = re.compile(r"(?:[ \t]*+(?:#[^\n\0]*+)?\n)*[ \t]*(?:#[^\n\0]*)?")
    _block_blank = re.compile(r"(?: *+(?:#[^\n\0]*+)?\n)* *(?:#[^\n\0]*)?")
    _property = re.compile(r"[^\0\s,\[\]{}]+")

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.buffer = text + "\0" * 8  # the scanner looks a few characters ahead
        self.pointer = self.index = self.line = self.column = 0
        self.encoding = self.stream = None
        self.findings: list[Diagnostic] = []
        self.reader = self.scanner = self.resolver = self
        super().__init__(None)
        self.reset_parser()

    def peek(self, index: int = 0) -> str:
        return self.buffer[self.pointer + index]

    def prefix(self, length: int = 1) -> str:
        return self.buffer[self.pointer : self.pointer + length]

    def forward(self, length: int = 1) -> None:
        start, end = self.pointer, self.pointer + length
        lines = self.buffer.count("\n", start, end)
        self.pointer = self.index = end
        if lines:
            self.line += lines
            self.column = end - self.buffer.rfind("\n", start, end) - 1
        else:
            self.column += length

    def get_mark(self) -> Mark:
        return Mark(self.index, self.line, self.column)

    def span(self, start: Mark, end: Mark | None = None) -> Span:
        if end is None:
            return Span(
                self.name, start.line + 1, start.column + 1, start.line + 1, start.column + 2
            )
        return Span(self.name, start.line + 1, start.column + 1, end.line + 1, end.column + 1)

    def report(self, finding: Diagnostic) -> None:
        self.findings.append(finding)
        if len(self.findings) >= FINDING_LIMIT:
            raise _Stop

    def refuse(self, message: str, span: Span, help: str) -> None:
        self.report(Diagnostic(FOREIGN, message, span, help=help))

    def need_more_tokens(self) -> bool:
        if self.done:
            return False
        if not self.tokens:
            return True
        if not self.possible_simple_keys:
            return False
        self.stale_possible_simple_keys()
        return self.next_possible_simple_key() == self.tokens_taken

    def check_token(self, *choices: type) -> bool:
        if not self.done and (not self.tokens or self.possible_simple_keys):
            while self.need_more_tokens():
                self.fetch_more_tokens()
        return bool(self.tokens) and (not choices or isinstance(self.tokens[0], choices))

    def scan_to_next_token(self) -> None:
        blank = self._flow_blank if self.flow_context else self._block_blank
        match = blank.match(self.buffer, self.pointer)
        length = match.end() - self.pointer if match else 0
        if length:
            line = self.line
            self.forward(length)
            if self.line > line and not self.flow_context:
                self.allow_simple_key = True

    def scan_plain(self) -> Any:
        word = self._flow_word if self.flow_context else self._block_word
        match = word.match(self.buffer, self.pointer)
        if match is None:
            return super().scan_plain()
        start = self.get_mark()
        self.allow_simple_key = False
        length = match.end() - self.pointer
        self.pointer = self.index = match.end()
        self.column += length
        return self.scalar_token(match[0], True, start, self.get_mark())

    def scan_anchor(self, token_class: type) -> Any:
        start = self.get_mark()
        text = self._take_property()
        what = "alias" if text[0] == "*" else "anchor"
        self.refuse(
            f"{what} {short(text)}: anchors and aliases are not part of the language",
            self.span(start, self.get_mark()),
            "to share settings use `extends`; if the text is meant, quote it",
        )
        return token_class(text, start, self.get_mark())

    def scan_tag(self) -> Any:
        start = self.get_mark()
        text = self._take_property()
        self.refuse(
            f"tag {short(text)}: tags are refused: a spec is data",
            self.span(start, self.get_mark()),
            "delete the tag; if the text is meant, quote it",
        )
        return self.tag_token(("!", "refused"), start, self.get_mark())

    def _take_property(self) -> str:
        match = self._property.match(self.buffer, self.pointer)
        assert match is not None
        self.forward(match.end() - self.pointer)
        return match[0]

    def distribute_comment(self, comment: Any, line: int) -> None:
        """Comments are not kept; the parser asks at the end of an unindented list."""

    def fetch_directive(self) -> None:
        start = self.get_mark()
        text = self.text[start.index :].split("\n", 1)[0].rstrip()
        end = Mark(start.index + len(text), start.line, len(text))
        self.refuse(
            f"directive {short(text)} is not part of the language",
            self.span(start, end),
            "delete the line; if the text is meant, quote it",
        )
        raise _Stop


@lru_cache(maxsize=1)
def _parser_class() -> Any:
    """The parser, built on first use: importing ruamel.yaml costs more than reading a file."""
    from ruamel.yaml.parser import Parser
    from ruamel.yaml.scanner import Scanner
    from ruamel.yaml.tokens import ScalarToken, TagToken

    attributes = {"scalar_token": ScalarToken, "tag_token": TagToken}
    return type("_Parser", (_Reader, Scanner, Parser), attributes)


def _yaml_error() -> type[Exception]:
    from ruamel.yaml.error import MarkedYAMLError

    return MarkedYAMLError


# --- events -> tree -----------------------------------------------------------------------------


class _Builder:
    """Turns the parser's events into nodes and reports what the language leaves out."""

    def __init__(self, parser: Any) -> None:
        self.parser = parser
        self.depth = 0

    def document(self) -> Node | None:
        """The root of the only document; other roots and further documents are findings."""
        self.parser.get_event()  # stream start
        if not self._documents_left():
            self._root("nothing", Span(self.parser.name, 1, 1, 1, 1))
            return None
        start = self.parser.get_event()
        root = self.node(self.parser.get_event())
        self.parser.get_event()  # document end
        if self._documents_left():
            second = self.parser.peek_event()
            count = 1 + self._count_documents()
            self._root(f"{count} documents", self.parser.span(second.start_mark))
        elif not isinstance(root, Mapping):
            empty = isinstance(root, Scalar) and root.value is None
            self._root(_kind(root), self.parser.span(start.start_mark) if empty else root.span)
        return root

    def _documents_left(self) -> bool:
        return type(self.parser.peek_event()).__name__ == "DocumentStartEvent"

    def _count_documents(self) -> int:
        """Documents that follow; a syntax error in one of them ends the count."""
        count = 0
        try:
            while (event := self.parser.get_event()) is not None:
                count += type(event).__name__ == "DocumentStartEvent"
        except _yaml_error():
            pass
        return count

    def _root(self, found: str, span: Span) -> None:
        repair = "a specification is one `key: value` mapping per file"
        self.parser.refuse(f"expected one mapping, got {found}", span, repair)

    def node(self, event: Any) -> Node:
        """The node that starts with `event`; reads up to its end."""
        kind = type(event).__name__
        if kind == "ScalarEvent":
            return self._scalar(event)
        if kind == "AliasEvent":  # reported by the scanner
            return Scalar(None, "", self.parser.span(event.start_mark, event.end_mark), False)
        self.depth += 1
        if self.depth > DEPTH_LIMIT:
            message = f"nested deeper than {DEPTH_LIMIT} levels"
            self.parser.refuse(message, self.parser.span(event.start_mark), "flatten the spec")
            raise _Stop
        build = self._sequence if kind == "SequenceStartEvent" else self._mapping
        node = build(event)
        self.depth -= 1
        return node

    def _scalar(self, event: Any) -> Scalar:
        span = self.parser.span(event.start_mark, event.end_mark)
        quoted = event.style is not None
        if quoted:
            self._escapes(event.value, span)
            return Scalar(event.value, event.value, span, True)
        value, message, repair = plain_value(event.value)
        if message:
            self.parser.refuse(message, span, repair)
        return Scalar(value, event.value, span, False)

    def _escapes(self, text: str, span: Span) -> None:
        """An escape such as \\x1b must not bring in what the file itself may not contain."""
        hidden = HIDDEN.search(text)
        if hidden:
            message = f"escape for the invisible character U+{ord(hidden[0]):04X}"
            self.parser.refuse(message, span, "delete it")

    def _sequence(self, start: Any) -> Sequence:
        items = []
        while type(event := self.parser.get_event()).__name__ != "SequenceEndEvent":
            items.append(self.node(event))
        return Sequence(tuple(items), self._collection_span(start, event, items))

    def _mapping(self, start: Any) -> Mapping:
        entries: dict[str, Entry] = {}
        values = []
        while type(event := self.parser.get_event()).__name__ != "MappingEndEvent":
            key, key_span = self._key(event)
            value = self.node(self.parser.get_event())
            values.append(value)
            if key is None:
                continue
            first = entries.get(key)
            if first is None:
                entries[key] = Entry(key, key_span, value)
            else:
                self._duplicate(key, first.key_span, key_span)
            self._missing_space(event, value)
        return Mapping(tuple(entries.values()), self._collection_span(start, event, values))

    def _collection_span(self, start: Any, end: Any, children: list[Any]) -> Span:
        """Flow collections end at their bracket, block collections with their last child."""
        span = self.parser.span(start.start_mark, end.end_mark)
        if start.flow_style or not children:
            return span
        last = children[-1].span
        return Span(span.path, span.line, span.column, last.end_line, last.end_column)

    def _key(self, event: Any) -> tuple[str | None, Span]:
        span = self.parser.span(event.start_mark, event.end_mark)
        if type(event).__name__ == "AliasEvent":
            return None, span
        if type(event).__name__ != "ScalarEvent":
            node = self.node(event)
            repair = "quote it if the text is meant"
            self.parser.refuse(f"{_kind(node)} cannot be a key", node.span, repair)
            return None, span
        self._escapes(event.value, span)
        if event.value == "":
            self.parser.refuse("empty key", span, "write a name before the colon")
            return None, span
        if event.value == "<<" and event.style is None:
            repair = "to share settings use `extends`"
            self.parser.refuse("merge key `<<` is not part of the language", span, repair)
            return None, span
        return event.value, span

    def _duplicate(self, key: str, first: Span, second: Span) -> None:
        message = f"duplicate key {short(key)}: written on lines {first.line} and {second.line}"
        if first.line == second.line:
            message = f"duplicate key {short(key)}: written twice on line {first.line}"
        repair = "keep one of the two"
        related = (("first", first),)
        self.parser.report(Diagnostic(DUPLICATE, message, second, help=repair, related=related))

    def _missing_space(self, key: Any, value: Node) -> None:
        """`{tp:8}` is a key named "tp:8" to YAML, which nobody means."""
        name, colon, rest = key.value.partition(":")
        if colon and rest and key.style is None and isinstance(value, Scalar) and not value.raw:
            span = self.parser.span(key.start_mark, key.end_mark)
            message = f"no space after the colon in {short(key.value)}"
            self.parser.report(syntax(message, span, f"write {short(f'{name}: {rest}')}"))


def _kind(node: Node) -> str:
    """A node in words, for messages."""
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    if node.value is None:
        return "nothing"
    names = {bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(node.value), "a string")
