"""Clusters: CTAs that start together and reach each other's shared memory.

A CTA may reach into a peer's memory once the peer has started: `sync` in both, or `announce` in
both and then `wait_for_all`; all threads of all CTAs take part. It must not end before its peers
have read what they want of it, and before what they send it has arrived.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Uint32, Uint64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import T, dsl_user_op

MAX_PORTABLE = 8
MAX_CTAS = 16
"""Largest cluster; above MAX_PORTABLE fewer fit on a GPU at once."""


def sync() -> None:
    """Barrier over all threads of the cluster; what lies before it is visible behind it."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def meet(parts: int) -> None:
    """Barrier of the `parts` CTAs that work together; of one CTA alone, its own."""
    if parts > 1:
        sync()
    else:
        cute.arch.sync_threads()


def load(tensor: cute.Tensor, index, rank):
    """Word `index` of what is the one-dimensional uint32 `tensor` here, in the CTA of that rank.

    The CTAs must run the same kernel, and a CTA must not end before its peers have read: both
    sides call `sync` before the first read and behind the last one.
    """
    address = inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[(tensor.iterator + index).toint(), Int32(rank)],
    )
    word = inline_ptx(
        "ld.shared::cluster.b32 {$w0}, [{$r0}];",
        write_only_types=[Uint32],
        read_only_args=[address],
    )
    return word


def add(tensor: cute.Tensor, index, value: Uint32, rank) -> None:
    """Adds to word `index` of what is the uint32 `tensor` here, in the CTA of that rank, at once.

    Integers only: sums of whole numbers do not depend on the order.
    """
    address = inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[(tensor.iterator + index).toint(), Int32(rank)],
    )
    inline_ptx(
        "red.relaxed.cluster.shared::cluster.add.u32 [{$r0}], {$r1};",
        read_only_args=[address, value],
    )


def store(tensor: cute.Tensor, index, value: Uint32, rank) -> None:
    """Writes word `index` of what is the uint32 `tensor` here, in the CTA of that rank."""
    address = inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[(tensor.iterator + index).toint(), Int32(rank)],
    )
    inline_ptx("st.shared::cluster.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_wide(tensor: cute.Tensor, index, value: Uint64, rank) -> None:
    """`store` for uint64."""
    address = inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[(tensor.iterator + index).toint(), Int32(rank)],
    )
    inline_ptx("st.shared::cluster.b64 [{$r0}], {$r1};", read_only_args=[address, value])


def announce() -> None:
    """Arrives at the cluster's barrier; orders no memory access but published barriers."""
    cute.arch.cluster_arrive_relaxed()


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
def send(address: Int32, values: list[Float32], barrier: Int32, *, loc=None, ip=None) -> None:
    """Stores two or four FP32 values in a CTA's memory and counts their bytes at its barrier.

    Both addresses come from `address_in` with the same rank, and are aligned to the values' size.
    The call returns at once; what waits for the barrier's phase sees the values.
    """
    count = len(values)
    names = ", ".join(f"${place + 1}" for place in range(count))
    llvm.inline_asm(
        None,
        [
            address.ir_value(loc=loc, ip=ip),
            *(value.ir_value(loc=loc, ip=ip) for value in values),
            barrier.ir_value(loc=loc, ip=ip),
        ],
        "st.async.shared::cluster.mbarrier::complete_tx::bytes"
        f".v{count}.f32 [$0], {{{names}}}, [${count + 1}];",
        "r" + ",f" * count + ",r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
