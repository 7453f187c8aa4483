"""Deliberately wrong checkers: what the explorer and the GPU have to tell from the right one.

Each mutant changes one rule of the edge set, one reading of the program, or the end of an access.
The unsound ones order too much and so accept races; the others order too little and refuse safe
schedules.  An oracle that cannot kill them all has not tested the rule that they break.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kpipe.codegen.proof.edges import Builder, Edges, Stream
from kpipe.codegen.proof.instants import (
    FLUSHED,
    PER_LAUNCH,
    TRIGGERED,
    WAITED,
    begin,
    triggers,
    waits,
)
from kpipe.codegen.proof.order import Order, _closure
from kpipe.codegen.proof.program import Action, Copy, Kernel, Launch, Program, Record, Wait
from kpipe.codegen.proof.races import Pair, scan

Node = Kernel | Copy

_M3 = frozenset({"m3"})


class WrongOrder(Order):
    """The order that a given edge set makes, whichever rules built it."""

    def __init__(self, graph: Edges) -> None:
        self.edges = graph
        self.launches = graph.launches
        self.assumptions = frozenset()
        self.before, self.operations = _closure(graph)


def _same(program: Program) -> Program:
    return program


def _unordered(order: Order) -> frozenset[Pair]:
    return frozenset(scan(order).pairs)


@dataclass(frozen=True)
class Mutant:
    """A wrong checker; called with a program it returns the pairs that it takes for racy.

    `wrong`: the wrong rule in words.  `unsound`: it accepts races that the documents allow.
    `refuted`: a GPU contradicts orders that it claims; False for a rule that was never seen
    broken, or that claims less than the right one.
    """

    wrong: str
    unsound: bool
    refuted: bool
    builder: Callable[[], Builder] = Builder
    rewrite: Callable[[Program], Program] = _same
    find: Callable[[Order], frozenset[Pair]] = _unordered

    def order(self, program: Program) -> Order:
        """What precedes what by the wrong rule; launches keep their positions."""
        return WrongOrder(self.builder().build(self.rewrite(program)))

    def __call__(self, program: Program) -> frozenset[Pair]:
        """Conflicting pairs of `program` that the wrong rule leaves unordered."""
        return self.find(self.order(program))


# Wrong edges.


class _RelayedEventFences(Builder):
    """An event holds a stream back for its own work if another stream has passed it on."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[int, int] = {}

    def _record(self, record: Record, stream: Stream) -> None:
        super()._record(record, stream)
        self.recorded[record.event] = record.stream

    def _holds_back(self, launch: int, wait: Wait) -> bool:
        return self.queues[launch] != wait.stream or self.recorded[wait.event] != wait.stream


class _SelfEventFences(_RelayedEventFences):
    """An event recorded and waited for on one stream separates its launches."""

    def _holds_back(self, launch: int, wait: Wait) -> bool:
        return self.queues[launch] != wait.stream or self.recorded[wait.event] == wait.stream


class _EventBindsLate(Builder):
    """A wait covers what the recording stream holds at the wait, not at the record."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[int, Stream] = {}

    def _record(self, record: Record, stream: Stream) -> None:
        super()._record(record, stream)
        self.recorded[record.event] = stream

    def _wait(self, wait: Wait, stream: Stream) -> None:
        self._record(Record(wait.stream, wait.event), self.recorded[wait.event])
        super()._wait(wait, stream)


class _JoinFillsStreamEdge(Builder):
    """After a join the attribute has no effect on the edge within the stream."""

    def _eager_launch(self, launch: Launch, stream: Stream) -> None:
        if stream.pend:
            stream.parent = None
        super()._eager_launch(launch, stream)


class _ForkFences(Builder):
    """A record between two launches of a stream makes the second one plain."""

    def _record(self, record: Record, stream: Stream) -> None:
        super()._record(record, stream)
        stream.parent = None


class _CapturedEventEdgesFull(Builder):
    """In a graph only the edge within the capturing stream is programmatic."""

    def _full_in_graph(self, dependency: int, node: int, front: dict[int, int]) -> bool:
        return front[dependency] >= 0 or super()._full_in_graph(dependency, node, front)


class _SeveralDependenciesFull(Builder):
    """A graph node with several dependencies has full edges from all of them."""

    def _full_in_graph(self, dependency: int, node: int, front: dict[int, int]) -> bool:
        return len(front) > 1 or super()._full_in_graph(dependency, node, front)


class _ExitCompletes(Builder):
    """The implicit trigger at exit is the completion, and a completion covers the parents'."""

    def __init__(self) -> None:
        super().__init__(m1=True)

    def _released(self, first: int) -> int:
        return TRIGGERED if triggers(self.launches[first].node) else FLUSHED


class _TriggerPublishes(Builder):
    """A programmatic dependent starts behind the stores of its parents."""

    def _released(self, first: int) -> int:
        return FLUSHED


class _WaitCoversQueue(Builder):
    """A wait covers everything that its queue was given before, not the parents alone."""

    def _programmatic(self, first: int, second: int, names: tuple[str, str], event: int) -> None:
        super()._programmatic(first, second, names, event)
        if waits(self.launches[second].node):
            for earlier in range(second):
                if self.queues[earlier] == self.queues[second]:
                    self._edge(earlier, FLUSHED, second, WAITED, names[1], event)


class _GraphFencesEveryStream(Builder):
    """A graph starts behind the work of every stream, not of its own alone."""

    def _launch_graph(self, number: int, roots: list[int], running: dict[int, None]) -> None:
        for other, stream in self.streams.items():
            if other != number:
                for root in roots:
                    self._behind_tail(stream, root)
        super()._launch_graph(number, roots, running)


