"""What is proved: kernels, streams and events in the order in which the host issues them.

This is the only code that the checker and the independent explorer share.  It holds data and no
order relation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

# Half-open interval per axis of a buffer; an empty tuple is the whole buffer.
Box = tuple[tuple[int, int], ...]

Trigger = Literal["never", "early", "after_wait"]

# How a kernel reaches memory: plain loads and stores, or bulk copies of the async proxy (TMA).
Path = Literal["generic", "async"]


@dataclass(frozen=True)
class Access:
    """One access of a kernel.

    `early` accesses may happen from the first resident CTA on (in front of the wait); others
    begin behind the kernel's wait.  In a kernel that never waits every access is early.  `path` has
    no part in whether two accesses conflict.

    `fenced` marks a plain store behind which a fence between the two proxies stands, in front of
    the kernel's trigger.  `zero` marks a write that leaves only zeros.  A kernel's also expects
    them, as counters do that reset themselves; a copy's is a memset and expects nothing.
    """

    buffer: str
    write: bool
    early: bool = False
    box: Box = ()
    zero: bool = False
    path: Path = "generic"
    fenced: bool = False

    def conflicts(self, other: Access) -> bool:
        """Same memory, and at least one of the two writes it."""
        if self.buffer != other.buffer or not (self.write or other.write):
            return False
        if len(self.box) != len(other.box):
            return True  # unknown footprint on one side: the whole buffer
        return all(a < d and c < b for (a, b), (c, d) in zip(self.box, other.box, strict=True))


@dataclass(frozen=True)
class Touched:
    """The buffers of a node's accesses, each way of touching one named once.

    `ways`: (buffer, write, early), in the order of the accesses.  `buffers`: (buffer, whether it is
    read, whether it is written).  `stores`: sites of plain stores without a fence between the
    proxies, `bulk_reads`: sites of reads by TMA.
    """

    ways: tuple[tuple[str, bool, bool], ...]
    buffers: tuple[tuple[str, bool, bool], ...]
    stores: tuple[int, ...]
    bulk_reads: tuple[int, ...]


def _touched(accesses: tuple[Access, ...]) -> Touched:
    ways = tuple(dict.fromkeys((a.buffer, a.write, a.early) for a in accesses))
    reads = {buffer for buffer, write, _ in ways if not write}
    writes = {buffer for buffer, write, _ in ways if write}
    named = dict.fromkeys(buffer for buffer, _, _ in ways)
    paths = [(site, a.write, a.path, a.fenced) for site, a in enumerate(accesses)]
    return Touched(
        ways,
        tuple((buffer, buffer in reads, buffer in writes) for buffer in named),
        tuple(s for s, write, path, fenced in paths if write and path == "generic" and not fenced),
        tuple(site for site, write, path, _ in paths if not write and path == "async"),
    )


class _Node:
    """What kernels and copies have in common: facts of the node alone, found once."""

    accesses: tuple[Access, ...]

    @cached_property
    def touched(self) -> Touched:
        """The buffers that it touches, and how."""
        return _touched(self.accesses)

    @property
    def shape(self) -> tuple:
        """All of it that the order of a program depends on: no name, and nothing of memory."""
        return (type(self),)


@dataclass(frozen=True)
class Kernel(_Node):
    """A kernel node.

    `pdl`: launched with programmatic stream serialisation.  `waits`: in every CTA some warp role
    executes the dependency wait; what other roles touch without it is early.  `trigger`: every CTA
    calls launch_dependents, at entry or behind its wait; "never" means the implicit trigger at
    exit, which is also that of a kernel in which only some CTAs call it.  `fenced` says that a
    release fence stands in front of the trigger.
    """

    name: str
    accesses: tuple[Access, ...] = ()
    pdl: bool = False
    waits: bool = False
    trigger: Trigger = "never"
    fenced: bool = False

    @cached_property
    def shape(self) -> tuple:
        """Every field but the name and the accesses."""
        return (type(self), self.pdl, self.waits, self.trigger, self.fenced)


@dataclass(frozen=True)
class Copy(_Node):
    """A memset, memcpy or host node: plain, and never a programmatic parent."""

    name: str
    accesses: tuple[Access, ...] = ()


@dataclass(frozen=True)
class Reuse(Copy):
    """Memory that the host gives back: what a later allocation in its place may do.

    A caching allocator hands a block on as soon as the host has given it back, to whatever is
    issued next on the stream that owns it.  So this writes the block in plain stream order, from
    here on; nothing waits for it, and what the host issues later uses another allocation.
    """


@dataclass(frozen=True)
class Launch:
    """A node issued on a stream."""

    stream: int
    node: Kernel | Copy


@dataclass(frozen=True)
class Record:
    """cudaEventRecord: binds the event to what the stream holds now."""

    stream: int
    event: int


@dataclass(frozen=True)
class Wait:
    """cudaStreamWaitEvent: on the latest record at the time of the call."""

    stream: int
    event: int


Action = Launch | Record | Wait


@dataclass(frozen=True)
class Segment:
    """Actions issued eagerly, or captured into one graph that is launched on `stream` at once."""

    actions: tuple[Action, ...]
    captured: bool = False
    stream: int = 0  # where a captured segment's graph is launched, and where capture begins

    @cached_property
    def shape(self) -> tuple:
        """The segment without names and memory: equal shapes make equal orders."""
        actions = (
            (action.stream, action.node.shape)
            if isinstance(action, Launch)
            else (action.stream, type(action), action.event)
            for action in self.actions
        )
        return (self.captured, self.stream, *actions)


@dataclass(frozen=True)
class Program:
    """Segments in host order.  Events and streams live across eager segments; a captured segment
    begins with all its streams and events empty."""

    segments: tuple[Segment, ...]

    @property
    def shape(self) -> tuple:
        """All that the order of the program depends on."""
        return tuple(segment.shape for segment in self.segments)

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Every launch in host order; positions in this tuple name launches everywhere."""
        return tuple(
            action
            for segment in self.segments
            for action in segment.actions
            if isinstance(action, Launch)
        )
