"""Words that the CTAs of a cluster store into each other's shared memory.

An inbox is shared memory whose bytes peers fill with `send`, and a barrier that counts them: the
stores complete on the receiver's barrier, so nobody has to flush anything. Its life:

    one thread   open_inbox(barrier, size)      how many bytes will come, from all peers together
    all threads  cluster.start()                every CTA of the cluster runs, its inbox is open
    senders      send(values, target, barrier, cta)
    readers      receive(barrier)               all bytes have arrived and are visible

A CTA that has received everything may end: nobody stores into it any more.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
from cutlass import Int32, cute

from . import barrier as barriers
from . import memory


def open_inbox(barrier: cute.Pointer, size) -> None:
    """Sets `barrier`, 8 bytes of shared memory, to wait for `size` bytes; by one thread."""
    barriers.make_ready(barrier, 1, 1)
    barriers.fence_ready()
    barriers.expect(barrier, size)


def send(values: cute.TensorSSA, target: cute.Tensor, barrier: cute.Pointer, cta) -> None:
    """Stores `values` where CTA `cta` of the cluster has what is `target` in this one.

    4, 8 or 16 bytes a thread in one access; `target` lies in shared memory and is aligned to it.
    The call returns at once.
    """
    words = values.bitcast(cutlass.Int32)
    value = tuple(words[place] for place in range(cute.size(words.shape)))
    cute.arch.store_async_dsmem(target.iterator, value, barrier, cta)


def send_words(words: Sequence, target: cute.Tensor, index, barrier: cute.Pointer, cta) -> None:
    """`send` of 1, 2 or 4 uint32 as the `index`-th run of so many in the uint32 `target`."""
    values = tuple(Int32(word) for word in words)
    place = memory.vector_at(target, index, len(values)).iterator
    value = values if len(values) > 1 else values[0]
    cute.arch.store_async_dsmem(place, value, barrier, cta)


def receive(barrier: cute.Pointer) -> None:
    """Returns once all bytes of the inbox have arrived; every thread that reads them calls it."""
    barriers.wait_for_peers(barrier, 0)
