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
from typing import Any

from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError
from kpipe.codegen.spec.yaml_errors import syntax

SIZE_LIMIT = 1 << 20  # bytes; the largest sensible specification is a few KiB

UNREADABLE = "KP100"


@dataclass(frozen=True)
class Scalar:
    """A leaf. `raw` is the text as written (decoded when quoted), `value` what it means."""

    value: bool | int | float | str | None
    raw: str
    span: Span
    quoted: bool


@dataclass(frozen=True)
class Sequence:
    """A list, block or flow style."""

    items: tuple[Node, ...]
    span: Span


@dataclass(frozen=True)
class Entry:
    """One `key: value` of a mapping. The key is always text: `4` is "4", `on` is "on"."""

    key: str
    key_span: Span
    value: Node


@dataclass(frozen=True)
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
    hidden = HIDDEN.search(text)
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
        raise SpecError([syntax("tab in the indentation", span, "indent with spaces")])
    # Imported here: the parser builds the nodes that are defined above.
    from kpipe.codegen.spec.yaml_parser import parse_document

    return parse_document(name, text)


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

HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
    "\ufeff\ufffe\uffff\ud800-\udfff]"
)


def _posix(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).replace(os.sep, "/")


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
