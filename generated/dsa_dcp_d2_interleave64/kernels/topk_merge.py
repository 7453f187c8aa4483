"""Generated from pipelines/dsa_dcp_d2_interleave64.yaml; do not edit.

Exact top-k of all ranks' candidates of a row, kept to the keys that this rank holds, as physical
cache rows in ascending order of position.

    selected = of the min(TOP_K, candidates) best ones those of this rank, as
               block_table[position // PAGE] * block rows + position % PAGE; -1 behind the last
    valid    = how many of them

A candidate is (bits of its score, global id); of equal scores at the TOP_K-th place the lower ids
are kept (`low_id`) or the higher ones (`high_id`). Every key of the global top-k is among its
holder's candidates, so the result is that of one list. A rank sends its own keys only, in ascending
order, so this rank's share of the list is what is chosen of its own candidates, in their order.

Grid     (rows); a CTA looks at all candidates of a row, a thread at the same ones every time.
Rank     (score, id) as one integer of RANK_BITS bits, in which no two are equal.
Search   histograms of BIN_BITS bits after BIN_BITS bits until the bin of the TOP_K-th candidate
         holds only chosen ones. The first one polls, the others read again what has come.
Wait     ahead of everything; never released: it polls. Every thread re-arms what it has read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import histogram, mailbox, memory, ordered, pdl, reduce
from kpipe.runtime.device.digits import BIN_BITS, BINS
from kpipe.runtime.host.compile import Symbol, TensorSpec
from kpipe.runtime.sharding import Shard

RANKS = 2
TOP_K = 2048
CONTEXT = 131072  # keys of one rank
PAGE = 64  # tokens of a block of the latent cache
ROW_BYTES = 576  # of one token in it
ROWS_CAP = 64  # rows of a mailbox

TIES = ("low_id", "high_id")
PAIR_WORDS = 2
HELD = mailbox.WORDS // PAIR_WORDS  # candidates of a fragment
PIECES = TOP_K // HELD  # fragments of a row of one rank
THREADS = 1024 if PIECES >= 1024 else 256
WARPS = THREADS // reduce.WARP
SOURCE_BYTES = ROWS_CAP * TOP_K * PAIR_WORDS * mailbox.WORD_BYTES
IN_FLIGHT = min(RANKS, 8)  # fragments of a thread
RANK_BITS = -(-(32 + (CONTEXT * RANKS - 1).bit_length()) // BIN_BITS) * BIN_BITS
ID_BITS = RANK_BITS - 32  # an id has as many or fewer
EMPTY_ID = 0x8000_0000
NOTHING = -1


class Shared(NamedTuple):
    """Shared memory, all uint32."""

    counts: cute.Tensor
    groups: cute.Tensor
    found: cute.Tensor  # what `histogram.find` says
    present: cute.Tensor  # candidates of the row
    taken: cute.Tensor  # chosen ones of this rank, by warp


class Limit(NamedTuple):
    """Candidates up to here are chosen."""

    prefix: Uint64
    shift: Int32


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows = Symbol("rows")
    block = (Symbol("block_stride", ROW_BYTES, 64), ROW_BYTES, 1)
    source = SOURCE_BYTES // mailbox.WORD_BYTES
    sources = (source, TOP_K * PAIR_WORDS, PAIR_WORDS, 1)
    return (
        TensorSpec("candidates", "i32", (RANKS, rows, TOP_K, PAIR_WORDS), sources),
        TensorSpec("lengths", "i32", (None,), align=4),
        TensorSpec("block_table", "i32", (None, None), (Symbol("table_pitch"), 1), align=4),
        TensorSpec("latent_kv", "u8", (None, PAGE, ROW_BYTES), block, align=1),
        TensorSpec("selected", "i32", (rows, TOP_K)),
        TensorSpec("valid", "i32", (rows,), align=4),
        TensorSpec("fault", "i64", (1,), align=8),
    )


@dataclass(frozen=True)
class TopkMerge:
    """selected, valid = this rank's share of the exact global top-k of every row.

    pdl: launch with the attribute that lets this grid start before its predecessor ends.
    tie: low_id or high_id.
    rank, ranks, interleave: this rank's share of every context, as runtime.sharding.Shard has it.
    """

    pdl: bool = True
    tie: str = "low_id"
    rank: int = 0
    ranks: int = RANKS
    interleave: int = 64

    def __post_init__(self) -> None:
        if self.tie not in TIES:
            raise ValueError(f"tie is {self.tie!r}; choose from {', '.join(TIES)}")
        self.shard  # noqa: B018  refuses what is no share

    @property
    def shard(self) -> Shard:
        """This rank's share of every context."""
        return Shard(self.rank, self.ranks, self.interleave)

    @cute.jit
    def __call__(
        self,
        candidates: cute.Tensor,
        lengths: cute.Tensor,
        block_table: cute.Tensor,
        latent_kv: cute.Tensor,
        selected: cute.Tensor,
        valid: cute.Tensor,
        fault: cute.Tensor,
        stream,
    ):
        block_rows = Int32(latent_kv.layout.stride[0] // ROW_BYTES)
        queries = selected.shape[0] // lengths.shape[0]
        operands = candidates, queries, block_table, block_rows, selected, valid, fault
        self.topk_merge(*operands).launch(
            grid=[selected.shape[0], 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def topk_merge(
        self,
        candidates: cute.Tensor,
        queries: Int32,
        block_table: cute.Tensor,
        block_rows: Int32,
        selected: cute.Tensor,
        valid: cute.Tensor,
        fault: cute.Tensor,
    ):
        row = cute.arch.block_idx()[0]
        shared = self._shared(SmemAllocator())
        histogram.clear(shared.counts, THREADS)
        histogram.clear(shared.present, THREADS)
        cute.arch.sync_threads()

        pdl.wait()
        start = candidates.iterator.toint() + Int64(row) * (TOP_K * PAIR_WORDS * mailbox.WORD_BYTES)
        self._count(start, Uint64(0), Int32(RANK_BITS - BIN_BITS), True, shared, fault)
        cute.arch.sync_threads()
        limit = self._search(start, shared, fault)
        table = block_table[row // queries, None]
        count = self._emit(start, limit, table, block_rows, selected[row, None], shared)
        for place in cutlass.range(count + cute.arch.thread_idx()[0], TOP_K, THREADS, unroll=1):
            selected[row, place] = Int32(NOTHING)
        if cute.arch.thread_idx()[0] == 0:
            valid[row] = count
        self._rearm(start)

    def _shared(self, allocator: SmemAllocator) -> Shared:
        return Shared(
            counts=memory.allocate(allocator, Uint32, BINS),
            groups=memory.allocate(allocator, Uint32, BINS // histogram.GROUP),
            found=memory.allocate(allocator, Uint32, 3),
            present=memory.allocate(allocator, Uint32, 1),
            taken=memory.allocate(allocator, Uint32, WARPS),
        )

    def _address(self, start, source: int, piece) -> Int64:
        """Where a fragment of one rank's candidates lies."""
        return start + Int64(source * SOURCE_BYTES) + piece * mailbox.FRAGMENT_BYTES

    def _rank_of(self, bits: Uint32, token: Uint32) -> Uint64:
        """Score and id as one integer: the smaller is ahead."""
        order = token if self.tie == "low_id" else Uint32(2**ID_BITS - 1) - token
        return (Uint64(ordered.descending(bits.bitcast(Float32))) << ID_BITS) | Uint64(order)

    @cute.jit
    def _count(self, start, prefix: Uint64, shift, first: cutlass.Constexpr, shared: Shared, fault):
        """Counts the candidates whose rank begins with `prefix` by their next bits, down to
        `shift`; the first time it polls, and counts all of them as well."""
        present = Int32(0)
        for piece in cutlass.range(cute.arch.thread_idx()[0], PIECES, THREADS, unroll=1):
            for group in cutlass.range_constexpr(0, RANKS, IN_FLIGHT):
                sources = range(group, min(group + IN_FLIGHT, RANKS))
                addresses = [self._address(start, source, piece) for source in sources]
                loaded = [mailbox.load(address) for address in addresses]
                for number in cutlass.range_constexpr(len(sources)):
                    words = loaded[number]
                    if cutlass.const_expr(first):
                        words = mailbox.settle(
                            words, addresses[number], mailbox.ALL_ONES, "topk_merge", fault
                        )
                    for place in cutlass.range_constexpr(0, mailbox.WORDS, PAIR_WORDS):
                        rank = self._rank_of(words[place], words[place + 1])
                        held = words[place + 1] != Uint32(EMPTY_ID)
                        present = present + Int32(held)
                        inside = held
                        if cutlass.const_expr(not first):
                            inside = held and (rank >> (shift + BIN_BITS)) == prefix
                        digit = Int32(Uint32(rank >> shift) & Uint32(BINS - 1))
                        memory.add_shared(shared.counts, digit, Uint32(1), inside)
        if cutlass.const_expr(first):
            present = cute.arch.warp_redux_sync(present, "add")
            if cute.arch.lane_idx() == 0:
                memory.add_shared(shared.present, 0, Uint32(present), present > 0)

    @cute.jit
    def _find(self, wanted: Uint32, shared: Shared):
        """shared.found for the histogram that all have counted."""
        cute.arch.sync_threads()
        histogram.sum_groups(shared.counts, shared.groups, THREADS)
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == 0:
            histogram.find(shared.counts, shared.groups, wanted, shared.found)
        cute.arch.sync_threads()

    @cute.jit
    def _search(self, start, shared: Shared, fault):
        """The limit behind the TOP_K best candidates, or behind all of them."""
        prefix, shift = Uint64(0), Int32(RANK_BITS)  # no bit is left: all are chosen
        if shared.present[0] > Uint32(TOP_K):
            need = Uint32(TOP_K)
            shift = Int32(RANK_BITS - BIN_BITS)
            self._find(need, shared)
            prefix, need = Uint64(shared.found[0]), need - shared.found[1]
            count = shared.found[2]
            while count > need and shift > 0:
                cute.arch.sync_threads()  # all have read what was found
                histogram.clear(shared.counts, THREADS)
                cute.arch.sync_threads()
                shift = shift - BIN_BITS
                self._count(start, prefix, shift, False, shared, fault)
                self._find(need, shared)
                prefix = (prefix << BIN_BITS) | Uint64(shared.found[0])
                need = need - shared.found[1]
                count = shared.found[2]
        return Limit(prefix, shift)

    def _chosen(self, bits: Uint32, token: Uint32, limit: Limit):
        """Whether a candidate is there and not behind the limit."""
        ahead = (self._rank_of(bits, token) >> limit.shift) <= limit.prefix
        return (token != Uint32(EMPTY_ID)) & ahead

    @cute.jit
    def _emit(
        self, start, limit: Limit, table: cute.Tensor, block_rows, selected: cute.Tensor,
        shared: Shared,
    ):  # fmt: skip
        """Stores the chosen ones of this rank and returns how many there are."""
        thread, lane, warp = cute.arch.thread_idx()[0], cute.arch.lane_idx(), cute.arch.warp_idx()
        begin = Int32(0)
        for base in cutlass.range_constexpr(0, PIECES, THREADS):
            piece = cutlass.min(base + thread, PIECES - 1)
            words = mailbox.load(self._address(start, self.rank, piece))
            inside = base + thread < PIECES
            chosen = [
                inside & self._chosen(words[place], words[place + 1], limit)
                for place in range(0, mailbox.WORDS, PAIR_WORDS)
            ]
            mine = Int32(chosen[0]) + Int32(chosen[1])
            upto = reduce.running_sum(mine)
            if lane == reduce.WARP - 1:
                shared.taken[warp] = Uint32(upto)
            cute.arch.sync_threads()
            by_warp = Int32(0)
            if lane < WARPS:
                by_warp = Int32(shared.taken[lane])
            ahead = Int32(0)
            if lane < warp:
                ahead = by_warp
            place = begin + cute.arch.warp_redux_sync(ahead, "add") + upto - mine
            for number in cutlass.range_constexpr(HELD):
                if chosen[number]:
                    token = Int32(words[PAIR_WORDS * number + 1])
                    position = self.shard.local(token)
                    selected[place] = table[position // PAGE] * block_rows + position % PAGE
                    place = place + 1
            begin = begin + cute.arch.warp_redux_sync(by_warp, "add")
            cute.arch.sync_threads()  # before `taken` is written again
        return begin

    @cute.jit
    def _rearm(self, start):
        """What this thread has read, of all ranks."""
        for piece in cutlass.range(cute.arch.thread_idx()[0], PIECES, THREADS, unroll=1):
            for source in cutlass.range_constexpr(RANKS):
                mailbox.rearm(self._address(start, source, piece), mailbox.ALL_ONES)
