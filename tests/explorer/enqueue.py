"""The host side of the machine: issues a program once and says what each node waits for.

The host never reads anything back, so that issuing everything before the device moves loses no
behaviour.  What comes out names only the work that a node itself looks at: its stream, the events
that its stream waited on, or its parents in the graph.  Nothing here is closed under transitivity.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kpipe.codegen.proof.program import Copy, Kernel, Launch, Program, Record, Segment


@dataclass(frozen=True)
class Task:
    """One launch as the device sees it; numbers are positions in `program.launches`.

    The first thread block may start when everything in `flushed` is flushed and every block of
    each kernel in `parents` has triggered or exited.  `parents` are the programmatic parents: a
    dependency wait returns when they are flushed.
    """

    node: Kernel | Copy
    flushed: frozenset[int]
    parents: frozenset[int]


@dataclass
class Stream:
    """A stream's queue: the work that it runs, and foreign work that its event waits named."""

    work: list[int] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    last_kernel: int | None = None  # the nearest earlier launch, if that is a kernel

    def everything(self) -> frozenset[int]:
        """All that a record binds: earlier work, and waits whether or not they are resolved."""
        return frozenset(self.work) | frozenset(self.held)


class Device:
    """Streams, events and tasks issued so far."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, frozenset[int]] = {}
        self.home: dict[int, int] = {}  # which stream's queue runs a node

    def stream(self, number: int) -> Stream:
        """The queue of a stream; a new one is empty."""
        return self.streams.setdefault(number, Stream())

    def issue(self, segment: Segment) -> None:
        """Issue eager actions one by one."""
        for action in segment.actions:
            if isinstance(action, Launch):
                self._launch(action)
            elif isinstance(action, Record):
                self.events[action.event] = self.stream(action.stream).everything()
            else:
                # Never recorded: no effect.  A stream is not held back for work of its own queue,
                # whichever way the event came.
                bound = self.events.get(action.event, frozenset())
                foreign = {number for number in bound if self.home[number] != action.stream}
                self.stream(action.stream).held |= foreign

    def _launch(self, launch: Launch) -> None:
        stream = self.stream(launch.stream)
        number = len(self.tasks)
        if _has_attribute(launch.node) and stream.last_kernel is not None:
            parents = frozenset({stream.last_kernel})
            self.tasks.append(Task(launch.node, frozenset(stream.held), parents))
        else:
            self.tasks.append(Task(launch.node, stream.everything(), frozenset()))
        stream.work.append(number)
        stream.last_kernel = number if isinstance(launch.node, Kernel) else None
        self.home[number] = launch.stream

    def launch_graph(self, segment: Segment) -> None:
        """Capture a segment and launch the graph: one plain item of the segment's stream."""
        stream = self.stream(segment.stream)
        before = stream.everything()
        first = len(self.tasks)
        for task in capture(segment, first):
            self.tasks.append(Task(task.node, task.flushed | before, task.parents))
        inside = range(first, len(self.tasks))
        stream.work.extend(inside)
        stream.last_kernel = None
        self.home.update(dict.fromkeys(inside, segment.stream))


def capture(segment: Segment, first: int) -> list[Task]:
    """The nodes of a captured segment, numbered from `first`, with their direct dependencies.

    A full edge stands in `flushed`, a programmatic one in `parents`.  Raises ValueError if CUDA
    would refuse the capture: work on a stream outside it, a wait for an event that was not
    recorded in it, or work that the origin stream has not joined at the end.
    """
    fronts: dict[int, frozenset[int]] = {segment.stream: frozenset()}
    events: dict[int, frozenset[int]] = {}
    tasks: list[Task] = []
    for action in segment.actions:
        if isinstance(action, Launch):
            front = _member(fronts, action.stream)
            fronts[action.stream] = frozenset({first + len(tasks)})
            kernels = [n for n in front if isinstance(tasks[n - first].node, Kernel)]
            parents = frozenset(kernels) if _has_attribute(action.node) else frozenset()
            tasks.append(Task(action.node, front - parents, parents))
        elif isinstance(action, Record):
            events[action.event] = _member(fronts, action.stream)
        elif action.event in events:
            old = fronts.get(action.stream, frozenset())
            fronts[action.stream] = old | events[action.event]
        else:
            raise ValueError(f"event {action.event} is waited for but not recorded in the capture")
    _require_joined(tasks, fronts[segment.stream], first)
    return tasks


def _member(fronts: dict[int, frozenset[int]], stream: int) -> frozenset[int]:
    if stream not in fronts:
        raise ValueError(f"stream {stream} is used in the capture but never forked into it")
    return fronts[stream]


def _require_joined(tasks: list[Task], front: frozenset[int], first: int) -> None:
    used: set[int] = set(front)
    for task in tasks:
        used |= task.flushed | task.parents
    loose = [number for number in range(first, first + len(tasks)) if number not in used]
    if loose:
        names = ", ".join(tasks[number - first].node.name for number in loose)
        raise ValueError(f"the capture ends before its origin stream has joined {names}")


def _has_attribute(node: Kernel | Copy) -> bool:
    return isinstance(node, Kernel) and node.pdl


def enqueue(program: Program) -> tuple[Task, ...]:
    """Every launch of a program in host order.  Raises ValueError for an invalid capture."""
    device = Device()
    for segment in program.segments:
        if segment.captured:
            device.launch_graph(segment)
        else:
            device.issue(segment)
    return tuple(device.tasks)


def is_valid(program: Program) -> bool:
    """Whether CUDA would accept every capture of the program."""
    return all(_captures(segment) for segment in program.segments if segment.captured)


def _captures(segment: Segment) -> bool:
    try:
        capture(segment, 0)
    except ValueError:
        return False
    return True
