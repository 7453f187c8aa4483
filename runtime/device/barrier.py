"""Barriers in shared memory that count arrivals and the bytes of copies.

A barrier has phases: one is over once its arrivals have come and the bytes that they announced
have landed. `wait` with the parity of a phase (0, 1, 0, ...) returns once that phase is over.
It cannot tell a phase from the one two ahead: who waits for a phase must know that the one before
it is over, for example because it has waited for that one too.
"""

from __future__ import annotations

from cutlass import Int32, Int64, cute
from cutlass.cute.arch import inline_ptx
from cutlass.memory import SmemAllocator

BYTES = 8
"""Shared memory of a barrier."""

WARP_ARRIVALS = 1
"""Arrivals that a warp makes with `arrive_as_warp`."""

_WAIT_FOR_PEERS = """{
.reg .pred done;
again:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1};
@!done bra again;
}"""
_WAIT_SOON = _WAIT_FOR_PEERS.replace(".acquire.cluster", "")


def allocate(shared: SmemAllocator, count: int) -> cute.Pointer:
    """Room for `count` neighbouring barriers."""
    return shared.allocate_array(Int64, count, byte_alignment=BYTES)


@cute.jit
def make_ready(barriers: cute.Pointer, count: int, arrivals: int) -> None:
    """Initialises `count` neighbouring barriers, each for `arrivals` arrivals a phase.

    One thread calls it; `fence_ready` and a barrier of the CTA follow before anybody uses them.
    """
    for place in range(count):
        cute.arch.mbarrier_init(barriers + place, arrivals)


def fence_ready() -> None:
    """Makes barriers that this thread has initialised visible to copies and to the cluster."""
    cute.arch.mbarrier_init_fence()


def expect(barrier: cute.Pointer, size) -> None:
    """Arrives, and announces `size` bytes that copies will bring in this phase."""
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


def arrive(barrier: cute.Pointer) -> None:
    """Arrives; what this thread has read and written lies before it."""
    cute.arch.mbarrier_arrive(barrier)


@cute.jit
def arrive_as_warp(barrier: cute.Pointer) -> None:
    """WARP_ARRIVALS for the whole warp, whose lanes call it together.

    What any of its lanes has read and written lies before them.
    """
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        arrive(barrier)


def wait(barrier: cute.Pointer, parity) -> None:
    """Returns once the phase of that parity is over; its bytes are then visible."""
    cute.arch.mbarrier_wait(barrier, parity)


def wait_soon(barrier: cute.Pointer, parity) -> None:
    """`wait` for a phase that is over within a microsecond: without the hint at how long a thread
    may sleep, since it wakes from that late.
    """
    inline_ptx(_WAIT_SOON, read_only_args=[Int32(barrier.toint()), Int32(parity)])


def wait_for_peers(barrier: cute.Pointer, parity) -> None:
    """`wait` for what other CTAs of the cluster have stored; every thread that reads it calls."""
    inline_ptx(_WAIT_FOR_PEERS, read_only_args=[Int32(barrier.toint()), Int32(parity)])
