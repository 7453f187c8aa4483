"""Barriers in shared memory that count arrivals and the bytes of copies.

A barrier has phases: one is over once its arrivals have come and the bytes that they announced
have landed. `wait` with the parity of a phase (0, 1, 0, ...) returns once that phase is over.
"""

from __future__ import annotations

from cutlass import Int64, cute
from cutlass.memory import SmemAllocator

BYTES = 8
"""Shared memory of a barrier."""


def allocate(shared: SmemAllocator, count: int) -> cute.Pointer:
    """Room for `count` neighbouring barriers."""
    return shared.allocate_array(Int64, count)


@cute.jit
def make_ready(barriers: cute.Pointer, count: int, arrivals: int) -> None:
    """Initialises `count` neighbouring barriers, each for `arrivals` arrivals a phase.

    One thread calls it; `fence_ready` and a barrier of the CTA follow before anybody uses them.
    """
    for place in range(count):
        cute.arch.mbarrier_init(barriers + place, arrivals)


def make_one_ready(barrier: cute.Pointer, arrivals: int) -> None:
    """Initialises one barrier, as `make_ready` does several."""
    cute.arch.mbarrier_init(barrier, arrivals)


def fence_ready() -> None:
    """Makes barriers that this thread has initialised visible to copies and to the cluster."""
    cute.arch.mbarrier_init_fence()


def expect(barrier: cute.Pointer, size) -> None:
    """Arrives, and announces `size` bytes that copies will bring in this phase."""
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


def arrive(barrier: cute.Pointer) -> None:
    """Arrives; what this thread has read and written lies before it."""
    cute.arch.mbarrier_arrive(barrier)


def wait(barrier: cute.Pointer, parity) -> None:
    """Returns once the phase of that parity is over; its bytes are then visible."""
    cute.arch.mbarrier_wait(barrier, parity)
