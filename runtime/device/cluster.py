"""Clusters: CTAs that start together and read each other's shared memory."""

from __future__ import annotations

from cutlass import Int32, Uint32, Uint64, cute
from cutlass.cute.arch import inline_ptx


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
