"""Bulk copies from device to shared memory.

A bulk copy is one instruction of one thread for a whole run of bytes; the copy engine moves it
while the thread goes on, and reports the bytes to a barrier in shared memory (see barrier.py).
"""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import dsl_user_op

from . import memory

RUN_BYTES = 16
"""A copy's length, source and target are multiples of this."""

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
        operands.append(memory.evict_first(loc=loc, ip=ip).ir_value(loc=loc, ip=ip))
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


def fence_stores() -> None:
    """Lets later bulk copies see what this thread has stored into device memory.

    Plain stores and bulk copies reach memory by two proxies. A barrier, or a release of the
    dependent grid, that lies behind the fence then passes the stores on to copies of others.
    """
    inline_ptx("fence.proxy.async.global;")
