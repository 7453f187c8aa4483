"""What was measured about programmatic launches, events and graphs, and what rests on it.

A table belongs to one (architecture, driver) and is a file (`proof/tables.py` reads it).  Rows are
data: a chain of launches, what a GPU did with it eagerly and under capture, and whether the
documents promise as much.  Findings cite rows by their id.  Notation of a chain: A writes late;
"(trig)" triggers at entry; B does nothing; C reads A's data; "pdl" carries the launch attribute;
"(wait)" waits for its predecessors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

TABLE_VERSION = 1

# ordered: C ran after A.  fresh: C ran early and read new data behind its wait.  stale: C read
# old data in every repetition.
Outcome = Literal["ordered", "fresh", "stale"]


@dataclass(frozen=True)
class Row:
    """One measured chain.  `promised`: the documents promise what was seen, eager and captured;
    a stale row is never a promise, it shows that an order is missing."""

    id: str
    sentence: str
    eager: Outcome
    captured: Outcome
    promised: tuple[bool, bool]


@dataclass(frozen=True)
class Reading:
    """A statement that no measurement contradicted and no document promises.

    `rows` support it; `holds` is what was found on this architecture and driver.
    """

    id: str
    sentence: str
    rows: tuple[str, ...]
    holds: bool


@dataclass(frozen=True)
class Table:
    """Everything measured on one architecture and driver.

    `rules` names, for each rule of the edge set, the rows that show it.  `file` is where the table
    was read from; two readings of the same data are the same table.
    """

    arch: str
    driver: str
    version: int
    rows: tuple[Row, ...]
    readings: tuple[Reading, ...]
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    file: str = field(default="", compare=False)

    @property
    def title(self) -> str:
        """`sm_90, driver 580.159.04`."""
        return f"{self.arch}, driver {self.driver}"

    def holds(self, identifier: str) -> bool:
        """Whether a reading was found to hold here."""
        return self.reading(identifier).holds

    def row(self, identifier: str) -> Row:
        """The row with this id; KeyError names the table otherwise."""
        for row in self.rows:
            if row.id == identifier:
                return row
        raise KeyError(f"no row {identifier!r} for {self.arch} with driver {self.driver}")

    def reading(self, identifier: str) -> Reading:
        """The reading with this id; KeyError names the table otherwise."""
        for reading in self.readings:
            if reading.id == identifier:
                return reading
        raise KeyError(f"no reading {identifier!r} for {self.arch} with driver {self.driver}")

    def cite(self, rule: str) -> tuple[str, ...]:
        """Ids of the rows behind a rule of the edge set or behind a reading; () if none is."""
        named = dict(self.rules) | {reading.id: reading.rows for reading in self.readings}
        return named.get(rule, ())

    def as_json(self) -> dict[str, object]:
        """The content of the table's file: plain lists, strings and booleans only."""
        data = {
            key: _plain(value)
            for key, value in asdict(self).items()
            if key not in ("rules", "file")
        }
        return data | {"rules": {rule: list(rows) for rule, rows in self.rules}}


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
