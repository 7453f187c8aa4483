"""CTAs of a cluster: their barrier, and stores into each other's shared memory.

A CTA may store into a peer's memory once the peer has started (`announce` in both, then
`wait_for_all`), and must not end before its peers' stores into it have been waited for
(`arrive`, then `wait_for_all`). All threads of all CTAs take part in every barrier.
"""

from __future__ import annotations

from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

MAX_PORTABLE = 8
MAX_CTAS = 16
"""Largest cluster; above MAX_PORTABLE fewer fit on a GPU at once."""


def announce() -> None:
    """Arrives at the cluster's barrier without ordering any memory access."""
    cute.arch.cluster_arrive_relaxed()


def arrive() -> None:
    """Arrives at the cluster's barrier; this thread's earlier stores come with it."""
    cute.arch.cluster_arrive()


def wait_for_all() -> None:
    """Returns once every thread of the cluster has arrived."""
    cute.arch.cluster_wait()


@dsl_user_op
def address_in(pointer, rank, *, loc=None, ip=None) -> Int32:
    """Address, in the shared memory of CTA `rank`, of what `pointer` is in this one's."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [
                Int32(pointer.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip),
                Int32(rank).ir_value(loc=loc, ip=ip),
            ],
            "mapa.shared::cluster.u32 $0, $1, $2;",
            "=r,r,r",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def store(address: Int32, values: list[Float32], *, loc=None, ip=None) -> None:
    """Stores one, two or four FP32 values at an address of `address_in` (aligned to their size)."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(values)]
    names = ", ".join(f"${place + 1}" for place in range(len(values)))
    llvm.inline_asm(
        None,
        [address.ir_value(loc=loc, ip=ip), *(v.ir_value(loc=loc, ip=ip) for v in values)],
        f"st.shared::cluster{vector}.f32 [$0], {{{names}}};"
        if vector
        else "st.shared::cluster.f32 [$0], $1;",
        "r" + ",f" * len(values) + ",~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
