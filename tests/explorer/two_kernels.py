"""Every program of two nodes: node kinds x streams x event patterns x eager and graph cuts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from explorer.enqueue import is_valid
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

# All four probes on one buffer: one exploration decides every combination of accesses.
PROBES = tuple(Access("x", write, early) for write, early in product((False, True), repeat=2))
SPARE = 2  # a third stream, for relays
PATTERNS = (
    "none",
    "edge",
    "edge_back",
    "stale",
    "self",
    "relay",
    "relay_back",
    "relay_on",
    "twice",
    "never",
)


def node_kinds() -> Iterator[Kernel | Copy]:
    """Ten kinds of kernel and a copy, each with every probe."""
    for pdl, waits in product((False, True), repeat=2):
        yield Kernel("k", PROBES, pdl, waits, "never")
        yield Kernel("k", PROBES, pdl, waits, "early")
        if waits:
            yield Kernel("k", PROBES, pdl, waits, "after_wait")
    yield Copy("c", PROBES)


def around(pattern: str, first: int, second: int) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """Actions in front of the first launch and between the launches, on streams first, second."""

    def edge(source: int, target: int, event: int) -> tuple[Action, ...]:
        return Record(source, event), Wait(target, event)

    between: dict[str, tuple[Action, ...]] = {
        "none": (),
        "edge": edge(first, second, 0),
        "edge_back": edge(second, first, 0),
        "stale": (Wait(second, 0),),
        "self": edge(second, second, 0),
        "relay": (*edge(second, SPARE, 0), *edge(SPARE, second, 1)),
        "relay_back": (*edge(first, second, 0), *edge(second, first, 1)),
        "relay_on": (*edge(first, SPARE, 0), *edge(SPARE, second, 1)),
        "twice": (Record(first, 0), Wait(second, 0), Record(second, 0), Wait(second, 0)),
        "never": (Wait(second, 9),),
    }
    return ((Record(first, 0),) if pattern == "stale" else ()), between[pattern]


def two_kernel_programs(share: slice = slice(None)) -> Iterator[Program]:
    """The exhaustive list, without repetitions; every capture in it is valid.

    `share` takes some of the 121 pairs of node kinds, for work in parts.
    """
    for nodes in list(product(list(node_kinds()), repeat=2))[share]:
        seen: set[Program] = set()
        for streams, pattern in product(product((0, 1), repeat=2), PATTERNS):
            for program in _cuts(nodes, streams, *around(pattern, *streams)):
                if program not in seen and is_valid(program):
                    seen.add(program)
                    yield program


def _cuts(
    nodes: tuple[Kernel | Copy, ...],
    streams: tuple[int, int],
    before: tuple[Action, ...],
    between: tuple[Action, ...],
) -> Iterator[Program]:
    """All eager; one graph; a graph for the first, the second or both launches."""
    first, second = (Launch(s, node) for s, node in zip(streams, nodes, strict=True))
    whole = (*before, first, *between, second)
    yield Program((Segment(whole),))
    for origin in (0, 1):
        yield Program((_graph(origin, whole, sorted({0, 1, SPARE} - {origin})),))
        yield Program((_graph(origin, whole, []),))
        for capture in _one_node_graphs(origin, second):
            yield Program((Segment((*before, first, *between)), capture))
        for capture in _one_node_graphs(origin, first):
            yield Program((Segment(before), capture, Segment((*between, second))))
            for other in (*_one_node_graphs(0, second), *_one_node_graphs(1, second)):
                yield Program((Segment(before), capture, Segment(between), other))


def _one_node_graphs(origin: int, launch: Launch) -> Iterator[Segment]:
    """A graph launched on stream `origin` whose node was captured on it or on a forked stream."""
    yield _graph(origin, (launch,), [launch.stream] if launch.stream != origin else [])


def _graph(origin: int, actions: tuple[Action, ...], forked: list[int]) -> Segment:
    """A capture that forks the given streams first and joins all that it used at the end."""
    forks: list[Action] = []
    for event, stream in enumerate(forked, start=20):
        forks += [Record(origin, event), Wait(stream, event)]
    used = {action.stream for action in actions} | set(forked)
    joins: list[Action] = []
    for event, stream in enumerate(sorted(used - {origin}), start=30):
        joins += [Record(stream, event), Wait(origin, event)]
    return Segment((*forks, *actions, *joins), True, origin)
