"""From a path to a validated specification: reading, `extends`, geometry, models.

Everything is collected: one run reports every error that it can see, each at its place.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kpipe.codegen.config import geometry_file, geometry_folders, project_root
from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError, did_you_mean
from kpipe.codegen.spec.document import (
    Entry,
    Mapping,
    Node,
    Scalar,
    find,
    read_document,
    span_of,
    to_plain,
)

# Sections that merge key by key under `extends`; anything else is replaced as a whole.
_MERGED_SECTIONS = frozenset(
    (
        *("parallel", "rows", "features", "environment", "numerics", "buffers", "mailboxes"),
        *("caches", "streams", "external", "step", "stages", "overlap"),
    )
)
_MAX_EXTENDS = 8


@dataclass(frozen=True)
class Source:
    """The merged tree of a specification and the texts that it came from."""

    path: str
    root: Mapping
    texts: MappingType[str, str]
    files: tuple[str, ...] = field(default=())

    def span(self, *loc: str | int, key: bool = False) -> Span:
        """Position of the value (or the key) at a path of keys and indices.

        A value that is not written (`key:` and nothing) has the place of its key.
        """
        node = find(self.root, loc)
        unwritten = isinstance(node, Scalar) and not node.raw and not node.quoted
        return span_of(self.root, loc, key=key or unwritten)


_NOTHING: MappingType[str, str] = MappingProxyType({})


def load_source(
    path: str, texts: dict[str, str], given: MappingType[str, str] = _NOTHING
) -> Source:
    """Read a file and the files that it extends.

    Raises SpecError with every error found.  `texts` receives the text of each file, so that
    errors can be shown with an excerpt even when loading fails.  `given` are texts that stand for
    the files of those names: an edit is tried out without touching a file.
    """
    chain: list[tuple[str, Mapping]] = []
    current, asked_from = path, None
    root = project_root(Path(path))
    while True:
        real = Path(current).resolve()
        if any(Path(seen).resolve() == real for seen, _ in chain):
            names = " -> ".join([*(seen for seen, _ in chain), current])
            raise SpecError(
                (
                    Diagnostic(
                        "KP108",
                        f"`extends` goes in a circle: {names}",
                        asked_from,
                        help="delete one of these `extends`",
                    ),
                )
            )
        if len(chain) == _MAX_EXTENDS:
            message = f"`extends` is nested deeper than {_MAX_EXTENDS} files"
            hint = "extend a file nearer to the base"
            raise SpecError((Diagnostic("KP108", message, asked_from, help=hint),))
        document = _read(current, asked_from, texts, given)
        chain.append((current, document))
        base = next((entry for entry in document.entries if entry.key == "extends"), None)
        if base is None:
            break
        asked_from = base.value.span
        current = _extended_path(current, base, root)
    merged = _without(chain[-1][1], "extends")
    for _, document in reversed(chain[:-1]):
        merged = _merge(merged, _without(document, "extends"), depth=0, section="")
    files = tuple(file for file, _ in chain)
    return Source(path, merged, MappingProxyType(texts), files)


def _read(
    path: str, asked_from: Span | None, texts: dict[str, str], given: MappingType[str, str]
) -> Mapping:
    if path in given:
        texts[path] = given[path]
        return read_document(path, given[path].encode())
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise SpecError((_missing_file(path, asked_from),)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"cannot read `{path}`: {reason}"
        span = asked_from or Span(path, 1, 1, 1, 1)
        help = "name a file that you may read"
        raise SpecError((Diagnostic("KP100", message, span, help=help),)) from None
    texts[path] = data.decode("utf-8", errors="replace")
    return read_document(path, data)


def _missing_file(path: str, asked_from: Span | None) -> Diagnostic:
    folder = Path(path).parent
    names = sorted(p.name for p in folder.glob("*.yaml")) if folder.is_dir() else []
    near = did_you_mean(Path(path).name, names)
    return Diagnostic(
        "KP100",
        f"no such file: `{path}`",
        asked_from or Span(path, 1, 1, 1, 1),
        allowed=tuple(names),
        help=f"did you mean `{near}`?" if near else "",
    )


def _extended_path(path: str, base: Entry, root: Path) -> str:
    value = base.value
    if not isinstance(value, Scalar) or not isinstance(value.value, str):
        message = "`extends` takes the relative path of one pipeline file"
        hint = "write for example `extends: dsa_tp.yaml`"
        raise SpecError((Diagnostic("KP108", message, value.span, help=hint),))
    target = Path(path).parent / value.value
    if Path(value.value).is_absolute() or not target.resolve().is_relative_to(root):
        message = f"`extends` leaves the project: `{value.value}`"
        hint = "extend a file inside the project, by a path relative to this file"
        raise SpecError((Diagnostic("KP108", message, value.span, help=hint),))
    return target.as_posix()


def _without(document: Mapping, key: str) -> Mapping:
    return Mapping(tuple(e for e in document.entries if e.key != key), document.span)


def _merge(base: Mapping, child: Mapping, *, depth: int, section: str) -> Mapping:
    """Child over base.  A null removes the entry; order is the base's, new keys behind."""
    overrides = {entry.key: entry for entry in child.entries}
    entries: list[Entry] = []
    for entry in base.entries:
        override = overrides.pop(entry.key, None)
        if override is None:
            entries.append(entry)
            continue
        if isinstance(override.value, Scalar) and override.value.raw in ("null", "~", ""):
            continue
        merges = depth == 0 and entry.key in _MERGED_SECTIONS
        merges = merges or (depth == 1 and (section, entry.key) == ("overlap", "modes"))
        merges = merges or (depth == 1 and (section, entry.key) == ("numerics", "round"))
        if merges and isinstance(entry.value, Mapping) and isinstance(override.value, Mapping):
            value: Node = _merge(
                entry.value, override.value, depth=depth + 1, section=section or entry.key
            )
            entries.append(Entry(entry.key, override.key_span, value))
        else:
            entries.append(override)
    entries.extend(overrides.values())
    return Mapping(tuple(entries), child.span)


def plain(node: Node) -> Any:
    """Plain Python values; lists become tuples, as the strict models want them."""
    return _tuples(to_plain(node))


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


def find_geometry(path: str, name: str) -> tuple[Path | None, tuple[str, ...]]:
    """The geometry file of that name, or the names that there are where none has it."""
    found = geometry_file(Path(path), name)
    if found is not None:
        return found, ()
    folders = geometry_folders(Path(path))
    known = (file.stem for folder in folders for file in sorted(folder.glob("*.yaml")))
    return None, tuple(dict.fromkeys(known))
