"""Tables of measured semantics: one JSON file per (architecture, driver), read and checked here.

The file is read where something is cited and nowhere else; a clean check never needs it.  Which
one holds for a spec: `semantics` in the project's settings, else the table that ships for the
first target's architecture, else the one that ships first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from kpipe.codegen.config import display, load_config
from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError
from kpipe.codegen.proof.reasons import TEXTS
from kpipe.codegen.proof.semantics import TABLE_VERSION, Outcome, Reading, Row, Table

FOLDER = Path(__file__).with_name("measured")
# What findings may cite; a table that lacks one could not say what they rest on.
READINGS = ("m1", "m3", "held_exit_visible", "fence", "exit_completes")
RULES = (
    *("stream", "join", "early_start", "wait", "boundary", "graph_full", "graph_start"),
    *("graph_wait", "release", "exit"),
)
assert set(RULES) <= set(TEXTS)
_KEYS = ("version", "arch", "driver", "rows", "readings", "rules")
_OUTCOMES = get_args(Outcome)


@dataclass(frozen=True)
class Choice:
    """The table that a spec's findings cite, and the architectures that have none of their own."""

    table: Table
    without: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """One sentence: which table, and for which targets it only stands in."""
        text = f"cites what was measured on {self.table.title}"
        for arch in self.without:
            text += f"; no table for {arch}: the rows of {self.table.arch} are cited"
        return text


def table_for(path: str, targets: Sequence[str] = ()) -> Choice:
    """The table for a spec, by its project's settings and its targets (`sm_90a`).

    Raises SpecError: KP801 for the settings, KP809 for the file that they name.
    """
    given = load_config(Path(path)).semantics
    archs = list(dict.fromkeys(_base(target) for target in targets))
    if given is not None:
        table = read_table(given)
    else:
        own = [found for arch in archs for found in shipped() if _arch_of(found) == arch]
        table = read_table((own or list(shipped()))[0])
    return Choice(table, tuple(arch for arch in archs if arch != table.arch))


def shipped() -> tuple[Path, ...]:
    """The files that ship with kpipe; of one architecture the newest driver first."""

    def key(path: Path) -> tuple[str, list[int]]:
        arch, _, driver = path.stem.partition("-")
        return arch, [-int(part) for part in re.findall(r"\d+", driver)]

    return tuple(sorted(FOLDER.glob("*.json"), key=key))


def _base(target: str) -> str:
    """`sm_90` of `sm_90a`: tables belong to a GPU, not to an instruction set."""
    return target.rstrip("af")


def _arch_of(path: Path) -> str:
    return path.stem.partition("-")[0]


def read_table(path: Path) -> Table:
    """A table from its file.  Raises SpecError KP809 that names the file and the key."""
    shown = display(path)
    try:
        data = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        _refuse(shown, f"cannot be read: {error.strerror or error}", "name an existing file")
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        line = getattr(error, "lineno", 1)
        _refuse(shown, "is not JSON", "write it with the format of the shipped table", line)
    return _Reader(shown).table(data)


def _refuse(file: str, what: str, help: str, line: int = 1) -> Any:
    span = Span(file, line, 1, line, 2)
    raise SpecError([Diagnostic("KP809", f"semantics table `{file}`: {what}", span, help=help)])


class _Reader:
    """Checks while it builds; every refusal names the key."""

    def __init__(self, file: str) -> None:
        self.file = file

    def table(self, data: Any) -> Table:
        version = data.get("version") if isinstance(data, dict) else None
        if version != TABLE_VERSION:
            given = "missing" if version is None else f"{version!r}"
            hint = f"this kpipe reads version {TABLE_VERSION}; measure the table again"
            _refuse(self.file, f"`version` is {given}", hint)
        self.keys(data, _KEYS, "")
        rows = tuple(self.row(item, at) for at, item in self.items(data, "rows"))
        known = {row.id for row in rows}
        if len(known) < len(rows):
            twice = next(row.id for row in rows if sum(r.id == row.id for r in rows) > 1)
            self.wrong("rows", f"has row {twice!r} twice")
        readings = tuple(self.reading(item, at, known) for at, item in self.items(data, "readings"))
        for name in READINGS:
            if name not in {reading.id for reading in readings}:
                self.wrong("readings", f"lacks the reading {name!r}")
        if not isinstance(data["rules"], dict):
            self.wrong("rules", "is not a mapping from rules to ids of rows")
        self.keys(data["rules"], RULES, "rules")
        rules = tuple(
            (rule, self.ids(ids, f"rules.{rule}", known)) for rule, ids in data["rules"].items()
        )
        arch, driver = (self.text(data, key, "") for key in ("arch", "driver"))
        return Table(arch, driver, version, rows, readings, rules, self.file)

    def row(self, item: Any, at: str) -> Row:
        self.keys(item, [field.name for field in fields(Row)], at)
        for key in ("eager", "captured"):
            if item[key] not in _OUTCOMES:
                self.wrong(f"{at}.{key}", f"is {item[key]!r}; one of {', '.join(_OUTCOMES)}")
        promised = item["promised"]
        if not (isinstance(promised, list) and [type(p) for p in promised] == [bool, bool]):
            self.wrong(f"{at}.promised", "is not [eager, captured], two booleans")
        words = [self.text(item, key, at) for key in ("id", "sentence", "eager", "captured")]
        return Row(*words, (promised[0], promised[1]))  # type: ignore[arg-type]

    def reading(self, item: Any, at: str, known: set[str]) -> Reading:
        self.keys(item, [field.name for field in fields(Reading)], at)
        if not isinstance(item["holds"], bool):
            self.wrong(f"{at}.holds", "is not true or false")
        rows = self.ids(item["rows"], f"{at}.rows", known)
        return Reading(
            self.text(item, "id", at), self.text(item, "sentence", at), rows, item["holds"]
        )

    def items(self, data: dict[str, Any], key: str) -> list[tuple[str, Any]]:
        if not isinstance(data[key], list):
            self.wrong(key, "is not a list")
        return [(f"{key}[{number}]", item) for number, item in enumerate(data[key])]

    def keys(self, item: Any, wanted: Sequence[str], at: str) -> None:
        if not isinstance(item, dict):
            self.wrong(at, "is not a mapping")
        dot = f"{at}." if at else ""
        for key in item:
            if key not in wanted:
                self.wrong(f"{dot}{key}", f"is not known; known: {', '.join(wanted)}")
        for key in wanted:
            if key not in item:
                self.wrong(f"{dot}{key}", "is missing")

    def ids(self, value: Any, at: str, known: set[str]) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            self.wrong(at, "is not a list of ids of rows")
        for identifier in value:
            if identifier not in known:
                self.wrong(at, f"names row {identifier!r}, which `rows` lacks")
        return tuple(value)

    def text(self, item: dict[str, Any], key: str, at: str) -> str:
        if not isinstance(item[key], str) or not item[key]:
            self.wrong(f"{at}.{key}" if at else key, "is not a text")
        return item[key]

    def wrong(self, key: str, what: str) -> Any:
        _refuse(self.file, f"`{key}` {what}", "correct the file, or measure the table again")
