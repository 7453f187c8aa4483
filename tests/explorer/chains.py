"""Short hand-written chains in a compact notation, for tests of the explorer and of a checker.

A is the writer of x, C its reader; B, D and Z touch other memory unless a test says so.
"""

from __future__ import annotations

from dataclasses import replace

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

READ_X = (Access("x", False),)
WRITE_X = (Access("x", True),)
WRITE_Y = (Access("y", True),)
READ_Y = (Access("y", False),)


def writer(trigger: str = "early", pdl: bool = False) -> Kernel:
    """A: stores x; by default it triggers at entry."""
    return Kernel("A", WRITE_X, pdl=pdl, trigger=trigger)


def reader(pdl: bool = True, waits: bool = False) -> Kernel:
    """C: loads x behind its wait if it has one."""
    return Kernel("C", READ_X, pdl=pdl, waits=waits)


def middle(
    name: str = "B", pdl: bool = True, waits: bool = False, trigger: str = "never"
) -> Kernel:
    """A kernel that touches neither x nor y."""
    return Kernel(name, (), pdl=pdl, waits=waits, trigger=trigger)


def touching(kernel: Kernel, accesses: tuple[Access, ...]) -> Kernel:
    """The same kernel with other accesses."""
    return replace(kernel, accesses=accesses)


def edge(source: int, target: int, event: int = 0) -> tuple[Action, ...]:
    """Record on one stream, wait on another or the same."""
    return Record(source, event), Wait(target, event)


def actions(*items: Kernel | Copy | tuple[int, Kernel | Copy] | tuple[Action, ...]) -> list[Action]:
    """Nodes go to stream 0, (stream, node) to that stream; tuples of actions are spliced in."""
    result: list[Action] = []
    for item in items:
        if isinstance(item, Kernel | Copy):
            result.append(Launch(0, item))
        elif isinstance(item[0], int):
            result.append(Launch(*item))
        else:
            result.extend(item)
    return result


def eager(*items: object) -> Program:
    """The chain, issued eagerly."""
    return Program((Segment(tuple(actions(*items))),))


def captured(*items: object) -> Program:
    """The chain as one graph on stream 0; streams left open are joined at the end."""
    written = actions(*items)
    for stream in sorted({action.stream for action in written} - {0}):
        written += edge(stream, 0, 50 + stream)
    return Program((Segment(tuple(written), True, 0),))


def graph(*items: object) -> Segment:
    """One captured segment of a longer program."""
    return captured(*items).segments[0]
