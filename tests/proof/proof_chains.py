"""Small words for small programs, random programs, and the edge rules written out in full."""

from __future__ import annotations

import random
from itertools import product

from kpipe.codegen.proof.instants import LETTERS, Point
from kpipe.codegen.proof.program import (
    Access,
    Action,
    Copy,
    Kernel,
    Launch,
    Program,
    Record,
    Segment,
    Wait,
)

MAIN, SIDE, THIRD = 0, 1, 2


def reads(*buffers: str, early: bool = False) -> tuple[Access, ...]:
    return tuple(Access(buffer, False, early) for buffer in buffers)


def writes(*buffers: str, early: bool = False) -> tuple[Access, ...]:
    return tuple(Access(buffer, True, early) for buffer in buffers)


def plain(name: str, accesses: tuple[Access, ...] = (), trigger: str = "never") -> Kernel:
    return Kernel(name, accesses, trigger=trigger)


def pdl(
    name: str,
    accesses: tuple[Access, ...] = (),
    waits: bool = False,
    trigger: str = "never",
    fenced: bool = False,
) -> Kernel:
    return Kernel(name, accesses, True, waits, trigger, fenced)


def on(stream: int, *nodes: Kernel | Copy) -> tuple[Action, ...]:
    return tuple(Launch(stream, node) for node in nodes)


def event(number: int, source: int, target: int) -> tuple[Action, ...]:
    """`target` waits for what `source` holds now."""
    return Record(source, number), Wait(target, number)


def program(*parts: tuple[Action, ...], captured: bool = False) -> Program:
    return Program((Segment(tuple(action for part in parts for action in part), captured),))


def random_node(rng: random.Random, name: str) -> Kernel | Copy:
    accesses = tuple(
        Access(
            rng.choice("xyz"),
            rng.random() < 0.5,
            rng.random() < 0.4,
            rng.choice(((), (), ((0, 4),), ((2, 6),), ((4, 8),), ((0, 4), (0, 1)))),
        )
        for _ in range(rng.randint(1, 3))
    )
    if rng.random() < 0.15:
        return Copy(name, accesses)
    trigger = rng.choice(("never", "early", "after_wait"))
    has = [rng.random() < chance for chance in (0.7, 0.5, 0.5)]
    return Kernel(name, accesses, has[0], has[1], trigger, has[2])


def random_program(rng: random.Random, launches: int) -> Program:
    """Eager and captured segments over three streams with relayed, self and stale events."""
    segments: list[Segment] = []
    actions: list[Action] = []
    for position in range(launches):
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            kind = rng.choice((Record, Wait))
            actions.append(kind(rng.randrange(3), rng.randrange(3)))
        actions.append(Launch(rng.choice((0, 0, 1, 2)), random_node(rng, f"k{position}")))
        if rng.random() < 0.25:
            segments.append(Segment(tuple(actions), rng.random() < 0.5, rng.randrange(3)))
            actions = []
    segments.append(Segment(tuple(actions), rng.random() < 0.5, rng.randrange(3)))
    return Program(tuple(segments))


class FullRules:
    """Every edge of the rules, none left out, over named instants and plain sets: slow."""

    def __init__(self, given: Program, m1: bool = False) -> None:
        self.nodes = [launch.node for launch in given.launches]
        self.m1 = m1
        self.into: dict[Point, set[Point]] = {}
        self.queue: dict[int, int] = {}
        for position, node in enumerate(self.nodes):
            self._inside(position, node)
        self.tail: dict[int, set[int]] = {}
        self.pend: dict[int, set[int]] = {}
        self.last: dict[int, int | None] = {}
        events: dict[int, set[int]] = {}
        following = 0
        for segment in given.segments:
            if segment.captured:
                following = self._graph(segment, following)
                continue
            for action in segment.actions:
                stream = action.stream
                held = self.tail.get(stream, set()) | self.pend.get(stream, set())
                if isinstance(action, Launch):
                    self._eager(following, stream)
                    following += 1
                elif isinstance(action, Record):
                    events[action.event] = held
                else:
                    others = {p for p in events.get(action.event, ()) if self.queue[p] != stream}
                    self.pend[stream] = self.pend.get(stream, set()) | others
        self.ancestors = self._close()

    def _put(self, *pairs: tuple[Point, Point]) -> None:
        for first, second in pairs:
            self.into.setdefault(second, set()).add(first)

    def _inside(self, p: int, node: Kernel | Copy) -> None:
        kernel = isinstance(node, Kernel)
        self._put(*(((p, a), (p, b)) for a, b in ("SW", "WX", "XE", "ST", "TX")))
        if not (kernel and node.pdl and node.waits):
            self._put(((p, "W"), (p, "S")))
        if not kernel or node.trigger == "never":
            self._put(((p, "X"), (p, "T")))
        elif node.pdl and node.waits and node.trigger == "after_wait":
            self._put(((p, "W"), (p, "T")))

    def _start_early(self, parent: int, p: int) -> None:
        self._put(((parent, "T"), (p, "S")))
        if self.nodes[p].waits:
            self._put(((parent, "E"), (p, "W")))
        if self.m1:
            self._put(((parent, "E"), (p, "E")))

    def _eager(self, p: int, stream: int) -> None:
        node, tail = self.nodes[p], self.tail.get(stream, set())
        self.queue[p] = stream
        pend = self.pend.pop(stream, set())
        self._put(*(((q, "E"), (p, "S")) for q in pend))
        parent = self.last.get(stream)
        if isinstance(node, Kernel) and node.pdl and parent is not None:
            self._start_early(parent, p)
            self.tail[stream] = tail | {p}
        else:
            self._put(*(((q, "E"), (p, "S")) for q in tail))
            self.tail[stream] = {p}
        self.last[stream] = p if isinstance(node, Kernel) else None

    def _graph(self, segment: Segment, following: int) -> int:
        first = following
        fronts: dict[int, set[int]] = {}
        events: dict[int, set[int]] = {}
        for action in segment.actions:
            front = fronts.setdefault(action.stream, set())
            if isinstance(action, Record):
                events[action.event] = set(front)
            elif isinstance(action, Wait):
                front |= events.get(action.event, set())
            else:
                node = self.nodes[following]
                for q in front:
                    kernels = isinstance(node, Kernel) and isinstance(self.nodes[q], Kernel)
                    if kernels and node.pdl:
                        self._start_early(q, following)
                    else:
                        self._put(((q, "E"), (following, "S")))
                fronts[action.stream] = {following}
                following += 1
        stream = segment.stream
        held = self.tail.get(stream, set()) | self.pend.get(stream, set())
        graph = set(range(first, following))
        self.queue |= dict.fromkeys(graph, stream)
        self._put(*(((q, "E"), (p, "S")) for q, p in product(held, graph)))
        self.tail[stream] = graph or held
        self.pend[stream] = set()
        self.last[stream] = None
        return following

    def _close(self) -> dict[Point, set[Point]]:
        closed = {}
        for start in product(range(len(self.nodes)), LETTERS):
            seen, todo = {start}, [start]
            while todo:
                for source in self.into.get(todo.pop(), ()):
                    if source not in seen:
                        seen.add(source)
                        todo.append(source)
            closed[start] = seen
        return closed
