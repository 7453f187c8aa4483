"""Asynchronous copies of 16 bytes a lane from device to shared memory (cp.async).

A thread counts the end of its copies at a barrier (see barrier.py) instead of waiting for them.
"""

from __future__ import annotations

from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


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
