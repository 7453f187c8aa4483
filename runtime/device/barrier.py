"""Barriers in shared memory (mbarrier): arrivals and bytes counted in phases.

A barrier completes its phase, and begins the next, once `arrivals` threads have arrived and all
expected bytes have landed. Phases alternate between parity 0 and 1; a wait names the parity of
the phase that it waits for. What a thread wrote before it arrived, and the bytes of the counted
copies, are visible behind the wait. The waits are bounded by the kernel's own progress.
"""

from __future__ import annotations

from cutlass import Int64, cute


def initialise(barriers: cute.Tensor, place, arrivals: int) -> None:
    """Sets up the barrier at `place` of a one-dimensional tensor of 64-bit words.

    One thread calls it for each; `publish` and a CTA (or cluster) barrier follow before use.
    """
    cute.arch.mbarrier_init(barriers.iterator + place, arrivals)


def publish() -> None:
    """Makes initialised barriers visible to copies and to the other CTAs of the cluster."""
    cute.arch.mbarrier_init_fence()


def arrive(barriers: cute.Tensor, place) -> None:
    """One arrival at the barrier at `place`."""
    cute.arch.mbarrier_arrive(barriers.iterator + place)


def arrive_expecting(barriers: cute.Tensor, place, count) -> None:
    """One arrival at the barrier at `place`, whose phase then also waits for `count` bytes."""
    cute.arch.mbarrier_arrive_and_expect_tx(barriers.iterator + place, count)


def wait(barriers: cute.Tensor, place, parity) -> None:
    """Returns once the phase of that parity of the barrier at `place` has completed.

    The lanes of a warp that call it together name the same barrier and parity.
    """
    cute.arch.mbarrier_wait(barriers.iterator + place, parity)


WORD = Int64
"""Type of a barrier's 64-bit word."""
