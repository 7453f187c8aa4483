"""Seeded random programs, and one-step weakenings of a program."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from explorer.enqueue import is_valid
from explorer.two_kernels import two_kernel_programs
from kpipe.codegen.proof.program import (
    Access,
    Action,
    Box,
    Copy,
    Kernel,
    Launch,
    Path,
    Program,
    Record,
    Segment,
    Wait,
)

__all__ = ["MODES", "random_program", "two_kernel_programs", "weaken", "weakenings", "with_paths"]

MODES = ("eager", "captured", "mixed")
BOXES: tuple[Box, ...] = ((), (), ((0, 2),), ((2, 4),), ((1, 3),))
EVENTS = 3  # few, so that they are re-recorded and become stale
CAPTURED_EVENTS = 100  # events of captures are told apart from eager ones


class Writer:
    """Writes the actions of one segment; a captured one stays a valid capture."""

    def __init__(self, rng: random.Random, streams: int, origin: int | None) -> None:
        self.rng = rng
        self.streams = range(streams)
        self.origin = origin  # None in an eager segment
        self.members = set(self.streams) if origin is None else {origin}
        self.recorded: list[int] = []
        self.actions: list[Action] = []
        self.latest = 0 if origin is None else origin  # the stream of the latest launch

    def record(self, stream: int) -> int:
        """Record some event on a stream."""
        event = self.rng.randrange(EVENTS) + (0 if self.origin is None else CAPTURED_EVENTS)
        self.actions.append(Record(stream, event))
        self.recorded.append(event)
        return event

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait; in a capture the stream becomes part of it."""
        self.actions.append(Wait(stream, event))
        self.members.add(stream)

    def some_member(self) -> int:
        """A stream on which work may be issued."""
        return self.rng.choice(sorted(self.members))

    def synchronise(self) -> None:
        """One pattern of events between two launches."""
        rng = self.rng
        kind = rng.choices(
            ("edge", "stale", "self", "relay", "record", "never"), (10, 4, 2, 3, 2, 1)
        )[0]
        source = self.some_member()
        target = rng.choice(self.streams)
        if kind == "edge":
            self.wait(target, self.record(source))
        elif kind == "stale" and self.recorded:
            self.wait(target, rng.choice(self.recorded))
        elif kind == "self":
            self.wait(source, self.record(source))
        elif kind == "relay":
            self.wait(target, self.record(source))
            self.wait(source, self.record(target))
        elif kind == "record":
            self.record(source)
        elif kind == "never" and self.origin is None:
            self.actions.append(Wait(target, EVENTS))

    def launch(self, node: Kernel | Copy, care: float) -> None:
        """Launch on some stream, usually behind the latest launch; forks it where needed."""
        stream = self.rng.choice(self.streams)
        if stream != self.latest and self.rng.random() < care:
            self.wait(stream, self.record(self.latest))
        elif stream not in self.members:
            self.wait(stream, self.record(self.some_member()))
        self.actions.append(Launch(stream, node))
        self.latest = stream

    def fork_all(self) -> None:
        """Bring every stream into the capture while it is empty: later forks can be dropped."""
        for stream in self.streams:
            if stream != self.origin:
                self.wait(stream, self.record(self.origin or 0))

    def join_all(self) -> None:
        """End of a capture: the origin stream waits for every other member."""
        for stream in sorted(self.members):
            if self.origin is not None and stream != self.origin:
                self.wait(self.origin, self.record(stream))


