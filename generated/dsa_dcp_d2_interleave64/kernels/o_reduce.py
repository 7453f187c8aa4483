"""Generated from pipelines/dsa_dcp_d2_interleave64.yaml; do not edit.

Sum of the ranks' partial output projections:

    reduced    = BF16(sum over s of o_mail[s], in the order of the ranks)        FP32 sum
    out        = reduced, or BF16(prefix + reduced)
or, where blocks are mixed,
    new_prefix = reduced, or BF16(prefix + reduced)
    out        = BF16(AttnRes of the saved blocks and new_prefix)

one_shot   every rank has every partial and sums all columns.
two_shot   every rank sums the columns that it owns, sends them to every rank's o_gather, and copies
           the row that comes together there.

Every fragment is re-armed by the thread that has read it.

Grid     a thread a fragment of 8 columns, RANKS polls of it in flight. mix_blocks: a cluster a row,
         its vectors in registers. two_shot: not more CTAs than run at the same time (`resident`),
         as each waits for what all have sent.
Wait     ahead of everything; never released: it polls.
Rounding to BF16 as above; what is sent has no negative zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from kpipe.runtime.device import cluster, half, mailbox, memory, pdl, scalar
from kpipe.runtime.device.attn_res import VECTORS, AttnRes
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
ROUNDS = ("fp32", "bf16")
RMS_EPS = 1e-06


def operands(
    two_shot: bool = False,
    add_prefix: bool = False,
    mix_blocks: bool = False,
    half: str = "whole",
) -> tuple[TensorSpec | None, ...]:
    """Tensors of a launch, in the order of the arguments; None where a flag leaves one out."""
    rows = Symbol("rows")
    block = Symbol("block_stride", VECTOR, 64)
    source = (SOURCE_BYTES // BF16_BYTES, HIDDEN, 1)
    sends = two_shot and half != "collect"
    return (
        TensorSpec("o_mail", "bf16", (RANKS, rows, HIDDEN), source),
        TensorSpec("out", "bf16", (rows, HIDDEN)),
        TensorSpec("o_gather", "bf16", (rows, HIDDEN)) if two_shot else None,
        TensorSpec("o_gather_peers", "i64", (RANKS,)) if sends else None,
        TensorSpec("prefix", "bf16", (rows, HIDDEN)) if add_prefix else None,
        TensorSpec("saved", "bf16", (None, rows, HIDDEN), (block, HIDDEN, 1))
        if mix_blocks
        else None,
        *(
            TensorSpec(name, "bf16", (HIDDEN,)) if mix_blocks else None
            for name in ("mix_norm", "mix_query", "out_norm")
        ),
        TensorSpec("new_prefix", "bf16", (rows, HIDDEN)) if mix_blocks else None,
        TensorSpec("fault", "i64", (1,), align=8),
    )


def _values(words) -> list[Float32]:
    """The columns of a fragment, FP32."""
    return [x for place in range(mailbox.WORDS) for x in scalar.unpack_bf16(words[place])]


def _rounded(values: list[Float32]) -> list[Uint32]:
    """The words of a fragment: its columns rounded to BF16."""
    return [half.pack_bf16(values[pair], values[pair + 1]) for pair in range(0, VECTOR, 2)]


@dataclass(frozen=True)
class OReduce:
    """out = BF16(sum of the ranks' partials), on top of the residual stream or alone.

    pdl:        launch with the attribute that lets this grid start before its predecessor ends.
    two_shot:   sums what this rank owns and exchanges the sums.
    add_prefix: adds the sums to the residual stream.
    mix_blocks: mixes that with the saved blocks.
    round_mix:  fp32, or bf16: the mixture is rounded ahead of its norm.
    rank:       whose columns these are; means nothing in one shot.
    half:       whole; or apart the sum that it sends (publish) and the row that it waits for
                (collect), of a two-shot sum.
    resident:   CTAs that run at the same time for sure.
    """

    pdl: bool = True
    two_shot: bool = False
    add_prefix: bool = False
    mix_blocks: bool = False
    round_mix: str = "fp32"
    rank: int = 0
    half: str = "whole"
    resident: int = 132

    def __post_init__(self) -> None:
        if self.half not in HALVES:
            raise ValueError(f"half is {self.half!r}; choose from {', '.join(HALVES)}")
        if self.round_mix not in ROUNDS:
            raise ValueError(f"round_mix is {self.round_mix!r}; choose from {', '.join(ROUNDS)}")
        if self.mix_blocks and not self.attn_res.parts:
            raise ValueError(f"mix_blocks: {HIDDEN} columns are not whole warps of fragments")
        if not 0 <= self.rank < RANKS:
            raise ValueError(f"rank {self.rank} is outside 0..{RANKS - 1}")
        if self.two_shot and (OWNED * RANKS != HIDDEN or OWNED % VECTOR):
            raise ValueError(f"two_shot: {HIDDEN} columns are not {RANKS} times whole fragments")

    @property
    def attn_res(self) -> AttnRes:
        """What is done with a row behind its sum."""
        return AttnRes(HIDDEN, RMS_EPS, self.round_mix == "bf16")

    @property
    def parts(self) -> int:
        """CTAs of a cluster."""
        return self.attn_res.parts if self.mix_blocks else 1

    def resident_ctas(self, rows: int) -> int:
        """CTAs that have to run at once; a two-shot sum makes do with what there is."""
        return self.parts

    @cute.jit
    def __call__(
        self,
        o_mail: cute.Tensor,
        out: cute.Tensor,
        o_gather: cute.Tensor | None,
        o_gather_peers: cute.Tensor | None,
        prefix: cute.Tensor | None,
        saved: cute.Tensor | None,
        mix_norm: cute.Tensor | None,
        mix_query: cute.Tensor | None,
        out_norm: cute.Tensor | None,
        new_prefix: cute.Tensor | None,
        fault: cute.Tensor,
        stream,
    ):
        if cutlass.const_expr(self.mix_blocks):
            clusters = out.shape[0]
            if cutlass.const_expr(self.two_shot):
                clusters = cutlass.min(clusters, self._resident_clusters())
            weights = mix_norm, mix_query, out_norm
            self.o_reduce_mixed(
                o_mail, out, o_gather, o_gather_peers, prefix, saved, weights, new_prefix, fault
            ).launch(
                grid=[clusters * self.parts, 1, 1],
                block=[self.attn_res.threads, 1, 1],
                cluster=[self.parts, 1, 1],
                stream=stream,
                use_pdl=self.pdl,
                min_blocks_per_mp=1,
            )
            return
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
                words = self._streamed(prefix, row, piece, words)
                memory.store_words(self._piece(out, row, piece), words)
        else:
            if cutlass.const_expr(self.half != "collect"):
                self._send(o_mail, rows, o_gather_peers, first, step, fault)
            if cutlass.const_expr(self.half != "publish"):
                self._receive(o_gather, out, prefix, first, step, fault)

    @cute.kernel
    def o_reduce_mixed(
        self,
        o_mail: cute.Tensor,
        out: cute.Tensor,
        o_gather: cute.Tensor | None,
        o_gather_peers: cute.Tensor | None,
        prefix: cute.Tensor | None,
        saved: cute.Tensor,
        weights: tuple,
        new_prefix: cute.Tensor,
        fault: cute.Tensor,
    ):
        attn_res, rows = self.attn_res, out.shape[0]
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        ctas = cute.arch.grid_dim()[0]
        part, clusters = cta % self.parts, ctas // self.parts
        pdl.wait()
        if cutlass.const_expr(self.two_shot and self.half != "collect"):
            first, step = cta * attn_res.threads + thread, ctas * attn_res.threads
            self._send(o_mail, rows, o_gather_peers, first, step, fault)
        if cutlass.const_expr(self.half != "publish"):
            shared = attn_res.allocate()
            piece = part * attn_res.threads + thread
            norm, query, weight = [self._weights(each, piece) for each in weights]
            query = [one * other for one, other in zip(norm, query, strict=True)]
            cluster.meet(self.parts)  # before a peer is written to
            for row in cutlass.range(cta // self.parts, rows, clusters, unroll=1):
                blocks = self._blocks(saved, row, piece)
                if cutlass.const_expr(self.two_shot):
                    words = self._gathered(o_gather, row, piece, fault)
                else:
                    words = self._sum(o_mail, row, piece, fault)
                words = self._streamed(prefix, row, piece, words)
                memory.store_words(self._piece(new_prefix, row, piece), words)
                vectors = [_values(blocks[number, None].load()) for number in range(VECTORS - 1)]
                vectors.append(_values(words))
                turn = row // clusters % 2
                y = attn_res.mixed(
                    vectors, query, weight, saved.shape[0], shared, thread, part, turn
                )
                memory.store_words(self._piece(out, row, piece), _rounded(y))

    def _resident_clusters(self) -> int:
        """Clusters that run at the same time for sure: a GPC may have a rest that holds none."""
        return max(1, self.resident // (self.parts + 1))

    def _weights(self, weight: cute.Tensor, piece) -> list[Float32]:
        """This thread's columns of a weight, FP32."""
        fragment = memory.load_float(weight, piece, VECTOR)
        return [fragment[place] for place in range(VECTOR)]

    @cute.jit
    def _blocks(self, saved: cute.Tensor, row, piece) -> cute.Tensor:
        """Words (block, word) of one fragment of every saved block; zeros for those that lack."""
        layout = cute.make_layout((VECTORS - 1, mailbox.WORDS), stride=(mailbox.WORDS, 1))
        words = cute.make_rmem_tensor(layout, Uint32)
        words.fill(0)
        for number in cutlass.range_constexpr(VECTORS - 1):
            if number < saved.shape[0]:
                block = saved[number, None, None]
                words[number, None].store(self._piece(block, row, piece).load())
        return words

    @cute.jit
    def _gathered(self, o_gather: cute.Tensor, row, piece, fault: cute.Tensor):
        """One fragment of a row that comes together here; re-arms it."""
        place = Int64(row) * ROW_BYTES + piece * mailbox.FRAGMENT_BYTES
        address = o_gather.iterator.toint() + place
        words = mailbox.settle(mailbox.load(address), address, SENTINEL, "o_reduce", fault)
        mailbox.rearm(address, SENTINEL)
        return words

    def _streamed(self, prefix: cute.Tensor | None, row, piece, words: list) -> list[Uint32]:
        """A fragment of `reduced` on top of the residual stream, or alone."""
        if not self.add_prefix:
            return words
        stream = _values(self._piece(prefix, row, piece).load())
        return _rounded([x + y for x, y in zip(stream, _values(words), strict=True)])

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
            values = _values(words)
            if cutlass.const_expr(source == 0):
                sums = values
            else:
                sums = [total + value for total, value in zip(sums, values, strict=True)]
        return _rounded(sums)

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
            places = [base + number * step for number in range(IN_FLIGHT)]
            # Past the end the last one is looked at, and no more than that: it is another thread's.
            looked = [cutlass.min(place, items - 1) for place in places]
            addresses = [start + Int64(place) * mailbox.FRAGMENT_BYTES for place in looked]
            polled = [mailbox.load(address) for address in addresses]
            for number in cutlass.range_constexpr(IN_FLIGHT):
                if places[number] < items:
                    address, place = addresses[number], places[number]
                    words = mailbox.settle(polled[number], address, SENTINEL, "o_reduce", fault)
                    mailbox.rearm(address, SENTINEL)
                    row, piece = place // pieces, place % pieces
                    words = self._streamed(prefix, row, piece, words)
                    memory.store_words(self._piece(out, row, piece), words)
