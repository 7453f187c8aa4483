"""Words that the CTAs of a cluster store into each other's shared memory.

An inbox is shared memory whose bytes peers fill with `send`, and a barrier that counts them: the
stores complete on the receiver's barrier, so nobody has to flush anything. Its life:

    one thread   open_inbox(barrier, size)      how many bytes will come, from all peers together
    all threads  meet()                         every CTA of the cluster runs, its inbox is open
    senders      send(values, target, barrier, cta)
    readers      receive(barrier)               all bytes have arrived and are visible

A CTA that has received everything may end: nobody stores into it any more.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.cute.arch import inline_ptx

MAX_CLUSTER = 8
"""CTAs of a cluster that every GPU with clusters can launch."""

_WAIT = """{
.reg .pred done;
again:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], 0;
@!done bra again;
}"""


def open_inbox(barrier: cute.Pointer, size) -> None:
    """Sets `barrier`, 8 bytes of shared memory, to wait for `size` bytes; by one thread."""
    cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


def meet() -> None:
    """Barrier of all threads of the cluster; it publishes new barriers and nothing else."""
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()


def send(values: cute.TensorSSA, target: cute.Tensor, barrier: cute.Pointer, cta) -> None:
    """Stores `values` where CTA `cta` of the cluster has what is `target` in this one.

    4, 8 or 16 bytes a thread in one access; `target` lies in shared memory and is aligned to it.
    """
    words = values.bitcast(cutlass.Int32)
    value = tuple(words[place] for place in range(cute.size(words.shape)))
    cute.arch.store_async_dsmem(target.iterator, value, barrier, cta)


def receive(barrier: cute.Pointer) -> None:
    """Returns once all bytes of the inbox have arrived; every thread that reads them calls it."""
    inline_ptx(_WAIT, read_only_args=[Int32(barrier.toint())])
