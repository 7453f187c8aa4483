"""The happens-before edges of a program, one rule per construct, eager and captured.

Eager bookkeeping per stream: `tail`, the items from the last plain one on; `pend`, what events
have joined since the last launch; `parent`, the kernel to which a launch with the attribute
attaches.  Captured: `front`, the nodes on which the stream's next node depends.  Stream labels
do not survive capture: the queue that runs a node is the stream on which its graph is launched.

Edges that others imply are left out where that is certain: a launch that another one completes
behind leaves `tail`, a stream joins each launch once, as its starts only move forward, and a
graph boundary binds only the nodes without a parent in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kpipe.codegen.proof.instants import (
    EXITED,
    FLUSHED,
    PER_LAUNCH,
    START,
    TRIGGERED,
    WAITED,
    inner,
    known,
    triggers,
    waits,
)
from kpipe.codegen.proof.program import (
    Copy,
    Kernel,
    Launch,
    Program,
    Record,
    Reuse,
    Segment,
    Wait,
)


class Edge(NamedTuple):
    """An earlier instant, the rule that puts it there, and the event concerned (or -1)."""

    source: int
    rule: str
    event: int = -1


@dataclass(frozen=True)
class Unbound:
    """A wait on an event that nothing has recorded: no effect eagerly, an invalid capture else.

    `segment` and `action` are positions in the program.
    """

    segment: int
    action: int
    stream: int
    event: int
    captured: bool


@dataclass(frozen=True)
class Edges:
    """`parents[i]` lists the edges into the instant with number i, all from smaller numbers;
    `queues[p]` is the queue that runs launch p, `in_graph[p]` whether it is a node of a graph."""

    launches: tuple[Launch, ...]
    queues: tuple[int, ...]
    in_graph: tuple[bool, ...]
    parents: tuple[tuple[Edge, ...] | list[Edge], ...]
    unbound: tuple[Unbound, ...]


@dataclass
class Stream:
    """The eager bookkeeping of one stream."""

    tail: list[int] = field(default_factory=list)
    pend: dict[int, int] = field(default_factory=dict)  # launch -> event that joined it
    parent: int | None = None
    held: set[int] = field(default_factory=set)  # joined by an earlier launch of the stream

    def consume(self) -> None:
        """A launch has taken the joins: everything behind it on the stream inherits them."""
        self.held.update(self.pend)
        self.pend = {}


def edges(
    program: Program, assumptions: frozenset[str] = frozenset(), fences: bool = False
) -> Edges:
    """Every edge of `program` in O(launches * parents).

    `assumptions` may hold "m1" (adds edges) and "m3" (adds none, see `instants.end`); ValueError
    for any other name.  `fences` keeps the release behind a wait only where it is fenced.
    """
    return Builder("m1" in known(assumptions), fences).build(program)


class Builder:
    """The rules, one method each; a wrong checker overrides one of them."""

    def __init__(self, m1: bool = False, fences: bool = False) -> None:
        self.m1 = m1
        self.fences = fences
        self.launches: list[Launch] = []
        self.queues: list[int] = []
        self.in_graph: list[bool] = []
        self.parents: list[tuple[Edge, ...] | list[Edge]] = []
        self.unbound: list[Unbound] = []
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, tuple[int, ...]] = {}

    def build(self, program: Program) -> Edges:
        """The edges of a whole program; a builder serves once."""
        for position, segment in enumerate(program.segments):
            self._segment(position, segment)
        return Edges(
            tuple(self.launches),
            tuple(self.queues),
            tuple(self.in_graph),
            tuple(self.parents),
            tuple(self.unbound),
        )

    def _segment(self, position: int, segment: Segment) -> None:
        if segment.captured:
            self._graph(position, segment)
            return
        for number, action in enumerate(segment.actions):
            stream = self.streams.setdefault(action.stream, Stream())
            if isinstance(action, Launch):
                self._eager_launch(action, stream)
            elif isinstance(action, Record):
                self._record(action, stream)
            elif action.event in self.events:
                self._wait(action, stream)
            else:
                self._never_recorded(position, number, action, captured=False)

    def _record(self, record: Record, stream: Stream) -> None:
        self.events[record.event] = (*stream.tail, *stream.pend)

    def _wait(self, wait: Wait, stream: Stream) -> None:
        for launch in self.events[wait.event]:
            if launch not in stream.held and self._holds_back(launch, wait):
                stream.pend[launch] = wait.event

    def _holds_back(self, launch: int, wait: Wait) -> bool:
        """A queue never holds back for its own work, not even through another stream."""
        return self.queues[launch] != wait.stream

    def _add(self, launch: Launch, queue: int, in_graph: bool) -> int:
        """Appends a launch with its inner order; returns its position."""
        position = len(self.launches)
        self.launches.append(launch)
        self.queues.append(queue)
        self.in_graph.append(in_graph)
        base = PER_LAUNCH * position
        slots: list[list[Edge]] = [[] for _ in range(PER_LAUNCH)]
        for source, target, rule in inner(launch.node, self.fences):
            slots[target].append(Edge(base + source, rule))
        self.parents.extend(slots)
        return position

    def _edge(self, first: int, start: int, second: int, stop: int, rule: str, event: int) -> None:
        source = Edge(PER_LAUNCH * first + start, rule, event)
        self.parents[PER_LAUNCH * second + stop].append(source)

    def _programmatic(self, first: int, second: int, names: tuple[str, str], event: int) -> None:
        """The second may start at the first's trigger; its wait, if any, covers the first."""
        self._edge(first, self._released(first), second, START, names[0], event)
        if waits(self.launches[second].node):
            self._edge(first, FLUSHED, second, WAITED, names[1], event)
        if self.m1:
            self._edge(first, FLUSHED, second, FLUSHED, "m1", event)

    def _released(self, first: int) -> int:
        """The moment of a kernel from which its programmatic dependents may start."""
        return TRIGGERED if triggers(self.launches[first].node) else EXITED

    def _full(self, first: int, second: int, rule: str, event: int = -1) -> None:
        self._edge(first, FLUSHED, second, START, rule, event)

    def _eager_launch(self, launch: Launch, stream: Stream) -> None:
        position = self._add(launch, launch.stream, in_graph=False)
        node = launch.node
        if isinstance(node, Reuse):  # behind all of the stream, and nothing is behind it
            self._joined(stream, position)
            self._behind_tail(stream, position)
            return
        parent = stream.parent if isinstance(node, Kernel) and node.pdl else None
        self._joined(stream, position)
        if parent is None:
            # Plain, or the attribute has no kernel to attach to: behind the whole stream.
            self._behind_tail(stream, position)
            stream.tail = [position]
        else:
            self._programmatic(parent, position, ("early_start", "wait"), -1)
            if waits(node):
                stream.tail.pop()  # the parent: complete whenever this launch is
            stream.tail.append(position)
        stream.consume()
        stream.parent = None if isinstance(node, Copy) else position

    def _joined(self, stream: Stream, position: int) -> None:
        for launch, event in stream.pend.items():
            self._full(launch, position, "join", event)

    def _behind_tail(self, stream: Stream, position: int) -> None:
        crosses = self.in_graph[position]
        for launch in stream.tail:
            boundary = crosses or self.in_graph[launch]
            self._full(launch, position, "boundary" if boundary else "stream")

    def _graph(self, position: int, segment: Segment) -> None:
        """Captures the segment and launches it as one plain item of its stream."""
        fronts: dict[int, dict[int, int]] = {}  # stream -> node -> event that brought it, or -1
        events: dict[int, Iterable[int]] = {}
        roots: list[int] = []
        running: dict[int, None] = {}  # nodes that no other node completes behind
        for number, action in enumerate(segment.actions):
            front = fronts.setdefault(action.stream, {})
            if isinstance(action, Launch):
                node = self._add(action, segment.stream, in_graph=True)
                if not front:
                    roots.append(node)
                if isinstance(action.node, Reuse):
                    for dependency, event in front.items():
                        self._full(dependency, node, "graph_full", event)
                    continue
                self._graph_node(node, front, running)
                fronts[action.stream] = {node: -1}
            elif isinstance(action, Record):
                events[action.event] = tuple(front)
            elif action.event in events:
                for node in events[action.event]:
                    front.setdefault(node, action.event)
            else:
                self._never_recorded(position, number, action, captured=True)
        self._launch_graph(segment.stream, roots, running)

    def _graph_node(self, node: int, front: dict[int, int], running: dict[int, None]) -> None:
        kernel = self.launches[node].node
        for dependency, event in front.items():
            full = self._full_in_graph(dependency, node, front)
            if full:
                self._full(dependency, node, "graph_full", event)
            else:
                self._programmatic(dependency, node, ("graph_start", "graph_wait"), event)
            if full or waits(kernel):
                running.pop(dependency, None)
        running[node] = None

    def _full_in_graph(self, dependency: int, node: int, front: dict[int, int]) -> bool:
        """Programmatic is an edge from a kernel to a kernel with the attribute, and no other."""
        kernel = self.launches[node].node
        attribute = isinstance(kernel, Kernel) and kernel.pdl
        return not attribute or isinstance(self.launches[dependency].node, Copy)

    def _launch_graph(self, number: int, roots: list[int], running: dict[int, None]) -> None:
        stream = self.streams.setdefault(number, Stream())
        for root in roots:
            self._joined(stream, root)
            self._behind_tail(stream, root)
        stream.parent = None
        if running:  # a graph without nodes still ends the programmatic chain, and holds all
            stream.tail = list(running)
            stream.consume()

    def _never_recorded(self, segment: int, number: int, action: Wait, captured: bool) -> None:
        self.unbound.append(Unbound(segment, number, action.stream, action.event, captured))
