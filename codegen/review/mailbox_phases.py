"""What one rank does to each parity of its mailboxes over the layers of a step.

The acts are those of the protocol that the explorer proves (`proof/mailbox/protocol.py`); here
they are laid out over consecutive layers, in host order.
"""

from __future__ import annotations

from dataclasses import dataclass

from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.proof.mailbox.protocol import Act, protocol_of

LETTERS = {Act.PUBLISH: "P", Act.POLL: "W", Act.READ: "R", Act.REARM: "A"}
MEANING = (
    "P publishes into the copies of its peers, W waits for every word of its own copy, R reads, "
    "A re-arms: stores the sentinel back. A copy is armed where nothing is drawn."
)


@dataclass(frozen=True)
class Copy:
    """One parity of a mailbox: what each op of each layer does to it, as letters.

    `acts` has one entry per layer and op; `spans` are the stretches in which it is not armed, from
    a publish to the re-arm behind it, as positions in `acts`.
    """

    box: str
    parity: int
    acts: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Phases:
    """The copies of all mailboxes of a step over `layers` layers; `ops` are those of one layer
    that touch a mailbox.  `facts` has a line a mailbox: shape, sentinel, bytes, who re-arms."""

    ops: tuple[str, ...]
    layers: int
    copies: tuple[Copy, ...]
    facts: tuple[str, ...]
    bytes: int


def phases(plan: PipelinePlan, step: StepPlan) -> Phases:
    """One more layer than the largest number of parities: every copy is used, and one again."""
    protocol = protocol_of(step, plan)
    layers = protocol.parities + 1
    ops = protocol.ops
    copies = []
    for box in protocol.boxes:
        letters = [
            "".join(LETTERS[use.act] for use in op.uses if use.box == box.name) for op in ops
        ]
        for parity in range(box.parities):
            acts = tuple(
                letter if layer % box.parities == parity else ""
                for layer in range(layers)
                for letter in letters
            )
            copies.append(Copy(box.name, parity, acts, _spans(acts)))
    used = {box.name for box in protocol.boxes}
    boxes = [box for box in plan.mailboxes if box.name in used]
    facts = tuple(
        f"{box.name}: [{', '.join(map(str, box.shape))}] {box.dtype}, {box.parities} parities, "
        f"sentinel 0x{box.sentinel:08X}, {box.bytes / 2**20:.2f} MiB, re-armed by {box.rearmed_by}"
        for box in boxes
    )
    names = tuple(op.name for op in ops)
    return Phases(names, layers, tuple(copies), facts, sum(box.bytes for box in boxes))


def _spans(acts: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """From the first act behind an armed copy to the act that re-arms it."""
    found: list[tuple[int, int]] = []
    opened = -1
    for position, letters in enumerate(acts):
        if letters and opened < 0:
            opened = position
        if "A" in letters:
            found.append((opened, position))
            opened = -1
    if opened >= 0:
        found.append((opened, len(acts) - 1))
    return tuple(found)
