"""What was measured about programmatic launches, events and graphs, and what rests on it.

A table belongs to one (architecture, driver).  Rows are data: a chain of launches, what a GPU did
with it eagerly and under capture, and whether the documents promise as much.  Findings cite rows
by their id.  Notation of a chain: A writes late; "(trig)" triggers at entry; B does nothing;
C reads A's data; "pdl" carries the launch attribute; "(wait)" waits for its predecessors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
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

    `rules` names, for each rule of the edge set, the rows that show it.
    """

    arch: str
    driver: str
    version: int
    rows: tuple[Row, ...]
    readings: tuple[Reading, ...]
    rules: tuple[tuple[str, tuple[str, ...]], ...]

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
        """Plain lists, strings and booleans only."""
        return _plain(asdict(self))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def lookup(arch: str, driver: str) -> Table | None:
    """The table measured for exactly this architecture and driver, else None."""
    return TABLES.get((arch, driver))


_BOTH, _NONE, _EAGER, _CAPTURED = (True, True), (False, False), (True, False), (False, True)


def _row(
    identifier: str, sentence: str, eager: Outcome, captured: Outcome, promised: tuple[bool, bool]
) -> Row:
    return Row(identifier, sentence, eager, captured, promised)


_H200_ROWS = (
    _row("1", "plain A; plain C", "ordered", "ordered", _BOTH),
    _row("2", "A(trig); pdl C(wait)", "fresh", "fresh", _BOTH),
    _row("3", "A(trig); pdl C(no wait)", "stale", "stale", _NONE),
    _row("4", "A(no trigger); pdl C(no wait)", "ordered", "ordered", _NONE),
    _row("5", "A(trig); plain C", "ordered", "ordered", _BOTH),
    _row("6", "A(trig); pdl B(no wait); pdl C(wait)", "fresh", "fresh", _NONE),
    _row("7", "A(trig); pdl B(trig, then wait); pdl C(wait)", "fresh", "fresh", _BOTH),
    _row("8", "A(trig); pdl B(trig, then wait); pdl C(no wait)", "stale", "stale", _NONE),
    _row(
        "9",
        "A(trig); pdl B(no wait); plain C, or event and plain C aside",
        "ordered",
        "ordered",
        _EAGER,
    ),
    _row("10", "A(trig); event; aside pdl C(no wait)", "ordered", "stale", _EAGER),
    _row("11", "A(trig); memset or memcpy; pdl C(no wait)", "ordered", "ordered", _BOTH),
    _row("12", "A(1 of 4 CTAs triggers); pdl C(no wait)", "ordered", "ordered", _NONE),
    _row("13", "A(trig); join of a short side kernel; pdl C(no wait)", "stale", "ordered", _NONE),
    _row(
        "14",
        "long A(trig) aside; short B(trig) on main; join; pdl C(no wait) on main",
        "ordered",
        "ordered",
        _EAGER,
    ),
    _row("15", "A(trig); fork; plain C aside", "ordered", "ordered", _BOTH),
    _row("16", "A(trig); event; aside pdl C(wait)", "ordered", "fresh", _BOTH),
    _row(
        "17",
        "A(trig); event; aside pdl D(no wait, trig), pdl C(wait)",
        "ordered",
        "fresh",
        _EAGER,
    ),
    _row("18", "A(trig); event; aside plain D, pdl C(no wait)", "ordered", "ordered", _BOTH),
    _row("19", "A(trig); fork of a side kernel; pdl C(no wait)", "stale", "stale", _NONE),
    _row(
        "20",
        "long A(trig) aside; main's first act joins it; pdl C(no wait)",
        "ordered",
        "stale",
        _EAGER,
    ),
    _row("21", "A(trig); event and wait on one stream; pdl C(no wait)", "stale", "stale", _NONE),
    _row(
        "22",
        "graph of A(trig), then graph of pdl C; graph then eager; eager then graph",
        "ordered",
        "ordered",
        _BOTH,
    ),
    _row("23", "A(trig); pdl B(wait, then trig); pdl C(no wait)", "fresh", "fresh", _NONE),
    _row(
        "24",
        "two long parents, both trigger early; join; pdl C(no wait); seen from the side parent",
        "ordered",
        "ordered",
        _EAGER,
    ),
    _row("25", "A(64 MB stored last, no trigger); pdl C(no wait)", "ordered", "ordered", _NONE),
    _row("26", "A(4 KB stored last, no trigger); pdl C(no wait)", "ordered", "ordered", _NONE),
    _row("27", "A(trig, then stores); pdl C(no wait)", "stale", "stale", _NONE),
    _row(
        "28",
        "root(trig); pdl Z(trig, long) aside; pdl A(trig, long); join; pdl C(no wait); seen from Z",
        "ordered",
        "stale",
        _EAGER,
    ),
    _row(
        "29",
        "A(trig); event to a side stream and straight back; pdl C(no wait)",
        "stale",
        "stale",
        _NONE,
    ),
    _row("30", "A(trig); pdl silent; event; aside pdl C(no wait)", "ordered", "stale", _EAGER),
    _row("31", "A(trig); pdl silent; pdl silent; pdl C(wait)", "fresh", "fresh", _NONE),
    _row(
        "32",
        "A(trig) beside a forked memset; join; pdl C(no wait)",
        "stale",
        "ordered",
        _NONE,
    ),
    _row(
        "P1",
        "Z(trig, long) aside; A(trig, long); join; pdl C(no wait); seen from Z",
        "ordered",
        "ordered",
        _EAGER,
    ),
    _row("P4", "A(trig); fork plain D; join; pdl C(no wait)", "ordered", "ordered", _BOTH),
    _row("P4b", "A(trig); fork pdl D(trig); join; pdl C(no wait)", "ordered", "ordered", _EAGER),
)

_H200_READINGS = (
    Reading(
        "m1",
        "a kernel completes after its programmatic parents even if it never waits",
        ("6", "9", "17", "31"),
        True,
    ),
    Reading(
        "m3",
        "the stores of a kernel that does not trigger are visible when its dependent starts",
        ("4", "12", "25", "26"),
        True,
    ),
    Reading(
        "held_exit_visible",
        "a kernel that never triggers is complete and visible when its programmatic dependent "
        "starts",
        ("25", "26", "27"),
        True,
    ),
    Reading(
        "fence",
        "a trigger behind the wait publishes what the wait covered, without a release fence",
        ("23",),
        True,
    ),
    Reading(
        "exit_completes",
        "the implicit trigger at exit is the completion, and protects a dependent that never waits",
        ("30",),
        False,
    ),
)

_RULES = (
    ("stream", ("1", "5", "9", "11")),
    ("join", ("10", "14", "16", "20")),
    ("early_start", ("3", "8", "13", "19", "21", "29", "32")),
    ("wait", ("2", "7")),
    ("boundary", ("22",)),
    ("graph_full", ("1", "5", "11", "15", "18", "32")),
    ("graph_start", ("3", "8", "10", "20", "28", "29", "30")),
    ("graph_wait", ("2", "7", "16", "28")),
    ("release", ("23",)),
    ("exit", ("12",)),
)

TABLES: dict[tuple[str, str], Table] = {
    ("sm_90", "580.159.04"): Table(
        "sm_90", "580.159.04", TABLE_VERSION, _H200_ROWS, _H200_READINGS, _RULES
    ),
}
