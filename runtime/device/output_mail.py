"""A skinny GEMM whose outputs go into the mailboxes of the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Int64, Uint32, cute

from . import mailbox, memory
from .skinny import Ring, SkinnyGemm

BF16_BYTES = 2


@dataclass(frozen=True)
class PublishedGemm(SkinnyGemm):
    """SkinnyGemm with `publish` in the place of `store`."""

    @cute.jit
    def publish(self, ring: Ring, rows, owned: cutlass.Constexpr, peers: cute.Tensor):
        """As `store`, into the mailboxes of the ranks, without negative zeros.

        peers: i64, addresses of this rank's [rows, outputs] in every rank's mailbox. With `owned`
        outputs a rank each rank gets those of its own, otherwise all of them get all.
        """
        parts = self.tile_n // self.width
        first = cute.arch.thread_idx()[0]
        for share in cutlass.range(first, self.tokens * parts, self.threads, unroll=1):
            token, part = share // parts, share % parts
            row = self._token_tile() * self.tokens + token
            column = self._output_tile() * parts + part
            if row < rows and column < self.outputs // self.width:
                pairs = self._total(ring, token, part).bitcast(Uint32)
                count = self.width * BF16_BYTES // mailbox.WORD_BYTES
                words = [mailbox.clear_negative_zero(pairs[place]) for place in range(count)]
                offset = Int64(row) * (self.outputs * BF16_BYTES)
                offset = offset + column * (self.width * BF16_BYTES)
                if cutlass.const_expr(owned):
                    owner = column * self.width // owned
                    mailbox.store(peers[owner] + offset, words)
                else:
                    for peer in cutlass.range_constexpr(cute.size(peers)):
                        mailbox.store(peers[peer] + offset, words)

    def _total(self, ring: Ring, token, part) -> cute.TensorSSA:
        """BF16 of one token's `part`-th outputs: what the groups of columns have kept, in order."""
        total = memory.load_float(ring.sums[0, token, None], part, self.width)
        for group in range(1, self.column_groups):
            total = total + memory.load_float(ring.sums[group, token, None], part, self.width)
        return total.to(BFloat16)
