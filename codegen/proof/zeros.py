"""Memory that must be zero: kernels that count in it, and who leaves something else there.

A kernel with a `zero` access expects zeros and leaves zeros.  The memory is cleared once, before
the first step.  Whoever else writes it makes it dirty, and then order alone is no help: between
the dirty write and the kernel something has to clear what both touch.
"""

from __future__ import annotations

from dataclasses import dataclass

from kpipe.codegen.proof.instants import begin
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Access, Kernel, Program, Reuse
from kpipe.codegen.proof.races import Site


@dataclass(frozen=True, order=True)
class Dirty:
    """A kernel (`second`) that may not find zeros, because of an earlier write (`first`)."""

    first: Site
    second: Site
    buffer: str


def dirty(program: Program) -> tuple[Dirty, ...]:
    """Every pair of a dirty write and a later kernel that expects zeros there, sorted.

    A pair is fine where one memset that covers what they have in common is over before the kernel
    begins and begins after the write is over.  What the kernel does to the counters when it finds
    them dirty is not known, so kernels that leave zeros clear nothing.
    """
    writes = [
        (position, site, launch.node, access)
        for position, launch in enumerate(program.launches)
        for site, access in enumerate(launch.node.accesses)
        if access.write and not isinstance(launch.node, Reuse)
    ]
    counted = {a.buffer for _, _, node, a in writes if a.zero and isinstance(node, Kernel)}
    spoilt = {access.buffer for *_, access in writes if not access.zero} & counted
    if not spoilt:
        return ()
    order = Order(program)
    clears = [(p, a) for p, _, node, a in writes if a.zero and not isinstance(node, Kernel)]
    found = []
    for second, second_site, node, expects in writes:
        if not expects.zero or not isinstance(node, Kernel) or expects.buffer not in spoilt:
            continue
        for first, first_site, _, left in writes:
            if first >= second or left.zero or not left.conflicts(expects):
                continue
            if not any(
                order.ordered((first, "E"), (position, "S"))
                and order.ordered((position, "E"), (second, begin(node, expects)))
                and _covers(cleared, left, expects)
                for position, cleared in clears
            ):
                found.append(Dirty((first, first_site), (second, second_site), expects.buffer))
    return tuple(sorted(found))


def _covers(cleared: Access, left: Access, expects: Access) -> bool:
    """Whether a memset covers what two accesses have in common; an empty box is the buffer."""
    if cleared.buffer != expects.buffer:
        return False
    if not cleared.box:
        return True
    if len(left.box) != len(cleared.box) or len(expects.box) != len(cleared.box):
        boxes = [a.box for a in (left, expects) if len(a.box) == len(cleared.box)]
    else:
        boxes = [
            tuple(
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(left.box, expects.box, strict=True)
            )
        ]
    return any(
        all(a <= c and d <= b for (a, b), (c, d) in zip(cleared.box, box, strict=True))
        for box in boxes
    )
