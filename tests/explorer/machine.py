"""The device side: visits every reachable state of a program and reports which accesses race.

A state is a set of bits.  Per thread block: resident, past its wait, released (it triggered or
exited), exited; per node: flushed.  Each step sets bits and is enabled while its guard bits are
set.  Nothing in here knows an order between two nodes: that comes out of the visited states only.

An access may happen at any moment of its phase, a load until its last block has exited and a
store until the flush.  So a conflicting pair races iff a state is reachable in which the second
may already happen while the first is not over.  Accesses that are said to be over before the
trigger end there instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from explorer.enqueue import Task, enqueue
from explorer.placement import Site
from kpipe.codegen.proof.program import Kernel, Program

Pair = tuple[int, int, int, int]
Step = tuple[int, int]  # guard bits, bits that it sets

READINGS = frozenset({"m1", "m3"})


@dataclass(frozen=True)
class Layout:
    """Where the bits of a node lie: four groups of `ctas` bits, then the flush bit."""

    ctas: int

    def group(self, node: int, which: int) -> int:
        """All blocks' bits of one group."""
        return ((1 << self.ctas) - 1) << (node * (4 * self.ctas + 1) + which * self.ctas)

    def one(self, node: int, which: int, cta: int) -> int:
        """One block's bit of one group."""
        return 1 << (node * (4 * self.ctas + 1) + which * self.ctas + cta)

    def flushed(self, node: int) -> int:
        """The flush bit of a node."""
        return 1 << (node * (4 * self.ctas + 1) + 4 * self.ctas)


RESIDENT, WAITED, RELEASED, EXITED = range(4)


@dataclass(frozen=True)
class Exploration:
    """What a run found: racy pairs, and how many states it visited."""

    racy: frozenset[Pair]
    states: int


def racy_pairs(
    program: Program,
    ctas: int = 1,
    assumptions: frozenset[str] = frozenset(),
    released: frozenset[Site] = frozenset(),
) -> frozenset[Pair]:
    """Conflicting accesses (i, access of i, j, access of j), i < j, that some execution disorders.

    i and j are positions in `program.launches`, accesses are positions in `node.accesses`.  With
    no assumption the machine does what the documents promise and no more; "m1": a kernel is not
    flushed before its programmatic parents are; "m3": a write is over when its kernel has exited.
    `released` names accesses that are over once every block of their kernel has triggered or
    exited, which no document promises and no contract can say.  One block per kernel is explored
    with every interleaving of every step, more blocks as described at `explore`.  Raises
    ValueError for an invalid capture, an unknown assumption, or fewer than one block.
    """
    return explore(program, ctas, assumptions, ctas == 1, released).racy


def explore(
    program: Program,
    ctas: int = 1,
    assumptions: frozenset[str] = frozenset(),
    every_step: bool = False,
    released: frozenset[Site] = frozenset(),
) -> Exploration:
    """As `racy_pairs`, with the number of states.

    Starting, triggering and passing a wait can only enable other steps and can only add states in
    which an access may happen; "not over" depends on exits and flushes alone.  So they are taken
    as soon as they are enabled, which loses no racy pair: for each path there is one with the
    same exits and flushes on which they come at once.  `every_step` branches on them as well,
    and so does a search in which `released` makes "not over" depend on triggers.
    """
    if ctas < 1:
        raise ValueError("a kernel has at least one thread block")
    if unknown := assumptions - READINGS:
        raise ValueError(f"unknown assumption {', '.join(sorted(unknown))}: known are m1 and m3")
    tasks = enqueue(program)
    layout = Layout(ctas)
    urgent: list[Step] = []
    moves: list[Step] = []
    for number, task in enumerate(tasks):
        urgent.extend(enabling_steps(number, task, layout))
        moves.extend(ending_steps(number, task, layout, "m1" in assumptions))
    if every_step or released:
        urgent, moves = [], urgent + moves
    return _visit(urgent, moves, _questions(tasks, layout, "m3" in assumptions, released))


