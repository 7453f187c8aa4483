"""Asynchronous copies from device memory into shared memory (cp.async), up to 16 bytes a thread.

They pass by the registers and return at once. `wait` orders them for the thread that issued them;
other threads of the CTA see the bytes behind a barrier. With `arrive_when_done` a barrier of
shared memory (see barrier.py) counts their end instead.
"""

from __future__ import annotations

from cutlass import Boolean, cute
from cutlass.cute.arch import inline_ptx

WIDEST = 16
"""Bytes of a copy that goes by the L1 cache; shorter ones (4 or 8) go through it."""


def copy(source: cute.Tensor, target: cute.Tensor) -> None:
    """Requests 4, 8 or 16 contiguous bytes of device memory, aligned to their number."""
    size = cute.size(source) * source.element_type.width // 8
    copy_bytes(source.iterator, target.iterator, size)


def copy_bytes(
    source: cute.Pointer,
    target: cute.Pointer,
    size: int = WIDEST,
    condition: Boolean | None = None,
) -> None:
    """`copy` of `size` bytes between two places; no access at all where `condition` is false."""
    cache = "cg" if size == WIDEST else "ca"
    inline_ptx(
        f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {size};",
        read_only_args=[target.toint(), source.toint()],
        predicate=condition,
    )


def wait() -> None:
    """Returns once everything that this thread has requested lies in shared memory."""
    inline_ptx("cp.async.wait_all;")


def arrive_when_done(barrier: cute.Pointer) -> None:
    """One arrival at `barrier` once all earlier copies of this thread have landed."""
    cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
