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
class Kernel:
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


@dataclass(frozen=True)
class Copy:
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


@dataclass(frozen=True)
class Program:
    """Segments in host order.  Events and streams live across eager segments; a captured segment
    begins with all its streams and events empty."""

    segments: tuple[Segment, ...]

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Every launch in host order; positions in this tuple name launches everywhere."""
        return tuple(
            action
            for segment in self.segments
            for action in segment.actions
            if isinstance(action, Launch)
        )
