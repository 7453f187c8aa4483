"""Races: conflicting accesses of which the earlier one is not over when the later one may begin.

A pair in host order is safe iff the end of the first (X for a read, E for a write) precedes the
begin of the second (S in front of a wait or without one, W behind it).

Memory that the host gives back (`Reuse`) conflicts with what was issued ahead of it.  What comes
later uses another allocation, except for a graph that has used the memory before: its nodes keep
the address, so their accesses are racy whatever orders them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from kpipe.codegen.proof.instants import (
    PER_LAUNCH,
    begin,
    begin_offset,
    end,
    end_offset,
    known,
    number,
)
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Access, Copy, Kernel, Program, Reuse

# PROXY: ordered, but read by another path than it was written (`proxies.py`).
Kind = Literal["RAW", "WAR", "WAW", "PROXY"]
Verdict = Literal["assumed", "racy"]
Assumption = Literal["", "m1", "m3", "m1 or m3", "fence"]

# (launch position, position among the launch's accesses)
Site = tuple[int, int]
# (first launch, its access, second launch, its access)
Pair = tuple[int, int, int, int]

_M1 = frozenset({"m1"})
_M3 = frozenset({"m3"})


@dataclass(frozen=True, order=True)
class Race:
    """A conflicting pair that the documents do not order.

    `verdict` is "racy", or "assumed" if the pair is safe under `assumption`, a reading that was
    measured and that no document promises.  A safe pair makes no Race.
    """

    first: Site
    second: Site
    buffer: str
    kind: Kind
    verdict: Verdict
    assumption: Assumption

    @property
    def declared(self) -> str:
        """The buffer as the spec names it, whichever copy of it the race is about."""
        return self.buffer.partition("@")[0].partition(" of layer ")[0]


@dataclass(slots=True)
class _History:
    """The accesses of one buffer so far: their ends as bit sets.

    `captured`: some are of graphs, which keep the address; `returned`: where the host has then
    given the memory back.
    """

    writes: int = 0
    reads: int = 0
    captured: bool = False
    returned: list[tuple[int, int, Access]] = field(default_factory=list)


@dataclass
class Scan:
    """Unordered conflicting pairs, and how much work it took to find them.

    `looked`: accesses compared with their buffer's history, one bit set operation each; those of
    one launch that touch a buffer in the same way are one.  `compared`: pairs whose regions were
    compared, which are only pairs that are unordered.
    """

    pairs: list[Pair] = field(default_factory=list)
    looked: int = 0
    compared: int = 0


def scan(order: Order, assumptions: frozenset[str] = frozenset(), stop: bool = False) -> Scan:
    """Every unordered conflicting pair, older ones included, in one pass over the accesses.

    The ends of a buffer's accesses form a bit set, so one subtraction leaves those that do not
    precede a new access; all the pairs that are in order are never visited.  With `stop`, behind
    the first launch that has such a pair nothing is looked at.
    """
    found = Scan()
    histories: dict[str, _History] = {}
    for position, launch in enumerate(order.launches):
        if stop and found.pairs:
            break
        node = launch.node
        base = PER_LAUNCH * position
        for way in node.touched.ways:
            buffer, write, early = way
            history = histories.get(buffer)
            if history is None:
                continue
            found.looked += 1
            ends = history.writes | history.reads if write else history.writes
            started = order.before[base + begin_offset(node, early)]
            late = ends ^ (ends & started)
            if late:
                found.pairs += _late(order, late, position, way, assumptions, found)
            if history.returned and order.edges.in_graph[position]:
                found.pairs += _returned(history, node, position, way)
        _remember(order, histories, position, assumptions)
    found.pairs.sort()
    return found


def _sites(node: Kernel | Copy, way: tuple[str, bool, bool]) -> list[tuple[int, Access]]:
    return [
        (site, access)
        for site, access in enumerate(node.accesses)
        if (access.buffer, access.write, access.early) == way
    ]


def _late(
    order: Order,
    late: int,
    second: int,
    way: tuple[str, bool, bool],
    assumptions: frozenset[str],
    found: Scan,
) -> Iterator[Pair]:
    """The pairs behind the ends that do not precede launch `second` touching its buffer so."""
    sites = _sites(order.launches[second].node, way)
    while late:
        instant = (late & -late).bit_length() - 1
        late &= late - 1
        position = instant // PER_LAUNCH
        node = order.launches[position].node
        for site, earlier in enumerate(node.accesses):
            if earlier.buffer != way[0]:
                continue
            if number(position, node, end(earlier, assumptions)) != instant:
                continue
            found.compared += len(sites)
            for second_site, access in sites:
                if earlier.conflicts(access):
                    yield position, site, second, second_site


def _returned(
    history: _History, node: Kernel | Copy, second: int, way: tuple[str, bool, bool]
) -> Iterator[Pair]:
    """The pairs of memory that was given back with a node of a graph that uses it afterwards."""
    if isinstance(node, Reuse):
        return
    for first, first_site, given in history.returned:
        for site, access in _sites(node, way):
            if given.conflicts(access):
                yield first, first_site, second, site


def _remember(
    order: Order, histories: dict[str, _History], position: int, assumptions: frozenset[str]
) -> None:
    """No access conflicts with its own launch, so a launch is remembered behind all of its own."""
    node = order.launches[position].node
    in_graph = order.edges.in_graph[position]
    if isinstance(node, Reuse):
        for site, access in enumerate(node.accesses if not in_graph else ()):
            history = histories.get(access.buffer)
            if history and history.captured:
                history.returned.append((position, site, access))
        return
    base = PER_LAUNCH * position
    read = 1 << base + end_offset(False)
    written = 1 << base + end_offset(True, assumptions)
    for buffer, reads, writes in node.touched.buffers:
        history = histories.get(buffer)
        if history is None:
            history = histories[buffer] = _History()
        if reads:
            history.reads |= read
        if writes:
            history.writes |= written
        if in_graph:
            history.captured = True


def racy_pairs(program: Program, assumptions: frozenset[str] = frozenset()) -> frozenset[Pair]:
    """Every conflicting pair that `program` leaves unordered, launches in host order.

    Without assumptions this is what the documents promise.  Raises ValueError for unknown ones.
    """
    return frozenset(scan(Order(program, known(assumptions)), assumptions).pairs)


def compare_all(program: Program, assumptions: frozenset[str] = frozenset()) -> frozenset[Pair]:
    """The same set as `racy_pairs`, by asking about each pair of accesses: quadratic."""
    order = Order(program, known(assumptions))
    accesses = [
        (position, site, launch.node, access)
        for position, launch in enumerate(order.launches)
        for site, access in enumerate(launch.node.accesses)
    ]
    in_graph = order.edges.in_graph

    def baked(first: int, second: int, buffer: str) -> bool:
        """Whether a graph uses the buffer behind its release, and did so ahead of it."""
        ahead = (
            in_graph[position] and access.buffer == buffer and not isinstance(node, Reuse)
            for position, _, node, access in accesses
            if position < first
        )
        return in_graph[second] and not in_graph[first] and any(ahead)

    return frozenset(
        (first, first_site, second, second_site)
        for first, first_site, released, earlier in accesses
        for second, second_site, node, later in accesses
        if first < second
        and earlier.conflicts(later)
        and (
            baked(first, second, later.buffer) and not isinstance(node, Reuse)
            if isinstance(released, Reuse)
            else not order.ordered((first, end(earlier, assumptions)), (second, begin(node, later)))
        )
    )


def check(program: Program) -> tuple[Race, ...]:
    """Every pair that the documents do not order, sorted, with what would make it safe."""
    return _checked(program, scan(order := Order(program)).pairs, order)


def check_all(program: Program, strict: Order | None = None) -> tuple[Race, ...]:
    """`check` and `unfenced` together, with what they share computed once.

    `strict` is the program's order with fences, where the caller has it.
    """
    fenced = scan(strict or Order(program, fences=True)).pairs
    if not fenced:  # stricter than both, and usually enough
        return ()
    order = Order(program)
    pairs = scan(order).pairs
    return (*_checked(program, pairs, order), *_unfenced(fenced, frozenset(pairs), order))


def _checked(program: Program, pairs: list[Pair], order: Order) -> tuple[Race, ...]:
    if not pairs:
        return ()
    measured = Order(program, _M1)
    return tuple(sorted(_race(pair, order, measured) for pair in pairs))


def _race(pair: Pair, order: Order, measured: Order) -> Race:
    first, first_site, second, second_site = pair
    node = order.launches[second].node
    earlier = order.launches[first].node.accesses[first_site]
    later = node.accesses[second_site]
    started = (second, begin(node, later))
    under_m1 = measured.ordered((first, end(earlier)), started)
    under_m3 = order.ordered((first, end(earlier, _M3)), started)
    assumption: Assumption = ""
    if under_m1 and under_m3:
        assumption = "m1 or m3"
    elif under_m1:
        assumption = "m1"
    elif under_m3:
        assumption = "m3"
    # Both together add nothing: a chain from the exit of the first that uses m1 starts at a
    # programmatic dependent or at the completion, and m1 puts the completion on it as well.
    verdict: Verdict = "assumed" if assumption else "racy"
    sites = (first, first_site), (second, second_site)
    return Race(*sites, later.buffer, _kind(earlier, later), verdict, assumption)


def _kind(earlier: Access, later: Access) -> Kind:
    if not earlier.write:
        return "WAR"
    return "WAW" if later.write else "RAW"


def unfenced(program: Program) -> tuple[Race, ...]:
    """Reads after writes that are ordered in time, but only through a trigger that stands behind
    a wait without a release fence: measured to be fresh, promised only with the fence.

    Sorted; verdict "assumed", assumption "fence".  Disjoint from `check`.
    """
    fenced = scan(Order(program, fences=True)).pairs
    return _unfenced(fenced, racy_pairs(program), Order(program))


def _unfenced(pairs: list[Pair], in_time: frozenset[Pair], order: Order) -> tuple[Race, ...]:
    races = []
    for first, first_site, second, second_site in pairs:
        pair = (first, first_site, second, second_site)
        earlier = order.launches[first].node.accesses[first_site]
        later = order.launches[second].node.accesses[second_site]
        if pair in in_time or _kind(earlier, later) != "RAW":
            continue
        sites = (first, first_site), (second, second_site)
        races.append(Race(*sites, later.buffer, "RAW", "assumed", "fence"))
    return tuple(sorted(races))
