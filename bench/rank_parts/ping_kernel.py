"""A kernel of one thread that plays ping-pong with a peer: words of mailboxes, each used once.

The first player stores word n at the peer and waits for word n to come back; the second waits for
it and answers.  A wait gives up as every poll does, with a record, and traps.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int64, Uint32, cute

from kpipe.runtime.device import mailbox
from kpipe.runtime.host.compile import TensorSpec

TURNS = 1000
SENTINEL = mailbox.ALL_ONES


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch: this rank's words, the address of the peer's, the record's."""
    return (
        TensorSpec("own", "i32", (TURNS,)),
        TensorSpec("peer", "i64", (1,), align=8),
        TensorSpec("fault", "i64", (1,), align=8),
    )


@dataclass(frozen=True)
class Ping:
    """TURNS round trips; `first` is the player that begins."""

    first: bool = True

    @cute.jit
    def __call__(self, own: cute.Tensor, peer: cute.Tensor, fault: cute.Tensor, stream):
        self.ping(own, peer, fault).launch(grid=[1, 1, 1], block=[1, 1, 1], stream=stream)

    @cute.kernel
    def ping(self, own: cute.Tensor, peer: cute.Tensor, fault: cute.Tensor):
        for turn in cutlass.range(0, TURNS, 1, unroll=1):
            here = own.iterator.toint() + Int64(turn) * mailbox.WORD_BYTES
            there = peer[0] + Int64(turn) * mailbox.WORD_BYTES
            if cutlass.const_expr(self.first):
                mailbox.store(there, [Uint32(turn)])
            words = mailbox.load_word(here)
            mailbox.settle(words, here, SENTINEL, "query_wait", fault)
            if cutlass.const_expr(not self.first):
                mailbox.store(there, [Uint32(turn)])
