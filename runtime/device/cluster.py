"""Clusters: CTAs that start together and reach each other's shared memory.

A CTA may reach into a peer's memory once the peer has started: `sync` in both, or `announce` in
both and then `wait_for_all`; all threads of all CTAs take part. It must not end before its peers
have read what they want of it, and before what they send it has arrived.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Uint32, Uint64, cute
from cutlass.cute.arch import inline_ptx

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
    address = _address(tensor, index, rank)
    word = inline_ptx(
        "ld.shared::cluster.b32 {$w0}, [{$r0}];",
        write_only_types=[Uint32],
        read_only_args=[address],
    )
    return word


def load_floats(place: cute.Tensor, count: int, rank) -> list[Float32]:
    """The first `count` FP32 of what is `place` here, in the CTA of that rank; 2 or 4, aligned.

    Sides meet as for `load`.
    """
    words = ", ".join(f"{{$w{number}}}" for number in range(count))
    return list(
        inline_ptx(
            f"ld.shared::cluster.v{count}.f32 {{{words}}}, [{{$r0}}];",
            write_only_types=[Float32] * count,
            read_only_args=[_address(place, 0, rank)],
        )
    )


def add(tensor: cute.Tensor, index, value: Uint32, rank) -> None:
    """Adds to word `index` of what is the uint32 `tensor` here, in the CTA of that rank, at once.

    Integers only: sums of whole numbers do not depend on the order.
    """
    address = _address(tensor, index, rank)
    inline_ptx(
        "red.relaxed.cluster.shared::cluster.add.u32 [{$r0}], {$r1};",
        read_only_args=[address, value],
    )


def store(tensor: cute.Tensor, index, value: Uint32, rank) -> None:
    """Writes word `index` of what is the uint32 `tensor` here, in the CTA of that rank."""
    address = _address(tensor, index, rank)
    inline_ptx("st.shared::cluster.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_wide(tensor: cute.Tensor, index, value: Uint64, rank) -> None:
    """`store` for uint64."""
    address = _address(tensor, index, rank)
    inline_ptx("st.shared::cluster.b64 [{$r0}], {$r1};", read_only_args=[address, value])


def announce() -> None:
    """Arrives at the cluster's barrier; orders no memory access but published barriers."""
    cute.arch.cluster_arrive_relaxed()


def wait_for_all() -> None:
    """Returns once every thread of the cluster has arrived."""
    cute.arch.cluster_wait()


def start() -> None:
    """Returns once every CTA of the cluster runs, with the barriers that it has published.

    Everything else that lies before it need not be visible behind it. All threads call it.
    """
    announce()
    wait_for_all()


def _address(tensor: cute.Tensor, index, rank) -> Uint32:
    """Address, in the CTA of that rank, of what is element `index` of `tensor` in this one."""
    return inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[(tensor.iterator + index).toint(), Int32(rank)],
    )
