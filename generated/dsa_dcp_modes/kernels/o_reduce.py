"""Generated from pipelines/dsa_dcp_modes.yaml; do not edit.

Sum of the ranks' partial output projections:

    reduced = BF16(sum over s of o_mail[s], in the order of the ranks)        FP32 sum
    out     = reduced, or BF16(prefix + reduced)

one_shot   every rank has every partial and sums all columns.
two_shot   every rank sums the columns that it owns, sends them to every rank's o_gather, and copies
           the row that comes together there.

Every fragment is re-armed by the thread that has read it.

Grid     a thread a fragment of 8 columns, RANKS polls of it in flight. two_shot: not more CTAs
         than run at the same time (`resident`), as each waits for what all have sent.
Wait     ahead of everything; never released: it polls.
Rounding to BF16 as above; what is sent has no negative zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from kpipe.runtime.device import half, mailbox, memory, pdl, scalar
from kpipe.runtime.host.compile import Symbol, TensorSpec

RANKS = 2
HIDDEN = 7168
ROWS_CAP = 64  # rows of a mailbox

THREADS = 256
BF16_BYTES = 2
VECTOR = memory.BF16_VECTOR  # columns of a fragment
ROW_BYTES = HIDDEN * BF16_BYTES
SOURCE_BYTES = ROWS_CAP * ROW_BYTES  # from one rank's partial to the next
OWNED = HIDDEN // RANKS  # columns that a rank sums in a two-shot sum
SENTINEL = mailbox.NEGATIVE_ZERO
IN_FLIGHT = 4  # fragments of a thread, of the row that comes together
HALVES = ("whole", "publish", "collect")


def operands(
    two_shot: bool = False, add_prefix: bool = False, half: str = "whole"
) -> tuple[TensorSpec | None, ...]:
    """Tensors of a launch, in the order of the arguments; None where a flag leaves one out."""
    rows = Symbol("rows")
    source = (SOURCE_BYTES // BF16_BYTES, HIDDEN, 1)
    sends = two_shot and half != "collect"
    return (
        TensorSpec("o_mail", "bf16", (RANKS, rows, HIDDEN), source),
        TensorSpec("out", "bf16", (rows, HIDDEN)),
        TensorSpec("o_gather", "bf16", (rows, HIDDEN)) if two_shot else None,
        TensorSpec("o_gather_peers", "i64", (RANKS,)) if sends else None,
        TensorSpec("prefix", "bf16", (rows, HIDDEN)) if add_prefix else None,
        TensorSpec("fault", "i64", (1,), align=8),
    )


def _added(pair: Uint32, other: Uint32) -> Uint32:
    """The sums of two pairs of BF16, rounded."""
    (low, high), (other_low, other_high) = scalar.unpack_bf16(pair), scalar.unpack_bf16(other)
    return half.pack_bf16(low + other_low, high + other_high)


@dataclass(frozen=True)
class OReduce:
    """out = BF16(sum of the ranks' partials), on top of the residual stream or alone.

    pdl:        launch with the attribute that lets this grid start before its predecessor ends.
    two_shot:   sums what this rank owns and exchanges the sums.
    add_prefix: adds the sums to the residual stream.
    rank:       whose columns these are; means nothing in one shot.
    half:       whole; or apart the sum that it sends (publish) and the row that it waits for
                (collect), of a two-shot sum.
    resident:   CTAs that run at the same time for sure.
    """

    pdl: bool = True
    two_shot: bool = False
    add_prefix: bool = False
    rank: int = 0
    half: str = "whole"
    resident: int = 132

    def __post_init__(self) -> None:
        if self.half not in HALVES:
            raise ValueError(f"half is {self.half!r}; choose from {', '.join(HALVES)}")
        if not 0 <= self.rank < RANKS:
            raise ValueError(f"rank {self.rank} is outside 0..{RANKS - 1}")
        if self.two_shot and (OWNED * RANKS != HIDDEN or OWNED % VECTOR):
            raise ValueError(f"two_shot: {HIDDEN} columns are not {RANKS} times whole fragments")

    def resident_ctas(self, rows: int) -> int:
        """CTAs that have to run at once; a two-shot sum makes do with what there is."""
        return 1

    @cute.jit
    def __call__(
        self,
        o_mail: cute.Tensor,
        out: cute.Tensor,
        o_gather: cute.Tensor | None,
        o_gather_peers: cute.Tensor | None,
        prefix: cute.Tensor | None,
        fault: cute.Tensor,
        stream,
    ):
        ctas = cute.ceil_div(out.shape[0] * (HIDDEN // VECTOR), THREADS)
        if cutlass.const_expr(self.two_shot):
            ctas = cutlass.min(ctas, self.resident)
        self.o_reduce(o_mail, out, o_gather, o_gather_peers, prefix, fault).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
            min_blocks_per_mp=1,  # registers for what is in flight
        )

    @cute.kernel
    def o_reduce(
        self,
        o_mail: cute.Tensor,
        out: cute.Tensor,
        o_gather: cute.Tensor | None,
        o_gather_peers: cute.Tensor | None,
        prefix: cute.Tensor | None,
        fault: cute.Tensor,
    ):
        first = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        step = cute.arch.grid_dim()[0] * THREADS
        rows = out.shape[0]
        pdl.wait()
        if cutlass.const_expr(not self.two_shot):
            pieces = HIDDEN // VECTOR
            for item in cutlass.range(first, rows * pieces, step, unroll=1):
                row, piece = item // pieces, item % pieces
                words = self._sum(o_mail, row, piece, fault)
                self._store(out, prefix, row, piece, words)
        else:
            if cutlass.const_expr(self.half != "collect"):
                self._send(o_mail, rows, o_gather_peers, first, step, fault)
            if cutlass.const_expr(self.half != "publish"):
                self._receive(o_gather, out, prefix, first, step, fault)

    def _store(self, out: cute.Tensor, prefix: cute.Tensor | None, row, piece, words: list):
        """A fragment of `reduced` as it leaves: on top of the residual stream, or alone."""
        if self.add_prefix:
            stream = self._piece(prefix, row, piece).load()
            words = [_added(stream[place], word) for place, word in enumerate(words)]
        memory.store_words(self._piece(out, row, piece), words)

    def _piece(self, rows: cute.Tensor, row, piece) -> cute.Tensor:
        """The words of one fragment of a row."""
        return cute.recast_tensor(memory.vector_at(rows[row, None], piece, VECTOR), Uint32)

    @cute.jit
    def _sum(self, o_mail: cute.Tensor, row, piece, fault: cute.Tensor):
        """Words of the BF16 sums of one fragment over the ranks; re-arms it."""
        place = Int64(row) * ROW_BYTES + piece * mailbox.FRAGMENT_BYTES
        start = o_mail.iterator.toint() + place
        addresses = [start + Int64(source * SOURCE_BYTES) for source in range(RANKS)]
        polled = [mailbox.load(address) for address in addresses]
        sums = [Float32(0.0) for _ in range(VECTOR)]
        for source in cutlass.range_constexpr(RANKS):
            address = addresses[source]
            words = mailbox.settle(polled[source], address, SENTINEL, "o_reduce", fault)
            mailbox.rearm(address, SENTINEL)
            values = [value for word in words for value in scalar.unpack_bf16(word)]
            if cutlass.const_expr(source == 0):
                sums = values
            else:
                sums = [total + value for total, value in zip(sums, values, strict=True)]
        return [half.pack_bf16(sums[pair], sums[pair + 1]) for pair in range(0, VECTOR, 2)]

    @cute.jit
    def _send(self, o_mail: cute.Tensor, rows, peers: cute.Tensor, first, step, fault):
        """Sums of the owned columns, to every rank."""
        pieces = OWNED // VECTOR
        for item in cutlass.range(first, rows * pieces, step, unroll=1):
            row, piece = item // pieces, item % pieces
            words = self._sum(o_mail, row, self.rank * pieces + piece, fault)
            sent = [mailbox.clear_negative_zero(word) for word in words]
            offset = Int64(row) * ROW_BYTES + piece * mailbox.FRAGMENT_BYTES
            for peer in cutlass.range_constexpr(RANKS):
                mailbox.store(peers[peer] + offset, sent)

    @cute.jit
    def _receive(self, o_gather: cute.Tensor, out: cute.Tensor, prefix, first, step, fault):
        """The whole rows, as the ranks have sent them; re-arms them."""
        pieces = HIDDEN // VECTOR
        start, items = o_gather.iterator.toint(), out.shape[0] * pieces
        for base in cutlass.range(first, items, step * IN_FLIGHT, unroll=1):
            # Past the end this thread's first one again: never one that another thread re-arms.
            places = [base + number * step for number in range(IN_FLIGHT)]
            places = [base if place >= items else place for place in places]
            addresses = [start + Int64(place) * mailbox.FRAGMENT_BYTES for place in places]
            polled = [mailbox.load(address) for address in addresses]
            for number in cutlass.range_constexpr(IN_FLIGHT):
                address, place = addresses[number], places[number]
                words = mailbox.settle(polled[number], address, SENTINEL, "o_reduce", fault)
                mailbox.rearm(address, SENTINEL)
                self._store(out, prefix, place // pieces, place % pieces, words)
