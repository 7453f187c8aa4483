"""Bulk copies from device to shared memory, and the barriers that count their bytes.

A bulk copy is one instruction of one thread for a whole run of bytes; the copy engine moves it
while the thread goes on, and reports the bytes to an mbarrier in shared memory. A barrier has
phases: it flips once its arrivals have come and the bytes that they announced have landed.
`wait` with the parity of a phase (0, 1, 0, ...) returns once that phase is over.
"""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

RUN_BYTES = 16
"""A copy's length, source and target are multiples of this."""

BARRIER_BYTES = 8

_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_ARGUMENTS = "[$0], [$1], $2, [$3]"


@dsl_user_op
def copy_run(
    source: cute.Tensor,
    target: cute.Tensor,
    barrier: cute.Pointer,
    once: bool = False,
    *,
    loc=None,
    ip=None,
) -> None:
    """Copies one contiguous run of device memory and reports its bytes to `barrier`.

    `source` and `target` (shared memory) have one static extent, a multiple of RUN_BYTES. With
    `once` the bytes leave the L2 cache before all others: nobody reads them again soon. One
    thread calls it; the bytes must have been announced with `expect`.
    """
    size = cute.size(target) * target.element_type.width // 8
    places = (target.iterator.toint(), source.iterator.toint(), Int32(size), barrier.toint())
    operands = [place.ir_value(loc=loc, ip=ip) for place in places]
    text, constraints = f"{_COPY} {_ARGUMENTS};", "r,l,r,r"
    if once:
        operands.append(_evict_first(loc=loc, ip=ip))
        text, constraints = f"{_COPY}.L2::cache_hint {_ARGUMENTS}, $4;", "r,l,r,r,l"
    llvm.inline_asm(
        None,
        operands,
        text,
        f"{constraints},~{{memory}}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _evict_first(*, loc, ip):
    """The cache policy of bytes that are read once."""
    return llvm.inline_asm(
        T.i64(),
        [],
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;",
        "=l",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@cute.jit
def make_ready(barriers: cute.Pointer, count: int, arrivals: int) -> None:
    """Initialises `count` neighbouring barriers, each for `arrivals` arrivals a phase.

    One thread calls it; `fence_ready` and a barrier of the CTA follow before anybody uses them.
    """
    for place in range(count):
        cute.arch.mbarrier_init(barriers + place, arrivals)


def fence_ready() -> None:
    """Makes barriers that this thread has initialised visible to the copy engine."""
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
