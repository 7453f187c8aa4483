"""From what a GPU was seen to do to the table of semantics that the checker cites.

A row is what its experiments saw.  What the documents promise of it is not copied from anywhere:
the checker says so about the very schedule that ran.  A promise that was seen broken stops
everything: then the checker is wrong on this machine, and no table can repair that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kpipe.codegen.proof.capture import differences, predicted_graph
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Program
from kpipe.codegen.proof.schedule_form import decode
from kpipe.codegen.proof.semantics import TABLE_VERSION, Outcome, Reading, Row, Table

MODES = ("eager", "captured")
# Rows that must fail for a reading to mean something: without them its rows might have passed
# because nothing could be seen.
CONTROLS = {"held_exit_visible": ("27",)}
_RANK: tuple[Outcome, ...] = ("ordered", "fresh", "stale")


@dataclass(frozen=True)
class Experiment:
    """One chain in one mode (eager, captured, or mixed) and what was seen of it.

    `early` and `stale` count repetitions in which C saw old data as it started, and behind its
    wait.  `promised`: the documents order A's completion in front of C's read.
    """

    row: str
    chain: str
    mode: str
    repetitions: int
    early: int
    stale: int
    promised: bool
    broken: tuple[str, ...]  # promises that were seen broken, one sentence each

    @property
    def outcome(self) -> Outcome:
        """A single old value behind the wait refutes an order."""
        if self.stale:
            return "stale"
        return "fresh" if self.early else "ordered"

    @property
    def how_often(self) -> str:
        """How often C read old data behind its wait: always, never, or sometimes."""
        if self.stale in (0, self.repetitions):
            return "always" if self.stale else "never"
        return f"sometimes, {self.stale} of {self.repetitions}"


def experiments(observed: Mapping[str, Any]) -> tuple[Experiment, ...]:
    """The experiments of a document of observations, judged by the checker's own orders.

    Raises KeyError, TypeError or ValueError for what is no such document.
    """
    return tuple(_experiment(item) for item in observed["experiments"])


def _experiment(item: Mapping[str, Any]) -> Experiment:
    program = decode(item["schedule"])
    order = Order(program, fences=True)
    done = (int(item["first"]), "E")
    starts, returns = (order.ordered(done, (int(item["last"]), begin)) for begin in ("S", "W"))
    early, stale, repetitions = (int(item[key]) for key in ("early", "stale", "repetitions"))
    row, mode = str(item["row"]), str(item["mode"])
    if mode not in (*MODES, "mixed") or not 0 <= max(early, stale) <= repetitions:
        raise ValueError(f"row {row}: {early} and {stale} of {repetitions}, {mode}")
    broken = []
    for seen, promised, begin in ((stale, returns, "W"), (early, starts, "S")):
        if seen and promised and not broken:
            chain = "; ".join(step.text for step in order.chain(done, (int(item["last"]), begin)))
            place = "behind its wait" if begin == "W" else "as it started"
            broken.append(
                f"row {row} ({item['chain']}), {mode}: C saw old data {place} in {seen} of "
                f"{repetitions} repetitions, and the documents order A in front of it: {chain}"
            )
    for line in _graph_differences(program, item["graphs"]):
        broken.append(f"row {row} ({item['chain']}), {mode}: the captured graph: {line}")
    return Experiment(
        row, str(item["chain"]), mode, repetitions, early, stale, returns, tuple(broken)
    )


def _graph_differences(program: Program, graphs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What the captured segments of a program have otherwise than the rules of capture say."""
    nodes: list[Mapping[str, Any]] = []
    edges: list[Mapping[str, int]] = []
    for graph in graphs:
        start = len(nodes)
        nodes += graph["nodes"]
        edges += [
            {**edge, "source": edge["source"] + start, "target": edge["target"] + start}
            for edge in graph["edges"]
        ]
    return differences(predicted_graph(program), {"nodes": nodes, "edges": edges})


def table_of(observed: Mapping[str, Any], found: Sequence[Experiment], template: Table) -> Table:
    """The table of the machine that was observed.

    Sentences, readings and rules are the template's; rows that it lacks follow in their own
    words.  Raises ValueError where one of its rows was not observed in both modes, or a trial of
    that machine was refused.
    """
    for one in observed.get("refused", ()):
        raise ValueError(f"row {one['row']}, {one['mode']}, was refused there: {one['error']}")
    seen = [_row(row.id, row.sentence, found) for row in template.rows]
    known = {row.id for row in template.rows}
    new = dict.fromkeys(one.row for one in found if one.row not in known)
    rows = (*seen, *(_row(row, _chain_of(row, found), found) for row in new))
    outcomes = {row.id: row for row in rows}
    readings = tuple(_reading(reading, outcomes) for reading in template.readings)
    return Table(
        str(observed["arch"]),
        str(observed["driver"]),
        TABLE_VERSION,
        rows,
        readings,
        template.rules,
    )


def _chain_of(row: str, found: Iterable[Experiment]) -> str:
    return next(one.chain for one in found if one.row == row)


def _row(identifier: str, sentence: str, found: Iterable[Experiment]) -> Row:
    outcomes: list[Outcome] = []
    promised: list[bool] = []
    mine = [one for one in found if one.row == identifier]
    for mode in MODES:
        ran = [one for one in mine if one.mode in (mode, "mixed")]
        if not ran:
            raise ValueError(f"row {identifier} was not observed, {mode}: measure all rows")
        outcomes.append(max((one.outcome for one in ran), key=_RANK.index))
        promised.append(all(one.promised for one in ran))
    return Row(identifier, sentence, outcomes[0], outcomes[1], (promised[0], promised[1]))


def _reading(reading: Reading, rows: Mapping[str, Row]) -> Reading:
    controls = CONTROLS.get(reading.id, ())
    clean = all(not _stale(rows[row]) for row in reading.rows if row not in controls)
    able = all(_stale(rows[row]) for row in controls)
    return replace(reading, holds=clean and able)


def _stale(row: Row) -> bool:
    return "stale" in (row.eager, row.captured)


def table_text(table: Table) -> str:
    """The text of a table's file: a row or a reading a line."""
    data = table.as_json()
    head = [f'  "{key}": {json.dumps(data[key])},' for key in ("version", "arch", "driver")]
    lists = []
    for key in ("rows", "readings"):
        items = ",\n".join(f"    {json.dumps(asdict(one))}" for one in getattr(table, key))
        lists.append(f'  "{key}": [\n{items}\n  ],')
    rules = ",\n".join(f'    "{rule}": {json.dumps(list(rows))}' for rule, rows in table.rules)
    return "\n".join(["{", *head, *lists, f'  "rules": {{\n{rules}\n  }}', "}", ""])
