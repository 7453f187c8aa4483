"""Schedules of the GPU fuzz: random programs as one line of text, and what may be claimed of them.

A line holds segments in host order: `E` opens an eager one, `G2` a graph launched on stream 2.
`K0pwef` launches a kernel on stream 0 with the attribute (p), a wait (w), a trigger at its entry
(e) or behind its wait (l), fenced (f); `M1` is a copy on stream 1; `R0.3` records event 3 on
stream 0 and `W1.3` makes stream 1 wait for it.  Accesses are left out: orders are judged.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from explorer.generator import MODES, random_program

from kpipe.codegen.proof.instants import waits
from kpipe.codegen.proof.program import (
    Action,
    Copy,
    Kernel,
    Launch,
    Program,
    Record,
    Segment,
    Wait,
)

SOURCES = ("T", "X", "E")
TARGETS = ("S", "W")
KERNEL, MEMSET, MEMCPY, RECORD, WAIT, BEGIN_GRAPH, END_GRAPH = range(7)
CAPTURED_EVENTS = 16  # of 32 events of the GPU side
PDL, WAITS, EARLY, LATE, FENCED = (1 << bit for bit in range(5))

_ACTION = re.compile(r"(?P<kind>[KMRW])(?P<stream>\d)(?:\.(?P<event>\d+))?(?P<flags>[pwelf]*)")
_TRIGGERS = {"e": "early", "l": "after_wait"}


def generate(seed: int, count: int) -> Iterator[Program]:
    """`count` programs of each mode: eager, captured, mixed."""
    for number in range(count):
        for mode in MODES:
            yield random_program(random.Random(f"fuzz:{seed}:{mode}:{number}"), mode)


def mode_of(program: Program) -> str:
    """eager or captured for a program of one segment, else mixed."""
    if len(program.segments) > 1:
        return "mixed"
    return "captured" if program.segments[0].captured else "eager"


def encode(program: Program) -> str:
    """The program as one line."""
    words = []
    for segment in program.segments:
        words.append(f"G{segment.stream}" if segment.captured else "E")
        words += [_encode_action(action) for action in segment.actions]
    return " ".join(words)


def _encode_action(action: Action) -> str:
    if not isinstance(action, Launch):
        return f"{'R' if isinstance(action, Record) else 'W'}{action.stream}.{action.event}"
    node = action.node
    if isinstance(node, Copy):
        return f"M{action.stream}"
    trigger = {"never": "", "early": "e", "after_wait": "l"}[node.trigger]
    flags = "p" * node.pdl + "w" * node.waits + trigger + "f" * node.fenced
    return f"K{action.stream}{flags}"


def decode(line: str) -> Program:
    """The program of a line, without accesses.  Raises ValueError for a word it does not know."""
    segments: list[tuple[list[Action], bool, int]] = []
    launches = 0
    for word in line.split():
        if word == "E" or re.fullmatch(r"G\d", word):
            segments.append(([], word != "E", int(word[1:] or 0)))
            continue
        match = _ACTION.fullmatch(word)
        if not match or not segments or (match["kind"] in "RW") != bool(match["event"]):
            raise ValueError(f"schedule {line!r} has an unknown word {word!r}")
        segments[-1][0].append(_decode_action(match, launches))
        launches += match["kind"] in "KM"
    return Program(tuple(Segment(tuple(actions), *rest) for actions, *rest in segments))


def _decode_action(match: re.Match[str], position: int) -> Action:
    kind, stream, flags = match["kind"], int(match["stream"]), match["flags"]
    if kind == "R":
        return Record(stream, int(match["event"]))
    if kind == "W":
        return Wait(stream, int(match["event"]))
    if kind == "M":
        return Launch(stream, Copy(f"n{position}"))
    trigger = next((_TRIGGERS[flag] for flag in flags if flag in _TRIGGERS), "never")
    kernel = Kernel(f"n{position}", (), "p" in flags, "w" in flags, trigger, "f" in flags)
    return Launch(stream, kernel)


def is_memcpy(position: int) -> bool:
    """Whether the GPU runs a copy at this position as a memcpy that looks at the others' flags;
    else as a memset, at whose start nobody looks."""
    return bool(position % 2)


def rows(program: Program) -> list[tuple[int, int, int, int]]:
    """The actions as the GPU side takes them: operation, stream, launch or event, behaviour.

    Captured events are numbered apart: CUDA refuses to wait outside a capture for an event that
    was recorded in one, even where the program never recorded that event.
    """
    events: tuple[dict[int, int], dict[int, int]] = ({}, {})
    table = []
    position = 0
    for segment in program.segments:
        if segment.captured:
            table.append((BEGIN_GRAPH, segment.stream, 0, 0))
        for action in segment.actions:
            if isinstance(action, Launch):
                table.append(_launch_row(action, position))
                position += 1
            else:
                operation = RECORD if isinstance(action, Record) else WAIT
                known = events[segment.captured]
                event = known.setdefault(action.event, len(known))
                first = CAPTURED_EVENTS if segment.captured else 0
                table.append((operation, action.stream, first + event, 0))
        if segment.captured:
            table.append((END_GRAPH, segment.stream, 0, 0))
    return table


def _launch_row(launch: Launch, position: int) -> tuple[int, int, int, int]:
    node = launch.node
    if isinstance(node, Copy):
        return MEMCPY if is_memcpy(position) else MEMSET, launch.stream, position, 0
    behaviour = PDL * node.pdl | WAITS * node.waits | FENCED * node.fenced
    behaviour |= {"never": 0, "early": EARLY, "after_wait": LATE}[node.trigger]
    return KERNEL, launch.stream, position, behaviour


def pairs(launches: int) -> list[tuple[int, int]]:
    """Pairs of launches in the order of the result bytes."""
    return [(first, second) for second in range(launches) for first in range(second)]


def bit(source: str, target: str) -> int:
    """The bit of an order in a pair's result byte."""
    return 1 << (2 * SOURCES.index(source) + TARGETS.index(target))


def observable(program: Program, first: int, second: int) -> int:
    """The orders of a pair that an execution can be seen to break, as bits.

    Starts and waits are all the targets there are: no rule but m1 puts an edge on another moment.
    A copy has no clock: its completion shows as a flag, its start only if it is a memcpy.
    """
    nodes = [launch.node for launch in program.launches]
    earlier, later = nodes[first], nodes[second]
    if isinstance(later, Copy):
        unseen = not is_memcpy(second) or (isinstance(earlier, Copy) and is_memcpy(first))
        return 0 if unseen else bit("E", "S")
    sources = ("E",) if isinstance(earlier, Copy) else SOURCES
    targets = TARGETS if waits(later) else TARGETS[:1]
    return sum(bit(source, target) for source in sources for target in targets)
