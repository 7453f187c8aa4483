"""What one rank does to its mailboxes in one layer, taken from a plan.

A mailbox is memory that peers write and this rank polls.  A word is the place of one source in
one rank's copy of one parity: every rank writes its own place in the copies of others, and the
owner of a copy polls, reads and re-arms it.  Whether a publish carries the same bytes to every
rank or each owner its slice makes no difference to the order of these steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from kpipe.codegen.ops.contract import Access
from kpipe.codegen.plan.flags import only_consumes, polled_operands
from kpipe.codegen.plan.model import MAIN, Fork, Join, Launch, PipelinePlan, StepPlan

Peers = Literal["every", "self"]


class Act(Enum):
    """What an op does to a mailbox."""

    PUBLISH = "publish"  # stores into the copies of its peers
    POLL = "poll"  # waits in its own copy for the word of every source
    READ = "read"  # needs every word of its own copy while it runs; does not wait
    REARM = "rearm"  # stores the sentinel into every word of its own copy


@dataclass(frozen=True)
class Use:
    """One act of an op on one mailbox.

    `after` are positions among the op's uses that come first; uses without such an order run
    concurrently, because the CTAs of a kernel do.  A re-arm behind a poll of the same mailbox
    follows it source by source, everything else waits for the whole earlier use.
    """

    act: Act
    box: str
    peers: Peers = "every"
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Op:
    """One launch: its uses happen between its start and its end."""

    name: str
    stream: str
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Split:
    """`stream` goes on behind everything issued on `origin` so far."""

    stream: str
    origin: str = MAIN


@dataclass(frozen=True)
class Merge:
    """`target` waits for everything issued on `stream` so far."""

    stream: str
    target: str = MAIN


@dataclass(frozen=True)
class Box:
    """A mailbox: every rank owns `parities` copies of it."""

    name: str
    parities: int


@dataclass(frozen=True)
class Protocol:
    """One layer of one rank in host order; all ranks and layers do the same."""

    boxes: tuple[Box, ...]
    items: tuple[Op | Split | Merge, ...]

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops in host order."""
        return tuple(item for item in self.items if isinstance(item, Op))

    @property
    def parities(self) -> int:
        """The largest number of parities of a mailbox."""
        return max((box.parities for box in self.boxes), default=1)

    def acts(self, box: str) -> frozenset[Act]:
        """Everything that some op does to the mailbox."""
        return frozenset(use.act for op in self.ops for use in op.uses if use.box == box)

    def with_parities(self, box: str, parities: int) -> Protocol:
        """The same protocol with another number of copies; ValueError for an unknown mailbox."""
        if box not in {declared.name for declared in self.boxes}:
            raise ValueError(f"no mailbox {box!r} in the protocol")
        boxes = tuple(Box(b.name, parities) if b.name == box else b for b in self.boxes)
        return replace(self, boxes=boxes)


def protocol_of(plan: StepPlan, pipeline: PipelinePlan) -> Protocol:
    """The protocol of one layer of `plan`.

    Launches that touch no mailbox are left out; forks and joins stay.  A mailbox that the plan
    does not touch has no box.  Every launch waits here for the end of its predecessors: that an
    overlapped launch keeps this order is proved with the schedule, not here.
    """
    declared = {mailbox.name: mailbox.parities for mailbox in pipeline.mailboxes}
    items: list[Op | Split | Merge] = []
    for item in plan.items:
        if isinstance(item, Fork):
            items.append(Split(item.stream, item.origin))
        elif isinstance(item, Join):
            items.append(Merge(item.stream, item.target))
        else:
            uses = uses_of(item, frozenset(declared))
            if uses:
                items.append(Op(item.name, item.stream, uses))
    used = {use.box for item in items if isinstance(item, Op) for use in item.uses}
    boxes = tuple(Box(name, count) for name, count in declared.items() if name in used)
    return Protocol(boxes, tuple(items))


def uses_of(launch: Launch, mailboxes: frozenset[str]) -> tuple[Use, ...]:
    """What a launch does to the named mailboxes, in the order of its operands.

    Within one mailbox an op publishes, then polls, then re-arms.  What it publishes is computed
    from what it polls elsewhere for itself (POLL and CONSUME operands), so it comes behind that.
    """
    polled = polled_operands(launch.contract, dict(launch.flags))
    pushed = only_consumes(launch.contract, dict(launch.flags))
    uses: list[Use] = []
    inputs: list[int] = []  # polls of operands that only come in
    publishes: list[int] = []
    for binding in launch.bindings:
        if binding.target not in mailboxes:
            continue
        last: tuple[int, ...] = ()
        for act in _acts(binding.access, binding.operand in polled, pushed):
            position = len(uses)
            uses.append(Use(act, binding.target, after=last))
            last = (position,)
            if act is Act.PUBLISH:
                publishes.append(position)
            elif act is Act.POLL and not binding.access.publishes:
                inputs.append(position)
    for position in publishes:
        use = uses[position]
        uses[position] = replace(use, after=(*use.after, *inputs))
    return tuple(uses)


def _acts(access: Access, polls: bool, pushed: bool) -> tuple[Act, ...]:
    found = []
    if access.publishes and not (pushed and access is Access.EXCHANGE):
        found.append(Act.PUBLISH)
    if polls:
        found.append(Act.POLL)
    if access is Access.READ:
        found.append(Act.READ)
    if access.rearms:
        found.append(Act.REARM)
    return tuple(found)
