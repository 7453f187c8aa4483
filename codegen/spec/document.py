"""YAML text -> a tree in which every key and value knows its place.

The language is a small part of YAML 1.2: one document, one root mapping, plain data. Anchors,
aliases, tags, merge keys and directives are refused, because a specification is data that may
come from a stranger and must read the same from top to bottom. ruamel.yaml supplies scanner and
parser; neither its composer nor its constructors run, so nothing in a file can create an object.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError

SIZE_LIMIT = 1 << 20  # bytes; the largest sensible specification is a few KiB
DEPTH_LIMIT = 40  # nested collections
FINDING_LIMIT = 100  # a hostile file must not produce megabytes of findings

UNREADABLE, SYNTAX, DUPLICATE, FOREIGN = "KP100", "KP105", "KP106", "KP107"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A leaf. `raw` is the text as written (decoded when quoted), `value` what it means."""

    value: bool | int | float | str | None
    raw: str
    span: Span
    quoted: bool


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list, block or flow style."""

    items: tuple[Node, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key: value` of a mapping. The key is always text: `4` is "4", `on` is "on"."""

    key: str
    key_span: Span
    value: Node


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping in file order; keys are unique."""

    entries: tuple[Entry, ...]
    span: Span

    def entry(self, key: str) -> Entry | None:
        """The entry written under `key`, or None."""
        return next((entry for entry in self.entries if entry.key == key), None)


Node = Scalar | Sequence | Mapping


class RawInt(int):
    """An int that remembers its spelling in `.raw`; pydantic takes it for a plain int."""

    raw: str


class RawFloat(float):
    """A float that remembers its spelling in `.raw`; pydantic takes it for a plain float."""

    raw: str


# --- public functions ---------------------------------------------------------------------------


def read_source(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a specification file.

    Raises SpecError KP100 when it does not exist, is no regular file, cannot be read, or is
    larger than 1 MiB (checked before reading).
    """
    name = _posix(path)
    try:
        if not os.path.exists(path):
            raise _unreadable(name, "no such file")
        if not os.path.isfile(path):
            raise _unreadable(name, "not a regular file")
        size = os.path.getsize(path)
        if size > SIZE_LIMIT:
            raise _too_large(name, size)
        with open(path, "rb") as stream:
            return stream.read(SIZE_LIMIT + 1)
    except OSError as error:
        raise _unreadable(name, f"cannot be read: {error.strerror or error}") from None


def decode_source(path: str | os.PathLike[str], source: str | bytes) -> str:
    """Source as text with `\\n` line ends and without byte order mark, as spans count it.

    Raises SpecError KP100 for more than 1 MiB, bytes that are not UTF-8, and characters that
    cannot be seen (control, direction and line-separator characters).
    """
    name = _posix(path)
    size = len(source) if isinstance(source, bytes) else len(source.encode("utf-8", "replace"))
    if size > SIZE_LIMIT:
        raise _too_large(name, size)
    text = _decode(name, source) if isinstance(source, bytes) else source
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    hidden = _HIDDEN.search(text)
    if hidden:
        span = _span_at(name, text, hidden.start())
        what = f"U+{ord(hidden[0]):04X}{' (NUL)' if hidden[0] == chr(0) else ''}"
        message = f"invisible character {what}"
        raise SpecError([Diagnostic(UNREADABLE, message, span, help="delete it")])
    return text


def read_document(path: str | os.PathLike[str], source: str | bytes) -> Mapping:
    """Parse one specification into its positioned root mapping.

    Plain scalars follow the YAML 1.2 core schema in one spelling each: `null`, `~` or nothing;
    `true` and `false` (on, off, yes, no stay text); decimal, `0x` and `0o` integers of up to 64
    bits; floats. Everything else is text. Raises SpecError with all findings of the file: KP100
    (unreadable), KP105 (syntax), KP106 (duplicate keys), KP107 (not part of the language).
    """
    name = _posix(path)
    text = decode_source(path, source)
    tab = re.search(r"^ *+(\t++)[ \t]*+(?=\S)", text, re.MULTILINE)
    if tab:
        span = _span_at(name, text, tab.start(1), len(tab[1]))
        raise SpecError([_syntax("tab in the indentation", span, "indent with spaces")])
    parser = _parser_class()(name, text)
    root: Node | None = None
    try:
        root = _Builder(parser).document()
    except _Stop:
        pass
    except _yaml_error() as error:
        parser.findings.append(_translate(parser, error))
    except (ValueError, OverflowError, IndexError, AssertionError):
        # The scanner has a few unguarded conversions (an escape such as \UFFFFFFFF).
        place = parser.span(parser.get_mark())
        parser.findings.append(_syntax("not YAML from here on", place, "check the escapes"))
    if parser.findings:
        raise SpecError(parser.findings)
    assert isinstance(root, Mapping)
    return root


