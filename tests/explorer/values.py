"""A finer truth than races: every execution on values, one memory cell at a time.

Each write stores its own tag, (launch, access).  A program is value-safe if in all executions
every read sees the same tag and every cell ends with the same one.  The device is the machine's;
what is added is memory.  Inside a launch the accesses of a cell come in program order, the
prologue's first.  A store is issued before its kernel exits and reaches memory at any later
moment until the flush, the stores of one launch in order; until then its own launch's later loads
see it (forwarding), and nobody else does.

Cells are independent: tags depend on nothing that was read, and an access never holds back the
device beyond its own launch's trigger, exit and flush.

What a step of the device, or issuing a store, does is to allow more; so these steps are taken as
soon as they are enabled, and only loads and arrivals of stores branch.  `every_step` branches on
everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from explorer.enqueue import Task, enqueue
from explorer.machine import (
    EXITED,
    RELEASED,
    RESIDENT,
    WAITED,
    Layout,
    Step,
    enabling_steps,
    ending_steps,
    settle,
)
from explorer.placement import Site, latest_cut, program_order
from explorer.placement import reads as loads
from kpipe.codegen.proof.program import Kernel, Program

Cell = tuple[Site, ...]  # the accesses that touch it, by launch and then in program order
Seen = tuple[int, int, Site | None]  # launch and access of a read, and what it saw
NONE: frozenset[Site] = frozenset()


@dataclass(frozen=True)
class CellValues:
    """What can be seen in one cell; the tag None is what memory held at first.

    `reads` and `finals` hold what the visited executions show, `safe` says that they all show
    what host order does.
    """

    cell: Cell
    reads: frozenset[Seen]
    finals: frozenset[Site | None]
    safe: bool
    states: int


def value_safe(program: Program, consumed: frozenset[Site] = NONE) -> bool:
    """Whether every execution reads and leaves what host order does.

    `consumed` names reads whose values a kernel has taken before it triggers.  Raises ValueError
    for an invalid capture, or for regions of one buffer with different numbers of axes.
    """
    return all(found.safe for found in _each_cell(program, consumed, True, False))


def cell_values(
    program: Program, consumed: frozenset[Site] = NONE, every_step: bool = False
) -> tuple[CellValues, ...]:
    """All that can be seen, cell by cell; errors as for `value_safe`."""
    return tuple(_each_cell(program, consumed, False, every_step))


def cells(program: Program) -> tuple[Cell, ...]:
    """Memory, cut where regions begin and end; cells with the same accesses are one."""
    sites: dict[str, list[Site]] = {}
    nodes = [launch.node for launch in program.launches]
    for number, node in enumerate(nodes):
        for place in program_order(node):
            sites.setdefault(node.accesses[place].buffer, []).append((number, place))
    found: dict[Cell, None] = {}
    for buffer, touching in sites.items():
        boxes = {site: nodes[site[0]].accesses[site[1]].box for site in touching}
        axes = {len(box) for box in boxes.values()} - {0}
        if len(axes) > 1:
            raise ValueError(f"regions of buffer {buffer} have different numbers of axes")
        corners = [
            sorted({edge for box in boxes.values() if box for edge in box[axis]})
            for axis in range(max(axes, default=0))
        ]
        # The corners below the first one stand for what lies outside every region.
        points = product(*([min(axis) - 1, *axis] for axis in corners))
        for point in points:
            cell = tuple(site for site in touching if _covers(boxes[site], point))
            if cell:
                found[cell] = None
    return tuple(found)


def _covers(box: tuple[tuple[int, int], ...], point: tuple[int, ...]) -> bool:
    return not box or all(low <= at < high for (low, high), at in zip(box, point, strict=True))


def _each_cell(
    program: Program, consumed: frozenset[Site], stop: bool, every_step: bool
) -> Iterator[CellValues]:
    tasks = enqueue(program)
    for number, place in sorted(consumed - loads(program, latest_cut(program))):
        text = f"access {place} of launch {number} is no read that can lie in front of its trigger"
        raise ValueError(text)
    for cell in cells(program):
        yield _Memory(tasks, cell, consumed).explore(stop, every_step)


def host_order(tasks: tuple[Task, ...], cell: Cell) -> tuple[frozenset[Seen], Site | None]:
    """What each read sees, and what is left, if launches run one at a time."""
    held: Site | None = None
    seen: set[Seen] = set()
    for site in cell:
        if tasks[site[0]].node.accesses[site[1]].write:
            held = site
        else:
            seen.add((*site, held))
    return frozenset(seen), held


class _Memory:
    """One cell on top of the device: bits above the device's say how far each access has come."""

    def __init__(self, tasks: tuple[Task, ...], cell: Cell, consumed: frozenset[Site]) -> None:
        self.tasks, self.cell = tasks, cell
        self.writes = [tasks[i].node.accesses[a].write for i, a in cell]
        layout = Layout(1)
        base = 4 * len(tasks) + len(tasks)
        # executed: a load has its value, a store is issued; arrived: a store is in memory.
        self.executed = [1 << base + 2 * k for k in range(len(cell))]
        self.arrived = [1 << base + 2 * k + 1 for k in range(len(cell))]
        self.ahead = [[k for k in range(j) if cell[k][0] == cell[j][0]] for j in range(len(cell))]
        self.begin = [self._begin(k, layout) for k in range(len(cell))]
        self.steps = list(self._steps(layout, consumed))

    def _begin(self, k: int, layout: Layout) -> int:
        """Bits that let an access execute: its phase, and what its launch does before it."""
        number, place = self.cell[k]
        node = self.tasks[number].node
        late = isinstance(node, Kernel) and node.waits and not node.accesses[place].early
        guard = layout.group(number, WAITED if late else RESIDENT)
        for earlier in self.ahead[k]:
            guard |= self.executed[earlier]
        return guard

    def _steps(self, layout: Layout, consumed: frozenset[Site]) -> Iterator[Step]:
        """The device's steps, held back by their own launch's accesses, and issuing of stores."""
        for number, task in enumerate(self.tasks):
            own = [k for k, site in enumerate(self.cell) if site[0] == number]
            executed = sum(self.executed[k] for k in own)
            taken = sum(self.executed[k] for k in own if self.cell[k] in consumed)
            arrived = sum(self.arrived[k] for k in own if self.writes[k])
            released = layout.group(number, RELEASED)
            for guard, effect in enabling_steps(number, task, layout):
                yield guard | (taken if effect == released else 0), effect
            for guard, effect in ending_steps(number, task, layout):
                exits = effect & layout.group(number, EXITED)
                yield guard | (executed if exits else arrived), effect
        for k, write in enumerate(self.writes):
            if write:
                yield self.begin[k], self.executed[k]

    def explore(self, stop: bool, every_step: bool) -> CellValues:
        """Depth first; `stop` ends it at the first value that host order does not show."""
        expected, last = host_order(self.tasks, self.cell)
        urgent = [] if every_step else self.steps
        reads: set[Seen] = set()
        finals: set[Site | None] = set()
        start = (self._settled(0, urgent), None)
        seen: set[tuple[int, Site | None]] = {start}
        stack: list[tuple[int, Site | None]] = [start]
        while stack and not (stop and (reads - expected or finals - {last})):
            state, held = stack.pop()
            after = list(self._memory_moves(state, held, reads))
            if every_step:
                after += [
                    (state | effect, held)
                    for guard, effect in self.steps
                    if state & guard == guard and state & effect != effect
                ]
            if not after:
                finals.add(held)
            for bits, value in after:
                key = self._settled(bits, urgent), value
                if key not in seen:
                    seen.add(key)
                    stack.append(key)
        safe = reads <= expected and finals <= {last}
        return CellValues(self.cell, frozenset(reads), frozenset(finals), safe, len(seen))

    def _memory_moves(
        self, state: int, held: Site | None, reads: set[Seen]
    ) -> Iterator[tuple[int, Site | None]]:
        for k, write in enumerate(self.writes):
            if write:
                first = all(state & self.arrived[e] for e in self.ahead[k] if self.writes[e])
                if first and state & self.executed[k] and not state & self.arrived[k]:
                    yield state | self.arrived[k], self.cell[k]
            elif state & self.begin[k] == self.begin[k] and not state & self.executed[k]:
                reads.add((*self.cell[k], self._loaded(k, state, held)))
                yield state | self.executed[k], held

    def _loaded(self, k: int, state: int, held: Site | None) -> Site | None:
        """What a load sees: its launch's latest store that is still on its way, else memory."""
        for earlier in reversed(self.ahead[k]):
            if self.writes[earlier]:
                on_its_way = not state & self.arrived[earlier]
                return self.cell[earlier] if on_its_way else held
        return held

    def _settled(self, state: int, urgent: list[Step]) -> int:
        """All enabled steps of `urgent`; repeated, as issuing a store may let its kernel exit."""
        while urgent and (after := settle(state, urgent)) != state:
            state = after
        return state