def random_program(rng: random.Random, mode: str = "mixed", most: int = 6) -> Program:
    """A program of 2 to `most` nodes on 1 to 3 streams.

    `mode` is "eager" or "captured" (one segment) or "mixed" (two to four segments, sometimes a
    step that is issued twice).  Captures are valid.  Raises ValueError for another mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is not one of {', '.join(MODES)}")
    streams = rng.choice((1, 2, 2, 2, 3, 3))
    care = rng.choice((0.5, 0.9, 1.0))  # careless programs are nearly all racy
    count = max(rng.randint(2, most), rng.randint(2, most))
    nodes = [_random_node(rng, f"n{k}", care) for k in range(count)]
    if mode != "mixed":
        return Program((_segment(rng, streams, nodes, mode == "captured", care),))
    twice = 2 * len(nodes) <= most and rng.random() < 0.5
    cuts = sorted(
        rng.randint(0, len(nodes)) for _ in range(rng.choice((0, 1) if twice else (1, 2)))
    )
    parts = [nodes[a:b] for a, b in zip([0, *cuts], [*cuts, len(nodes)], strict=True)]
    segments = tuple(
        _segment(rng, streams, part, bool(part) and rng.random() < 0.5, care) for part in parts
    )
    return Program(segments * 2 if twice else segments)


def _segment(
    rng: random.Random, streams: int, nodes: list[Kernel | Copy], captured: bool, care: float
) -> Segment:
    origin = rng.randrange(streams) if captured else 0
    writer = Writer(rng, streams, origin if captured else None)
    if captured and rng.random() < 0.5:
        writer.fork_all()
    for node in nodes:
        while rng.random() < 0.4:
            writer.synchronise()
        writer.launch(node, care)
    if not captured and rng.random() < 0.5:
        writer.synchronise()
    writer.join_all()
    return Segment(tuple(writer.actions), captured, origin)


def _random_node(rng: random.Random, name: str, care: float) -> Kernel | Copy:
    accesses = tuple(_random_access(rng, care) for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 2))))
    if rng.random() < 0.12:
        return Copy(name, accesses)
    return Kernel(
        name,
        accesses,
        pdl=rng.random() < 0.6,
        waits=rng.random() < care,
        trigger=rng.choice(("never", "early", "after_wait")),
        fenced=rng.random() < 0.5,
    )


def _random_access(rng: random.Random, care: float) -> Access:
    early = rng.random() < 0.4 * (1.1 - care)
    return Access(rng.choice("xxxy"), rng.random() < 0.45, early, rng.choice(BOXES))


def with_paths(program: Program, rng: random.Random) -> Program:
    """The program with most of its loads by TMA, and some stores that a proxy fence follows."""

    def path(access: Access) -> Path:
        return "async" if rng.random() < (0.3 if access.write else 0.7) else "generic"

    def changed(action: Action) -> Action:
        if not isinstance(action, Launch):
            return action
        accesses = tuple(
            replace(access, path=path(access), fenced=access.write and rng.random() < 0.2)
            for access in action.node.accesses
        )
        return replace(action, node=replace(action.node, accesses=accesses))

    return Program(
        tuple(
            replace(segment, actions=tuple(changed(action) for action in segment.actions))
            for segment in program.segments
        )
    )


def weakenings(program: Program) -> Iterator[Program]:
    """Each program with one protection less: an event wait dropped, a kernel's wait dropped, the
    attribute added, or a trigger moved forward.

    Launches keep their positions; a weakening that makes a capture invalid is left out.
    """
    for s, segment in enumerate(program.segments):
        for a, action in enumerate(segment.actions):
            for substitute in _weaker(action):
                actions = (*segment.actions[:a], *substitute, *segment.actions[a + 1 :])
                changed = replace(segment, actions=actions)
                weaker = Program((*program.segments[:s], changed, *program.segments[s + 1 :]))
                if is_valid(weaker):
                    yield weaker


def _weaker(action: Action) -> Iterator[tuple[Action, ...]]:
    if isinstance(action, Wait):
        yield ()
    elif isinstance(action, Launch) and isinstance(action.node, Kernel):
        kernel = action.node
        changes: list[Kernel] = []
        if kernel.waits:
            changes.append(replace(kernel, waits=False))
        if not kernel.pdl:
            changes.append(replace(kernel, pdl=True))
        if kernel.trigger == "never":
            changes.append(replace(kernel, trigger="after_wait"))
        if kernel.trigger != "early":
            changes.append(replace(kernel, trigger="early"))
        for weaker in changes:
            yield (replace(action, node=weaker),)


def weaken(program: Program, rng: random.Random) -> Program | None:
    """One random weakening, or None if nothing is left to weaken."""
    choices = list(weakenings(program))
    return rng.choice(choices) if choices else None
