"""The order of a program's instants: the transitive closure of its edges, as bit sets.

The edges are conditions that all must hold, so the executions are exactly the linear extensions
of this order: two instants that it leaves unordered do occur in both orders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kpipe.codegen.proof.edges import Edges, edges
from kpipe.codegen.proof.instants import LETTERS, Letter, Point, number, point, waits
from kpipe.codegen.proof.kept import Kept
from kpipe.codegen.proof.program import Program
from kpipe.codegen.proof.reasons import reason


@dataclass(frozen=True)
class Step:
    """One edge of a chain: `first` precedes `second` by the named rule, said in `text`."""

    first: Point
    second: Point
    rule: str
    text: str


@dataclass(frozen=True)
class Missing:
    """What two unordered instants lack.

    `reached`: the latest instant of the first launch that does precede the second instant.
    `covered`: the earliest instant of the second launch that the first instant does precede.
    `silent`: launches on the chain from `reached` that start early and never wait; a later wait
    covers them and nothing in front of them.
    """

    reached: Point | None
    covered: Point | None
    silent: tuple[int, ...]
    text: str


class Order:
    """The order of one program, built once; every question after that is a bit test or a walk.

    `operations` counts the unions of the closure: at most one per edge.  Positions are those of
    `Program.launches`.  Raises ValueError for unknown assumptions.
    """

    def __init__(
        self,
        program: Program,
        assumptions: frozenset[str] = frozenset(),
        fences: bool = False,
    ) -> None:
        self.edges, self.before, self.operations = _ordered(program, assumptions, fences)
        self.launches = self.edges.launches
        self.assumptions = assumptions

    def number(self, instant: Point) -> int:
        """The number of an instant; ValueError for a position or letter that does not exist."""
        position, letter = instant
        if not 0 <= position < len(self.launches):
            raise ValueError(f"no launch {position}; the program has {len(self.launches)}")
        return number(position, self.launches[position].node, letter)

    def name(self, position: int) -> str:
        """`name#position` of a launch: names repeat when a step is unrolled."""
        return f"{self.launches[position].node.name}#{position}"

    def ordered(self, first: Point, second: Point) -> bool:
        """True iff `first` precedes `second`, or is the same moment, in every execution."""
        return bool(self.before[self.number(second)] >> self.number(first) & 1)

    def chain(self, first: Point, second: Point) -> list[Step]:
        """The shortest list of edges from `first` to `second`; empty if they are one moment.

        Raises ValueError if they are not ordered.
        """
        goal, start = self.number(first), self.number(second)
        if not self.before[start] >> goal & 1:
            raise ValueError(f"{self._say(first)} is not ordered before {self._say(second)}")
        # Breadth first, backwards, through instants that the goal precedes.
        later: dict[int, tuple[int, str, int]] = {start: (start, "", -1)}
        layer = [start]
        while goal not in later:
            following: list[int] = []
            for instant in layer:
                for source, rule, event in self.edges.parents[instant]:
                    if source not in later and self.before[source] >> goal & 1:
                        later[source] = (instant, rule, event)
                        following.append(source)
            layer = following
        steps = []
        while goal != start:
            instant, rule, event = later[goal]
            steps.append(self._step(goal, instant, rule, event))
            goal = instant
        return steps

    def missing(self, first: Point, second: Point) -> Missing | None:
        """Why `first` is not ordered before `second`; None if it is."""
        if self.ordered(first, second):
            return None
        reached = self._latest(first[0], second)
        covered = next(
            ((second[0], letter) for letter in LETTERS if self.ordered(first, (second[0], letter))),
            None,
        )
        silent: tuple[int, ...] = ()
        if reached is not None:
            early = {
                step.second[0]
                for step in self.chain(reached, second)
                if step.rule in ("early_start", "graph_start")
            }
            silent = tuple(
                sorted(p for p in early - {second[0]} if not waits(self.launches[p].node))
            )
        return Missing(reached, covered, silent, self._why(first, second, reached, covered, silent))

    def _latest(self, position: int, second: Point) -> Point | None:
        for letter in reversed(LETTERS):
            if self.ordered((position, letter), second):
                return position, letter
        return None

    def _why(
        self,
        first: Point,
        second: Point,
        reached: Point | None,
        covered: Point | None,
        silent: tuple[int, ...],
    ) -> str:
        parts = [f"{self._say(first)} is not ordered before {self._say(second)}"]
        if reached is None:
            parts.append(f"nothing orders {self.name(first[0])} before it")
        else:
            parts.append(f"only {self._say(reached)} is")
        if covered is not None:
            parts.append(f"the order holds from {self._say(covered)} on")
        if silent:
            names = ", ".join(self.name(position) for position in silent)
            parts.append(
                f"{names} never waits, so what is behind it does not cover what came first"
            )
        return "; ".join(parts)

    def _say(self, instant: Point) -> str:
        return f"{_WORDS[instant[1]]} of {self.name(instant[0])}"

    def _step(self, source: int, target: int, rule: str, event: int) -> Step:
        first, second = point(source), point(target)
        text = reason(rule, self.name(first[0]), self.name(second[0]), event)
        return Step(first, second, rule, text)


_WORDS: dict[Letter, str] = {
    "S": "the start",
    "W": "the wait",
    "T": "the trigger",
    "X": "the exit",
    "E": "the completion",
}


# Orders of the shapes met last: the launch lists of a pipeline differ mostly in memory, and one
# program is asked for its order by every rule.  Long programs are as large as their closures, some
# megabytes, and are not kept.
_KEPT: Kept[tuple[Edges, list[int], int]] = Kept(64)
_LONG = 256  # launches


def _ordered(
    program: Program, assumptions: frozenset[str], fences: bool
) -> tuple[Edges, list[int], int]:
    """The edges of a program, their closure and the number of its unions.

    What is returned is shared by all orders of that shape, and never written to.
    """
    if len(program.launches) > _LONG:
        graph = edges(program, assumptions, fences)
        return (graph, *_closure(graph))
    key = (program.shape, assumptions, fences)
    kept = _KEPT.get(key)
    if kept is None:
        graph = edges(program, assumptions, fences)
        kept = _KEPT.keep(key, (replace(graph, launches=()), *_closure(graph)))
    graph, before, operations = kept
    return replace(graph, launches=program.launches), before, operations


def _closure(graph: Edges) -> tuple[list[int], int]:
    """For each instant the set of instants up to and including it, and the number of unions."""
    before: list[int] = []
    operations = 0
    for instant, parents in enumerate(graph.parents):
        row = 1 << instant
        for edge in parents:
            row |= before[edge.source]
        operations += len(parents)
        before.append(row)
    return before, operations