def to_plain(node: Node) -> Any:
    """The tree as dict, list and scalars, for validation.

    Plain integers and floats become RawInt and RawFloat, so `targets: [9.0]` can still be read
    back as the text "9.0" through `.raw`; pydantic accepts them as int and float, strict or lax.
    """
    if isinstance(node, Mapping):
        return {entry.key: to_plain(entry.value) for entry in node.entries}
    if isinstance(node, Sequence):
        return [to_plain(item) for item in node.items]
    value = node.value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = RawInt(value) if isinstance(value, int) else RawFloat(value)
        number.raw = node.raw
        return number
    return value


def find(root: Node, loc: tuple[str | int, ...]) -> Node | None:
    """The node at a path of keys and list positions, or None when the path leaves the tree."""
    nodes = [root, *(node for node, _ in _walk(root, loc))]
    return nodes[-1] if len(nodes) == len(loc) + 1 else None


def span_of(root: Node, loc: tuple[str | int, ...], key: bool = False) -> Span:
    """Where the value at `loc` stands, or its key with `key=True`.

    A path that goes deeper than the tree gives the deepest existing value. A last element
    "[key]" (pydantic's mark for a finding about a key) selects the key as well.
    """
    if loc and loc[-1] == "[key]":
        loc, key = loc[:-1], True
    span = root.span
    for depth, (node, entry) in enumerate(_walk(root, loc), start=1):
        wants_key = key and depth == len(loc) and entry is not None
        span = entry.key_span if wants_key else node.span
    return span


def _walk(root: Node, loc: tuple[str | int, ...]) -> Iterator[tuple[Node, Entry | None]]:
    """Yields the nodes along `loc`, each with the entry that holds it; stops where it ends."""
    node = root
    for step in loc:
        if isinstance(node, Mapping):
            entry = node.entry(str(step))
            if entry is None:
                return
            node = entry.value
            yield node, entry
        elif isinstance(node, Sequence) and isinstance(step, int) and 0 <= step < len(node.items):
            node = node.items[step]
            yield node, None
        else:
            return


# --- files and encoding -------------------------------------------------------------------------

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
    "\ufeff\ufffe\uffff\ud800-\udfff]"
)


def _posix(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).replace(os.sep, "/")


def _short(text: str) -> str:
    """Text from the file as a message shows it: quoted, and cut when it is long."""
    return f"`{text}`" if len(text) <= 60 else f"`{text[:57]}...`"


def _unreadable(name: str, message: str, help: str = "") -> SpecError:
    return SpecError([Diagnostic(UNREADABLE, message, Span(name, 1, 1, 1, 1), help=help)])


def _too_large(name: str, size: int) -> SpecError:
    message = f"the file has {size:,} bytes; the limit is {SIZE_LIMIT:,} bytes (1 MiB)"
    return _unreadable(name, message)


