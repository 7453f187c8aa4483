"""Generated from pipelines/dsa_dcp_d2_interleave64.yaml; do not edit.

Waits until the heads of every rank have come for every row, so that whoever runs behind it finds
them in the mailbox. Writes nothing.

Grid     as many CTAs as have IN_FLIGHT fragments a thread to look at, `ctas` at most: it may run
         beside other kernels, and a CTA that waits takes room. It publishes nothing, so nothing
         has to run at the same time.
Wait     ahead of the first look; never released, as what is behind it needs every word.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Uint8, cute

from kpipe.runtime.device import mailbox, pdl
from kpipe.runtime.device.head_mail import HeadMail
from kpipe.runtime.host.compile import Symbol, TensorSpec

RANKS = 2
HEADS = 48  # of one rank
LATENT = 576
THREADS = 256
MAIL = HeadMail(RANKS * HEADS, LATENT, Uint8, THREADS)
FRAGMENTS = RANKS * HEADS * MAIL.row_bytes // mailbox.FRAGMENT_BYTES  # of a row of the mailbox


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows = Symbol("rows")
    return (
        TensorSpec("q_mail", "u8", (rows, RANKS * HEADS, LATENT)),
        TensorSpec("fault", "i64", (1,), align=8),
    )


@dataclass(frozen=True)
class QueryWait:
    """Returns when every word of every row has come.

    pdl:  launch with the attribute that lets this grid start before its predecessor ends.
    ctas: CTAs at most.
    """

    pdl: bool = True
    ctas: int = 32

    @cute.jit
    def __call__(self, q_mail: cute.Tensor, fault: cute.Tensor, stream):
        wanted = cute.ceil_div(q_mail.shape[0] * FRAGMENTS, THREADS * mailbox.IN_FLIGHT)
        self.query_wait(q_mail, fault).launch(
            grid=[cutlass.min(wanted, self.ctas), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def query_wait(self, q_mail: cute.Tensor, fault: cute.Tensor):
        first = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        pdl.wait()
        MAIL.receive(q_mail, first, cute.arch.grid_dim()[0] * THREADS, "query_wait", fault)
