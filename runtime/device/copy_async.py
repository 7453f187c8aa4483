"""Asynchronous copies from device memory into shared memory (cp.async), up to 16 bytes a thread.

They pass by the registers and return at once. `wait` orders them for the thread that issued them;
other threads of the CTA see the bytes behind a barrier. With `arrive_when_done` a barrier of
shared memory (see barrier.py) counts their end instead.
"""

from __future__ import annotations

from cutlass import Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import dsl_user_op

WIDEST = 16
"""Bytes of a copy that goes by the L1 cache; shorter ones (4 or 8) go through it."""


def copy(source: cute.Tensor, target: cute.Tensor) -> None:
    """Requests 4, 8 or 16 contiguous bytes of device memory, aligned to their number."""
    size = cute.size(source) * source.element_type.width // 8
    cache = "cg" if size == WIDEST else "ca"
    inline_ptx(
        f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {size};",
        read_only_args=[target.iterator.toint(), source.iterator.toint()],
    )


def wait() -> None:
    """Returns once everything that this thread has requested lies in shared memory."""
    inline_ptx("cp.async.wait_all;")


@dsl_user_op
def copy_vector(target, source, *, loc=None, ip=None) -> None:
    """Requests 16 bytes from `source` into `target`, both aligned; L1 is passed by."""
    addresses = [
        Int32(target.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip),
        Int64(source.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip),
    ]
    _issue("cp.async.cg.shared.global [$0], [$1], 16;", addresses, "r,l,~{memory}", loc, ip)


@dsl_user_op
def arrive_when_done(barriers, place, *, loc=None, ip=None) -> None:
    """One arrival at the barrier at `place` once all earlier copies of this thread have landed."""
    barrier = barriers.iterator + place
    address = [Int32(barrier.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)]
    text = "cp.async.mbarrier.arrive.noinc.shared.b64 [$0];"
    _issue(text, address, "r,~{memory}", loc, ip)


def _issue(text: str, operands: list, constraints: str, loc, ip) -> None:
    llvm.inline_asm(
        None,
        operands,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
