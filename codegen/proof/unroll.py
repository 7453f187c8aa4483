"""A step repeated: races between steps, and between the slots of rotating buffers.

With `slots` copies of a buffer, slots + 1 steps show a race if there is one; slots + 2 show every
racy pair, because the first step of a stream has no predecessor and is no steady state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kpipe.codegen.proof.program import Action, Launch, Program, Segment

EXTRA_COPIES = 2


def copies_needed(slots: Mapping[str, int]) -> int:
    """Steps after which every racy pair has shown up: the largest number of slots, plus 2.

    Raises ValueError if a buffer has fewer than one slot.
    """
    for buffer, count in sorted(slots.items()):
        if count < 1:
            raise ValueError(f"buffer {buffer!r} has {count} slots; at least 1 is needed")
    return max(slots.values(), default=1) + EXTRA_COPIES


def rename(actions: tuple[Action, ...], slots: Mapping[str, int], copy: int) -> tuple[Action, ...]:
    """The actions of step number `copy`: each buffer in `slots` becomes `buffer@{copy % slots}`.

    Buffers that `slots` does not name keep their name, and so share one memory in all steps.
    """
    return tuple(
        _rename_launch(action, slots, copy) if isinstance(action, Launch) else action
        for action in actions
    )


def _rename_launch(launch: Launch, slots: Mapping[str, int], copy: int) -> Launch:
    accesses = tuple(
        replace(access, buffer=f"{access.buffer}@{copy % slots[access.buffer]}")
        if access.buffer in slots
        else access
        for access in launch.node.accesses
    )
    return replace(launch, node=replace(launch.node, accesses=accesses))


def unroll(
    step: tuple[Action, ...] | Segment, slots: Mapping[str, int], copies: int | None = None
) -> Program:
    """`step` issued `copies` times in a row (default: `copies_needed(slots)`).

    A tuple of actions is issued eagerly; a captured segment is one graph launch per step.  Events
    keep their numbers: each step records them again.  Raises ValueError if a buffer has no slot
    or `copies` is below 1.
    """
    needed = copies_needed(slots)
    count = needed if copies is None else copies
    if count < 1:
        raise ValueError(f"{count} copies of a step; at least 1 is needed")
    segment = step if isinstance(step, Segment) else Segment(step)
    return Program(
        tuple(
            replace(segment, actions=rename(segment.actions, slots, copy)) for copy in range(count)
        )
    )


def place(position: int, step_launches: int) -> tuple[int, int]:
    """The copy of a launch in an unrolled program, and its position within the step."""
    return divmod(position, step_launches)