def crossing_pairs(program: Program, ctas: int = 1) -> frozenset[Pair]:
    """Plain stores that TMA reads (i, access of i, j, access of j), i < j, where some execution
    has a block of the reader resident while a block of the writer has not exited.

    A store with a fence between the proxies behind it is left out.
    """
    tasks = enqueue(program)
    layout = Layout(ctas)
    steps: list[Step] = []
    questions: dict[tuple[int, int], list[Pair]] = {}
    for j, second in enumerate(tasks):
        steps.extend(enabling_steps(j, second, layout))
        steps.extend(ending_steps(j, second, layout, ordered=False))
        for i, first in enumerate(tasks[:j]):
            key = (layout.group(j, RESIDENT), layout.group(i, EXITED))
            for b, load in enumerate(second.node.accesses):
                for a, store in enumerate(first.node.accesses):
                    paths = (store.write, store.path, load.write, load.path)
                    crossing = paths == (True, "generic", False, "async") and not store.fenced
                    if crossing and store.conflicts(load):
                        questions.setdefault(key, []).append((i, a, j, b))
    return _visit([], steps, questions).racy


def enabling_steps(number: int, task: Task, layout: Layout) -> Iterator[Step]:
    """Start, trigger and wait of each block, in program order; guards look at earlier nodes."""
    may_start = 0
    may_pass = 0
    for other in task.flushed:
        may_start |= layout.flushed(other)
    for parent in task.parents:
        may_start |= layout.group(parent, RELEASED)
        may_pass |= layout.flushed(parent)
    for cta in range(layout.ctas):
        point = layout.one(number, RESIDENT, cta)
        waited = layout.one(number, WAITED, cta)
        released = layout.one(number, RELEASED, cta)
        yield may_start, point
        if not isinstance(task.node, Kernel):
            continue
        if task.node.trigger == "early":
            yield point, released
            point |= released
        if task.node.waits:
            yield point | may_pass, waited
            point |= waited
        if task.node.trigger == "after_wait":
            yield point, released


def ending_steps(number: int, task: Task, layout: Layout, ordered: bool = False) -> Iterator[Step]:
    """Exit of each block at the end of its program, then the flush of the node; `ordered` is m1."""
    node = task.node
    for cta in range(layout.ctas):
        point = layout.one(number, RESIDENT, cta)
        released = layout.one(number, RELEASED, cta)
        if isinstance(node, Kernel) and node.waits:
            point |= layout.one(number, WAITED, cta)
        if isinstance(node, Kernel) and node.trigger != "never":
            point |= released
        yield point, layout.one(number, EXITED, cta) | released
    complete = layout.group(number, EXITED)
    if ordered:
        for parent in task.parents:
            complete |= layout.flushed(parent)
    yield complete, layout.flushed(number)


def _questions(
    tasks: tuple[Task, ...], layout: Layout, exit_is_visible: bool, released: frozenset[Site]
) -> dict[tuple[int, int], list[Pair]]:
    """Conflicting pairs by (bits of which one lets the second happen, bits that end the first)."""
    questions: dict[tuple[int, int], list[Pair]] = {}
    for j, second in enumerate(tasks):
        waits = isinstance(second.node, Kernel) and second.node.waits
        for b, later in enumerate(second.node.accesses):
            begin = layout.group(j, WAITED if waits and not later.early else RESIDENT)
            for i in range(j):
                for a, earlier in enumerate(tasks[i].node.accesses):
                    if not earlier.conflicts(later):
                        continue
                    flush = earlier.write and not exit_is_visible
                    end = layout.flushed(i) if flush else layout.group(i, EXITED)
                    if (i, a) in released:
                        end = layout.group(i, RELEASED)
                    questions.setdefault((begin, end), []).append((i, a, j, b))
    return questions


def _visit(
    urgent: list[Step], moves: list[Step], questions: dict[tuple[int, int], list[Pair]]
) -> Exploration:
    """Depth first over all states, until each question has met a state that answers yes."""
    racy: list[Pair] = []
    pending = list(questions)
    state = settle(0, urgent)
    seen = {state}
    stack = [state]
    while stack and pending:
        state = stack.pop()
        met = [key for key in pending if state & key[0] and state & key[1] != key[1]]
        if met:
            for key in met:
                racy.extend(questions[key])
                pending.remove(key)
        for guard, effect in moves:
            if state & guard == guard and state & effect != effect:
                after = settle(state | effect, urgent)
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
    return Exploration(frozenset(racy), len(seen))


def settle(state: int, urgent: list[Step]) -> int:
    """Take every enabled step of `urgent`: one pass, since guards look at earlier steps only."""
    for guard, effect in urgent:
        if state & guard == guard:
            state |= effect
    return state
