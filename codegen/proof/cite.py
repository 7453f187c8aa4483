"""What a finding, a hold or a plain launch rests on: a rule of the edge set and rows behind it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kpipe.codegen.proof.instants import begin, end
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Program
from kpipe.codegen.proof.races import Assumption, Race

if TYPE_CHECKING:
    from kpipe.codegen.proof.semantics import Row, Table

ROWS_SHOWN = 1  # of one rule
_STARTS = ("early_start", "graph_start")
_SUFFIX = re.compile(r"#\d+")


def readings_of(assumption: Assumption) -> tuple[str, ...]:
    """The readings, each of which would order the pair alone."""
    return tuple(assumption.split(" or ")) if assumption else ()


def settled(race: Race, table: Table) -> Race:
    """The race with the verdict of this table: a reading that does not hold orders nothing."""
    held = [name for name in readings_of(race.assumption) if table.holds(name)]
    assumption: Assumption = " or ".join(held)  # type: ignore[assignment]
    return replace(race, assumption=assumption, verdict="assumed" if held else "racy")


@dataclass(frozen=True)
class Lost:
    """Where an order is lost: the rule, its sentence, words of the rows that show the same."""

    rule: str
    text: str
    alike: tuple[str, ...] = ()


def lost_at(program: Program, race: Race, order: Order) -> Lost:
    """The rule at which the order of the two accesses is lost.

    It is the first edge on the way to the second access that only waits for a trigger; where no
    edge leads there at all, it is the join that is missing; where only a release fence is missing,
    the release.  `order` is that of the documents, without `fences`.
    """
    (first, first_site), (second, second_site) = race.first, race.second
    nodes = [program.launches[position].node for position in (first, second)]
    goal = (second, begin(nodes[1], nodes[1].accesses[second_site]))
    gap = order.missing((first, end(nodes[0].accesses[first_site])), goal)
    if gap is None:
        return Lost("release", "a trigger stands behind a wait, no release fence in front of it")
    if gap.reached is None:
        text = f"no stream, no join and no event leads from {nodes[0].name} to {nodes[1].name}"
        return Lost("join", text)
    steps = [step for step in order.chain(gap.reached, goal) if step.first[0] != step.second[0]]
    if not steps:
        return Lost("exit", "a kernel's own instants only")
    step = next((step for step in steps if step.rule in _STARTS), steps[0])
    alike = ("silent",) if gap.silent else ("event", "join") if "event" in step.text else ()
    return Lost(step.rule, _SUFFIX.sub("", step.text), alike)


def rests_of(race: Race, lost: Lost, table: Table, *, captured: bool) -> tuple[str, ...]:
    """Lines that say what a race rests on: the rule, rows behind it, and the verdict.

    The verdict is that of the table: "assumed" names the readings under which the pair would be
    safe, with their rows; a reading that does not hold is no excuse.
    """
    lines = [f"rule `{lost.rule}`: {lost.text}"]
    lines += [row_line(row, table) for row in _chosen(table, lost, captured)]
    verdict = settled(race, table).verdict
    if not race.assumption:
        return (*lines, f"{verdict}: no document and no reading orders them")
    for name in readings_of(race.assumption):
        reading = table.reading(name)
        rows = rows_word(reading.rows)
        if reading.holds:
            lines.append(
                f"{verdict} safe under `{name}` ({reading.sentence}): {rows}, never seen to fail "
                f"({table.title}); no document promises it"
            )
        else:
            says = f"`{name}` ({reading.sentence}) was seen to fail: {rows} ({table.title})"
            lines.append(f"racy: {says}" if verdict == "racy" else says)
    return tuple(lines)


def row_line(row: Row, table: Table) -> str:
    """One row in words, with the table that it stands in."""
    return (
        f"row {row.id}: {row.sentence}: {row.eager} eagerly, {row.captured} captured "
        f"({table.title})"
    )


def rows_word(rows: Iterable[str]) -> str:
    """`row 10`, or `rows 6, 9`."""
    listed = list(rows)
    return f"row{'s' if len(listed) > 1 else ''} {', '.join(listed)}"


def cited(reason: str, rule: str, table: Table, *, captured: bool) -> str:
    """A reason for a launch that lost some overlap, with the row that shows why: `(row 10)`."""
    rows = _chosen(table, Lost(rule, ""), captured)
    return f"{reason} ({rows_word(row.id for row in rows[:1])})" if rows else reason


def _chosen(table: Table, lost: Lost, captured: bool) -> list[Row]:
    """Rows of the rule: those that were seen to fail, of these the most alike, by their order."""

    def order(row: Row) -> tuple[bool, bool]:
        seen = (row.captured if captured else row.eager) == "stale"
        return not seen, not any(word in row.sentence for word in lost.alike)

    return sorted((table.row(one) for one in table.cite(lost.rule)), key=order)[:ROWS_SHOWN]