class _FullEdgeCoversPrevious(Builder):
    """A plain launch or a record covers the previous launch of the stream, not the whole stream."""

    def _eager_launch(self, launch: Launch, stream: Stream) -> None:
        super()._eager_launch(launch, stream)
        stream.tail = stream.tail[-1:]


class _GraphEndsAtLeaves(Builder):
    """A graph is over when the nodes without a dependent are."""

    def _launch_graph(self, number: int, roots: list[int], running: dict[int, None]) -> None:
        latest = {
            edge.source // PER_LAUNCH: target // PER_LAUNCH  # targets grow
            for target, edges in enumerate(self.parents)
            for edge in edges
        }
        leaves = {node: None for node in running if latest[node] == node}
        super()._launch_graph(number, roots, leaves)


# Wrong readings of the program.


def _each_node(change: Callable[[Node], Node]) -> Callable[[Program], Program]:
    def rewritten(action: Action) -> Action:
        if isinstance(action, Launch):
            return replace(action, node=change(action.node))
        return action

    return lambda program: Program(
        tuple(
            replace(segment, actions=tuple(map(rewritten, segment.actions)))
            for segment in program.segments
        )
    )


def _waiting(node: Node) -> Node:
    return replace(node, waits=True) if isinstance(node, Kernel) else node


def _triggering_late(node: Node) -> Node:
    early = isinstance(node, Kernel) and node.trigger == "early"
    return replace(node, trigger="after_wait") if early else node


def _unfenced(node: Node) -> Node:
    return replace(node, fenced=False) if isinstance(node, Kernel) else node


def _touching_whole_buffers(node: Node) -> Node:
    return replace(node, accesses=tuple(replace(a, box=()) for a in node.accesses))


def _eagerly(program: Program) -> Program:
    return Program(tuple(replace(segment, captured=False) for segment in program.segments))


# Wrong ends of an access.


def _stores_end_at_exit(order: Order) -> frozenset[Pair]:
    return frozenset(scan(order, _M3).pairs)


def _loads_end_at_flush(order: Order) -> frozenset[Pair]:
    nodes = [launch.node for launch in order.launches]
    return frozenset(
        (first, first_site, second, second_site)
        for second, node in enumerate(nodes)
        for second_site, later in enumerate(node.accesses)
        for first in range(second)
        for first_site, earlier in enumerate(nodes[first].accesses)
        if earlier.conflicts(later)
        and not order.ordered((first, "E"), (second, begin(node, later)))
    )


MUTANTS: dict[str, Mutant] = {
    "relayed_event_fences": Mutant(
        "an event that comes back through another stream fences its own stream",
        True,
        True,
        _RelayedEventFences,
    ),
    "self_event_fences": Mutant(
        "an event waited for on the stream that recorded it fences the stream",
        True,
        True,
        _SelfEventFences,
    ),
    "event_binds_late": Mutant(
        "a wait covers what the recording stream holds at the wait",
        True,
        True,
        _EventBindsLate,
    ),
    "join_fills_stream_edge": Mutant(
        "after a join the in-stream edge of an eager launch is full",
        True,
        True,
        _JoinFillsStreamEdge,
    ),
    "fork_fences": Mutant(
        "a record between two launches makes the edge between them full",
        True,
        True,
        _ForkFences,
    ),
    "captured_event_edges_full": Mutant(
        "captured fork and join edges are full",
        True,
        True,
        _CapturedEventEdgesFull,
    ),
    "several_dependencies_full": Mutant(
        "several captured dependencies are full edges",
        True,
        True,
        _SeveralDependenciesFull,
    ),
    "capture_is_eager": Mutant(
        "a captured segment has the order of the same actions issued eagerly",
        True,
        True,
        rewrite=_eagerly,
    ),
    "exit_completes": Mutant(
        "the implicit trigger is the completion, and completion is transitive",
        True,
        True,
        _ExitCompletes,
    ),
    "trigger_publishes": Mutant(
        "a trigger publishes the stores of its kernel",
        True,
        True,
        _TriggerPublishes,
    ),
    "early_trigger_releases": Mutant(
        "a trigger in front of the wait releases what the wait covers",
        True,
        True,
        rewrite=_each_node(_triggering_late),
    ),
    "silent_kernel_waits": Mutant(
        "a kernel that never waits is ordered as if it did",
        True,
        True,
        rewrite=_each_node(_waiting),
    ),
    "wait_covers_queue": Mutant(
        "a wait covers everything earlier in its queue",
        True,
        True,
        _WaitCoversQueue,
    ),
    "graph_fences_every_stream": Mutant(
        "a graph launch starts behind the work of every stream",
        True,
        True,
        _GraphFencesEveryStream,
    ),
    "completion_is_transitive": Mutant(
        "a kernel that never waits completes behind its parents (m1, not promised)",
        True,
        False,
        lambda: Builder(m1=True),
    ),
    "exit_publishes": Mutant(
        "stores are visible at the exit of their kernel (m3, not promised)",
        True,
        False,
        find=_stores_end_at_exit,
    ),
    "no_release": Mutant(
        "a trigger behind the wait releases nothing",
        False,
        False,
        lambda: Builder(fences=True),
        _each_node(_unfenced),
    ),
    "loads_end_at_flush": Mutant(
        "a read is over at the completion of its kernel only",
        False,
        False,
        find=_loads_end_at_flush,
    ),
    "full_edge_covers_previous": Mutant(
        "a plain launch or a record covers the previous launch only",
        False,
        False,
        _FullEdgeCoversPrevious,
    ),
    "graph_ends_at_leaves": Mutant(
        "a graph is over when its leaves are",
        False,
        False,
        _GraphEndsAtLeaves,
    ),
    "whole_buffers": Mutant(
        "every access touches its whole buffer",
        False,
        False,
        rewrite=_each_node(_touching_whole_buffers),
    ),
}
