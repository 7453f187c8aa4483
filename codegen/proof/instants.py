"""The five moments of a launch that the proof orders, and what they mean for its accesses.

S  the first CTA is resident
W  the earliest return of a dependency wait in any CTA; the same moment as S if the launch is
   plain or never waits
T  the last CTA has triggered or exited; the same moment as X without an explicit trigger
X  the last CTA has exited
E  the stores are flushed

An instant is addressed as (launch position, letter), or as the number `5 * position + letter`,
which grows in the host's order and is therefore a topological order of every edge set.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from kpipe.codegen.proof.program import Access, Copy, Kernel, Trigger

Letter = Literal["S", "W", "T", "X", "E"]
Point = tuple[int, Letter]

LETTERS: tuple[Letter, ...] = ("S", "W", "T", "X", "E")
PER_LAUNCH = len(LETTERS)
START, WAITED, TRIGGERED, EXITED, FLUSHED = range(PER_LAUNCH)

# m1: a launch completes after its programmatic parents even if it never waits.
# m3: the stores of a kernel are visible at its exit, in front of its flush.
ASSUMPTIONS = frozenset({"m1", "m3"})

# (earlier offset, later offset, rule) inside one launch.
InnerEdge = tuple[int, int, str]


def known(assumptions: frozenset[str]) -> frozenset[str]:
    """`assumptions` itself; ValueError names those that the proof does not know."""
    unknown = sorted(assumptions - ASSUMPTIONS)
    if unknown:
        allowed = ", ".join(sorted(ASSUMPTIONS))
        raise ValueError(f"unknown assumption {', '.join(unknown)}; allowed: {allowed}")
    return assumptions


def waits(node: Kernel | Copy) -> bool:
    """True if the node's wait can hold something back: launched with the attribute and waiting.

    The wait of a plain launch returns at once, as everything earlier has completed.
    """
    return isinstance(node, Kernel) and node.pdl and node.waits


def triggers(node: Kernel | Copy) -> bool:
    """True if every CTA of the node triggers explicitly; otherwise T is the last exit."""
    return isinstance(node, Kernel) and node.trigger != "never"


def number(position: int, node: Kernel | Copy, letter: Letter) -> int:
    """The number of an instant; letters that name the same moment get the same number.

    Raises ValueError for a letter that is no instant.
    """
    if letter not in LETTERS:
        raise ValueError(f"{letter!r} is no instant; allowed: {', '.join(LETTERS)}")
    if letter == "W" and not waits(node):
        letter = "S"
    elif letter == "T" and not triggers(node):
        letter = "X"
    return PER_LAUNCH * position + LETTERS.index(letter)


def point(instant: int) -> Point:
    """The launch position and the letter of an instant's number."""
    position, offset = divmod(instant, PER_LAUNCH)
    return position, LETTERS[offset]


def begin_offset(node: Kernel | Copy, early: bool) -> int:
    """The first moment at which an access may happen: S, or W behind a wait that holds."""
    return START if early or not waits(node) else WAITED


def end_offset(write: bool, assumptions: frozenset[str] = frozenset()) -> int:
    """The moment from which an access is over: X for a read; E for a write, X under m3."""
    return FLUSHED if write and "m3" not in assumptions else EXITED


def begin(node: Kernel | Copy, access: Access) -> Letter:
    """The letter of `begin_offset` for an access."""
    return LETTERS[begin_offset(node, access.early)]


def end(access: Access, assumptions: frozenset[str] = frozenset()) -> Letter:
    """The letter of `end_offset` for an access."""
    return LETTERS[end_offset(access.write, assumptions)]


def inner(node: Kernel | Copy, fences: bool = False) -> tuple[InnerEdge, ...]:
    """The order inside one launch: S <= W <= X <= E and S <= T <= X, plus W <= T for a kernel
    whose every trigger stands behind its wait.

    T is the latest CTA and W the earliest, so T <= W never holds; nor does E <= T.  With
    `fences`, W <= T is left out where no release fence stands in front of the trigger: the
    moments are ordered all the same, but no document promises that a dependent's prologue sees
    what the wait covered.
    """
    if isinstance(node, Copy):
        return _inner(False, "never", True)
    return _inner(waits(node), node.trigger, node.fenced or not fences)


@cache
def _inner(waiting: bool, trigger: Trigger, releases: bool) -> tuple[InnerEdge, ...]:
    edges: list[InnerEdge] = []
    if waiting:
        edges += [(START, WAITED, "enter"), (WAITED, EXITED, "body")]
    if trigger != "never":
        edges += [(START, TRIGGERED, "trigger"), (TRIGGERED, EXITED, "exit")]
        if waiting and trigger == "after_wait" and releases:
            edges.append((WAITED, TRIGGERED, "release"))
    if not waiting and trigger == "never":
        edges.append((START, EXITED, "body"))
    edges.append((EXITED, FLUSHED, "flush"))
    return tuple(edges)