def _decode(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        span = _span_at(name, before, len(before))
        utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        message = (
            f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
            f" (line {span.line}){'; this looks like UTF-16' if utf16 else ''}"
        )
        raise SpecError(
            [Diagnostic(UNREADABLE, message, span, help="save the file as UTF-8")]
        ) from None


def _span_at(name: str, text: str, offset: int, length: int = 1) -> Span:
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    return Span(name, line, column, line, column + length)


# --- scanner and parser -------------------------------------------------------------------------


class _Stop(Exception):
    """Reading cannot go on; the findings say why."""


class _Mark:
    __slots__ = ("index", "line", "column")

    def __init__(self, index: int, line: int, column: int) -> None:
        self.index, self.line, self.column = index, line, column


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

    def get_mark(self) -> _Mark:
        return _Mark(self.index, self.line, self.column)

    def span(self, start: _Mark, end: _Mark | None = None) -> Span:
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
            f"{what} {_short(text)}: anchors and aliases are not part of the language",
            self.span(start, self.get_mark()),
            "to share settings use `extends`; if the text is meant, quote it",
        )
        return token_class(text, start, self.get_mark())

    def scan_tag(self) -> Any:
        start = self.get_mark()
        text = self._take_property()
        self.refuse(
            f"tag {_short(text)}: tags are refused: a spec is data",
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
        end = _Mark(start.index + len(text), start.line, len(text))
        self.refuse(
            f"directive {_short(text)} is not part of the language",
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
        value, message, repair = _plain_value(event.value)
        if message:
            self.parser.refuse(message, span, repair)
        return Scalar(value, event.value, span, False)

    def _escapes(self, text: str, span: Span) -> None:
        """An escape such as \\x1b must not bring in what the file itself may not contain."""
        hidden = _HIDDEN.search(text)
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
        message = f"duplicate key {_short(key)}: written on lines {first.line} and {second.line}"
        if first.line == second.line:
            message = f"duplicate key {_short(key)}: written twice on line {first.line}"
        repair = "keep one of the two"
        related = (("first", first),)
        self.parser.report(Diagnostic(DUPLICATE, message, second, help=repair, related=related))

    def _missing_space(self, key: Any, value: Node) -> None:
        """`{tp:8}` is a key named "tp:8" to YAML, which nobody means."""
        name, colon, rest = key.value.partition(":")
        if colon and rest and key.style is None and isinstance(value, Scalar) and not value.raw:
            span = self.parser.span(key.start_mark, key.end_mark)
            message = f"no space after the colon in {_short(key.value)}"
            self.parser.report(_syntax(message, span, f"write {_short(f'{name}: {rest}')}"))


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


# --- plain scalars ------------------------------------------------------------------------------

_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def _plain_value(text: str) -> tuple[bool | int | float | str | None, str, str]:
    """Value of an unquoted scalar, and a finding's message and repair (both "" when fine)."""
    if text in _WORDS:
        return _WORDS[text], "", ""
    if text[0].isalpha():  # most scalars are names; spare them the patterns
        if text in ("True", "TRUE", "False", "FALSE", "Null", "NULL"):
            word = text.lower()
            repair = f'write {word}, or "{text}" if the text is meant'
            return _WORDS[word], f"`{text}` is not how {word} is spelled", repair
        return text, "", ""
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if value in (float("inf"), float("-inf")):
            return 0.0, f"`{text}` is too large for a 64-bit float", "write a smaller number"
        return value, "", ""
    if _NOT_FINITE.fullmatch(text):
        repair = f'write a finite number, or "{text}" if the text is meant'
        return 0.0, f"`{text}` is refused: numbers are finite", repair
    return text, "", ""


def _integer(text: str) -> tuple[int, str, str]:
    shown = text if len(text) <= 24 else text[:21] + "..."
    digits = text.lstrip("+-")
    if len(digits) > 1 and digits[0] == "0" and digits.isdecimal():
        sign = text[: len(text) - len(digits)]
        decimal = sign + (digits.lstrip("0") or "0")
        octal = f" or {sign}0o{digits[1:]}" if set(digits) <= set("01234567") and not sign else ""
        repair = f"write {decimal}{octal}" if len(text) <= 24 else "drop the leading zeros"
        return 0, f"`{shown}`: an integer does not start with 0", repair
    if len(text) > 24 or not -(1 << 63) <= (value := int(text, _base(digits))) < 1 << 64:
        return 0, f"`{shown}` does not fit into 64 bits", "write a smaller number, or quote it"
    return value, "", ""


def _base(digits: str) -> int:
    return {"0x": 16, "0o": 8}.get(digits[:2], 10)


# --- scanner errors in words --------------------------------------------------------------------


def _syntax(message: str, span: Span, help: str = "", related: Any = ()) -> Diagnostic:
    return Diagnostic(SYNTAX, message, span, help=help, related=related)


def _translate(parser: Any, error: Any) -> Diagnostic:
    """A scanner or parser error as one sentence that a reader of the file understands."""
    problem, context = error.problem or error.context or "", error.context or ""
    mark = error.problem_mark or error.context_mark or parser.get_mark()
    opened = error.context_mark or mark
    place, quote = parser.span(mark), "quote the text"
    if problem.startswith("mapping values"):
        return _misplaced_colon(parser, mark)
    if "could not find expected ':'" in problem:
        line = parser.text.split("\n")[opened.line].rstrip()
        place = parser.span(opened, _Mark(0, opened.line, max(len(line), opened.column + 1)))
        repair = "write a space after the colon, and the value behind it or indented below"
        return _syntax("expected `key: value`", place, repair)
    if problem.startswith("sequence entries"):
        return _syntax("a list cannot start here", place, "start it on a new line or use `[a, b]`")
    if "cannot start any token" in problem:
        character = parser.peek()
        if character == "\t":
            return _syntax("tab where a space belongs", place, "use spaces")
        shown = "a backtick" if character == "`" else f"`{character}`"
        return _syntax(f"{shown} cannot start a value", place, quote)
    if context == "while scanning a quoted scalar":
        ending = f"close it with {parser.buffer[opened.index]}"
        return _syntax("quoted text is never closed", parser.span(opened), ending)
    if context == "while scanning a double-quoted scalar":
        repair = "write \\\\ for a backslash, or use 'single quotes'"
        return _syntax("unknown escape in double-quoted text", place, repair)
    if context == "while scanning a block scalar":
        repair = "put the text on the lines below, all indented alike"
        return _syntax("malformed block text after `|` or `>`", parser.span(opened), repair)
    if context.startswith("while parsing a flow") and problem.startswith("expected ','"):
        return _open_bracket(parser, problem, opened, mark)
    if problem.startswith("expected the node content"):
        if parser.flow_context and "<stream end>" in problem:
            opened, expected = parser.marks[-1], "']'" if parser.flow_context[-1] == "[" else ""
            return _open_bracket(parser, expected + "<stream end>", opened, mark)
        return _syntax(f"expected a value, found {_token(problem)}", place, "write a value here")
    if problem.startswith("expected <block end>"):
        return _misaligned(parser, problem, context, opened, mark)
    if "document start" in problem or "document end" in problem:
        repair = "one mapping holds the whole specification"
        return _syntax("text after the end of the mapping", place, repair)
    return _syntax(f"unexpected `{parser.buffer[mark.index]}`", place, quote)


def _misplaced_colon(parser: Any, colon: _Mark) -> Diagnostic:
    """Two pairs on one line, or a line that YAML takes for the rest of the one above."""
    lines = parser.text.split("\n")
    before = lines[colon.line][: colon.column]
    if re.search(r":(\s|$)", before) or not before.strip():
        repair = "quote the text if the colon belongs to it, or write `{key: value}`"
        return _syntax("a second `:` in one value", parser.span(colon), repair)
    start = len(before) - len(before.lstrip())
    above = next(row for row in range(colon.line - 1, -1, -1) if lines[row].strip())
    message = f"{_short(before.strip())} reads as a continuation of line {above + 1}"
    repair = f"align it with its siblings; line {above + 1} needs a colon and a space after its key"
    if re.search(r":(\s|$)", lines[above]):
        repair = "align it with its siblings"
    place = parser.span(_Mark(0, colon.line, start), colon)
    return _syntax(message, place, repair)


def _open_bracket(parser: Any, problem: str, opened: _Mark, mark: _Mark) -> Diagnostic:
    bracket, closing = ("[", "]") if "']'" in problem else ("{", "}")
    if "<stream end>" in problem:
        message = f"`{bracket}` is never closed"
        return _syntax(message, parser.span(opened), f"close it with `{closing}`")
    related = ((f"`{bracket}` opened", parser.span(opened)),)
    message = f"expected `,` or `{closing}`, found {_token(problem)}"
    repair = f"separate items with `,`, close with `{closing}`, quote text that contains `:`"
    return _syntax(message, parser.span(mark), repair, related)


def _misaligned(parser: Any, problem: str, context: str, opened: _Mark, mark: _Mark) -> Diagnostic:
    place, found = parser.span(mark), _token(problem)
    if found in ("`]`", "`}`"):
        return _syntax(f"{found} closes nothing", place, "delete it or open it before")
    if parser.text.split("\n")[mark.line][: mark.column].strip():
        repair = "quote the whole value (inside single quotes a quote is written '')"
        return _syntax(f"{found} after the end of the value", place, repair)
    what = "mapping" if context.endswith("mapping") else "list"
    message = f"this line does not line up with the {what} that starts on line {opened.line + 1}"
    related = ((f"{what} starts", parser.span(opened)),)
    return _syntax(message, place, "indent it like its siblings", related)


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
