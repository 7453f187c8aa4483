"""Generated from pipelines/dsa_tp.yaml; do not edit.

Exact top-k of a row's visible scores, as physical cache rows in ascending order of position.

    selected = the min(TOP_K, visible) best keys, as block_table[position // PAGE] * block rows
               + position % PAGE; -1 behind the last
    valid    = how many of them

Scores compare by their bits (+0 above -0), NaN counts as -inf; of equal scores at the TOP_K-th
place the lower positions are kept (`low_id`) or the higher ones (`high_id`).  Row i of request r
sees max(lengths[r] - q + 1 + i, 0) keys, with q = rows / requests.

Grid     (parts, rows); the CTAs of a row are a cluster and share its keys evenly, every warp
         takes neighbouring ones.
Rank     a key's place follows from (score, position) as one integer, in which no two are equal.
Search   the scores are read once, cut to FP16: a histogram of the upper BIN_BITS bits finds the
         bin of the TOP_K-th key. Keys in better bins are chosen, the few in this bin are sent to
         every CTA and each counts those ahead of it. More than CANDIDATES of them (ties, scores
         beyond FP16) are narrowed down by histograms of the integers first.
Parts    hand each other sums, bins and candidates by stores that complete on the receiver's
         barriers; the last ones come from all parts behind whatever they have received, so a CTA
         that has them may end.
Places   follow from counts of lower parts, warps and lanes; the list does not depend on timing.
Wait     ahead of it lengths and block_table, which are there before the layer; behind it
         the scores. The release stands behind the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, Uint64, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import (
    barrier,
    cluster,
    copy_async,
    digits,
    histogram,
    inbox,
    memory,
    ordered,
    pdl,
    reduce,
    short_list,
    tally,
)
from kpipe.runtime.device.digits import BIN_BITS, BINS, RUN, VECTOR
from kpipe.runtime.device.short_list import RANKERS, Share
from kpipe.runtime.device.tally import Tally
from kpipe.runtime.host.compile import Symbol, TensorSpec

TOP_K = 2048
CONTEXT = 131072  # columns of a row of scores
PAGE = 64  # tokens of a block of the latent cache
ROW_BYTES = 576  # of one token in it

TIES = ("low_id", "high_id")
PARTS = (1, 2, 4, 8, 16)
THREADS = (128, 256, 384, 512, 1024)
REGISTERS = 65536  # of an SM
FEW_REGISTERS = 48
"""Of a thread: 256 threads of so few fit beside a CTA of index_scores, which leaves 12288."""

MOST_KEPT = 81920
"""Keys whose digits fit into the shared memory of one CTA."""

CANDIDATES = 512
"""Keys of one bin that are ranked against each other."""

RANK_BYTES = 8  # of a candidate's rank
POSITION_BITS = (CONTEXT - 1).bit_length()
RANK_BITS = 32 + POSITION_BITS
FIRST_SHIFT = RANK_BITS
if 2 ** (RANK_BITS % BIN_BITS) > CANDIDATES:  # the last histogram would leave too many
    FIRST_SHIFT = -(-RANK_BITS // BIN_BITS) * BIN_BITS
NOTHING = -1


class Target(NamedTuple):
    """Where a row's list goes."""

    keys: cute.Tensor  # its scores
    table: cute.Tensor  # blocks of its request, from `page` on
    page: Int32
    block_rows: Int32  # cache rows from one block to the next
    selected: cute.Tensor


class Shared(NamedTuple):
    """Shared memory of a CTA."""

    digits: cute.Tensor  # two of 16 bits a word, every warp's in a region of its own
    tally: Tally
    table: cute.Tensor  # blocks of this CTA's keys
    queue: cute.Tensor  # positions of this CTA's candidates
    queued: cute.Tensor  # how many
    chosen: cute.Tensor  # a bit for each of this CTA's keys that is not chosen by its bin alone
    taken: cute.Tensor  # chosen keys by warp
    lower: cute.Tensor  # chosen candidates of lower parts
    told: cute.Tensor  # from every part, its chosen keys that are no candidates
    candidates: cute.Tensor  # ranks of all parts' candidates
    arrived: cute.Pointer  # the barrier of `told` and `candidates`


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows = Symbol("rows")
    block = (Symbol("block_stride", ROW_BYTES, 64), ROW_BYTES, 1)
    return (
        TensorSpec("scores", "fp32", (rows, CONTEXT)),
        TensorSpec("lengths", "i32", (None,), align=4),
        TensorSpec("block_table", "i32", (None, None), (Symbol("table_pitch"), 1), align=4),
        TensorSpec("latent_kv", "u8", (None, PAGE, ROW_BYTES), block, align=1),
        TensorSpec("selected", "i32", (rows, TOP_K)),
        TensorSpec("valid", "i32", (rows,), align=4),
    )


@dataclass(frozen=True)
class TopkSelect:
    """selected, valid = the exact top-k of every row.

    release: let the dependent grid start once the scores have been read for the last time.
    pdl:     launch with the attribute that lets this grid start before its predecessor ends.
    tie:     low_id or high_id.
    parts:   CTAs that share a row, 1 to 16, a power of two.
    threads: of a CTA.
    """

    release: bool = True
    pdl: bool = True
    tie: str = "low_id"
    parts: int = 8
    threads: int = 1024

    def __post_init__(self) -> None:
        if self.tie not in TIES:
            raise ValueError(f"tie is {self.tie!r}; choose from {', '.join(TIES)}")
        if self.parts not in PARTS:
            raise ValueError(f"parts is {self.parts}; choose 1, 2, 4, 8 or 16")
        if self.threads not in THREADS:
            known = ", ".join(map(str, THREADS))
            raise ValueError(f"threads is {self.threads}; choose from {known}")
        if self.kept > MOST_KEPT:
            least = -(-CONTEXT // MOST_KEPT)
            reason = f"a CTA keeps {MOST_KEPT} of {CONTEXT} keys at most"
            raise ValueError(f"parts is {self.parts}; {reason}: choose at least {least}")

    @property
    def kept(self) -> int:
        """Keys that a CTA has at most, in whole runs of all its warps."""
        turn = self.warps * RUN
        return -(-CONTEXT // (self.parts * turn)) * turn

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.threads // reduce.WARP

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        lengths: cute.Tensor,
        block_table: cute.Tensor,
        latent_kv: cute.Tensor,
        selected: cute.Tensor,
        valid: cute.Tensor,
        stream,
    ):
        block_rows = Int32(latent_kv.layout.stride[0] // ROW_BYTES)
        self.topk_select(scores, lengths, block_table, block_rows, selected, valid).launch(
            grid=[self.parts, scores.shape[0], 1],
            block=[self.threads, 1, 1],
            cluster=[self.parts, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
            min_blocks_per_mp=max(REGISTERS // (self.threads * FEW_REGISTERS), 1),
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def topk_select(
        self,
        scores: cute.Tensor,
        lengths: cute.Tensor,
        block_table: cute.Tensor,
        block_rows: Int32,
        selected: cute.Tensor,
        valid: cute.Tensor,
    ):
        part, row, _ = cute.arch.block_idx()
        shared = self._shared(SmemAllocator())
        queries = scores.shape[0] // lengths.shape[0]
        request = row // queries
        later = queries - 1 - row % queries
        keys = scores[row, None]
        visible = cutlass.max(lengths[request] - later, 0)
        width = self._width(visible)
        page = part * self.warps * width // PAGE
        listed = Target(keys, block_table[request, None], Int32(0), block_rows, selected[row, None])
        target = Target(keys, shared.table, page, block_rows, selected[row, None])
        self._make_ready(shared)
        if visible > TOP_K:
            self._request_table(block_table[request, None], page, visible, shared.table)

        pdl.wait()
        if part == 0 and cute.arch.thread_idx()[0] == 0:
            valid[row] = cutlass.min(visible, TOP_K)
        if visible <= TOP_K:
            if self.release:
                pdl.release()
            self._take_all(part, visible, listed)
        else:
            self._select(part, visible, width, target, shared)

    def _width(self, visible) -> Int32:
        """Keys of a warp, in whole runs."""
        return cute.ceil_div(visible, self.parts * self.warps * RUN) * RUN

    def _shared(self, allocator: SmemAllocator) -> Shared:
        def words(count: int, dtype: type = Uint32) -> cute.Tensor:
            return memory.allocate(allocator, dtype, count)

        return Shared(
            digits=words(self.kept // 2),
            tally=tally.allocate(allocator, BINS, self.parts),
            table=words(self.kept // PAGE + 2, Int32),
            queue=words(CANDIDATES, Int32),
            queued=words(1),
            chosen=words(self.kept // memory.WORD_BITS),
            taken=words(self.warps),
            lower=words(1),
            told=words(self.parts),
            candidates=words(CANDIDATES, Uint64),
            arrived=barrier.allocate(allocator, 1),
        )

    @cute.jit
    def _make_ready(self, shared: Shared):
        """Clears what is counted in, and opens the inboxes to the whole cluster."""
        tally.clear(shared.tally, self.threads)
        histogram.clear(shared.chosen, self.threads)
        if cute.arch.thread_idx()[0] == 0:
            shared.queued[0] = Uint32(0)
            shared.lower[0] = Uint32(0)
            barrier.make_ready(shared.arrived, 1, 1)
            tally.open_inboxes(shared.tally)
        cluster.meet(self.parts)

    @cute.jit
    def _request_table(self, table: cute.Tensor, page, visible, kept: cute.Tensor):
        """The blocks of this CTA's keys, which nobody waits for ahead of the last step."""
        pages = cute.ceil_div(visible, PAGE) - page
        count = cutlass.min(pages, cute.size(kept))
        for place in range(cute.arch.thread_idx()[0], count, self.threads):
            source = memory.vector_at(table, page + place, 1)
            copy_async.copy(source, memory.vector_at(kept, place, 1))

    @cute.jit
    def _take_all(self, part, visible, target: Target):
        """Every visible position in order, and nothing behind them."""
        start = part * self.threads + cute.arch.thread_idx()[0]
        for place in cutlass.range(start, TOP_K, self.parts * self.threads, unroll=1):
            row = Int32(NOTHING)
            if place < visible:
                row = self._physical(place, target)
            target.selected[place] = row

    @cute.jit
    def _physical(self, position, target: Target):
        """The cache row of a position."""
        page, token = Uint32(position) // PAGE, Uint32(position) % PAGE
        return target.table[Int32(page) - target.page] * target.block_rows + Int32(token)

    @cute.jit
    def _select(self, part, visible, width, target: Target, shared: Shared):
        """The list of a row with more than TOP_K visible keys."""
        warp, found = cute.arch.warp_idx(), shared.tally.found
        first = (part * self.warps + warp) * width
        share = Share(target.keys, first, cutlass.min(first + width, visible), warp * width)
        turn, bin_found, above = Int32(0), Uint32(0), Uint32(0)
        count = Uint32(CANDIDATES + 1)
        shift, prefix = Int32(FIRST_SHIFT), Uint64(0)
        while count > Uint32(CANDIDATES):
            if turn == 0:
                digits.count(share, shared.digits, shared.tally.counts)
            else:
                shift = shift - BIN_BITS
                self._count_ranks(share, bin_found, prefix, shift, shared)
            self._search(turn % 2, part, Uint32(TOP_K) - above, shared.tally)
            if turn == 0:
                bin_found = found[0]
            else:
                prefix = (prefix << BIN_BITS) | Uint64(found[0])
            above = above + found[1]
            count = found[2]
            turn = turn + 1
        self._sort_out(share, bin_found, prefix, shift, turn > 1, shared)
        copy_async.wait()  # the blocks
        cute.arch.sync_threads()
        self._send(part, count, share.keys, shared)
        if self.release:
            pdl.release()
        barrier.wait_for_peers(shared.arrived, 0)
        self._rank(part, width, Int32(count), Int32(TOP_K) - Int32(above), shared)
        cute.arch.sync_threads()
        self._emit(part, share, bin_found, target, shared)

    def _rank_of(self, score: Float32, position) -> Uint64:
        """Score and position as one integer: the smaller is ahead."""
        order = position if self.tie == "low_id" else 2**POSITION_BITS - 1 - position
        return (Uint64(ordered.descending(score)) << POSITION_BITS) | Uint64(Uint32(order))

    def _position_of(self, rank: Uint64) -> Int32:
        order = Int32(Uint32(rank & Uint64(2**POSITION_BITS - 1)))
        return order if self.tie == "low_id" else 2**POSITION_BITS - 1 - order

    @cute.jit
    def _search(self, parity, part, wanted, counted: Tally):
        """counted.found for the histogram that this CTA's warps have counted."""
        cute.arch.sync_threads()
        tally.send_sums(counted, part, self.parts, self.threads)
        if cute.arch.warp_idx() == 0:
            tally.find(counted, parity, part, self.parts, wanted)
            if cute.arch.lane_idx() == 0:
                tally.expect(counted)  # the next one, if there is any
        cute.arch.sync_threads()

    @cute.jit
    def _count_ranks(self, share: Share, bin_found, prefix: Uint64, shift, shared: Shared):
        """Counts this warp's keys of that bin whose rank begins with `prefix` by the next bits."""
        cute.arch.sync_threads()  # all have read what they found
        tally.clear(shared.tally, self.threads)
        cute.arch.sync_threads()
        for base in range(share.first, share.end, RUN):
            _, tied = digits.sorted_out(share, shared.digits, base, bin_found)
            while tied != Uint32(0):
                position = self._lowest(base, tied)
                rank = self._rank_of(share.keys[position], position)
                inside = (rank >> (shift + BIN_BITS)) == prefix
                digit = Int32(Uint32(rank >> shift) & Uint32(BINS - 1))
                memory.add_shared(shared.tally.counts, digit, Uint32(1), inside)
                tied = tied & (tied - Uint32(1))

    def _lowest(self, base, keys: Uint32) -> Int32:
        """Position of the lowest of this lane's `keys` of a run, a bit each."""
        place = Int32(cute.arch.popc(~keys & (keys - Uint32(1))))
        return base + cute.arch.lane_idx() * VECTOR + place

    @cute.jit
    def _sort_out(self, share: Share, bin_found, prefix: Uint64, shift, narrowed, shared: Shared):
        """Queues this warp's candidates and counts its keys ahead of them.

        Candidates are the keys of the bin; where it was `narrowed`, those whose rank begins with
        `prefix`.
        """
        sure, region = Int32(0), share.region - share.first
        for base in range(share.first, share.end, RUN):
            better, tied = digits.sorted_out(share, shared.digits, base, bin_found)
            sure = sure + Int32(cute.arch.popc(better))
            while tied != Uint32(0):
                position = self._lowest(base, tied)
                queues = True
                if narrowed:
                    upper = self._rank_of(share.keys[position], position) >> shift
                    queues = upper == prefix
                    memory.set_shared(shared.chosen, position + region, upper < prefix)
                    if upper < prefix:
                        sure = sure + 1
                if queues:
                    slot = memory.take_shared(shared.queued, 0)
                    shared.queue[Int32(slot)] = position
                tied = tied & (tied - Uint32(1))
        sure = cute.arch.warp_redux_sync(sure, "add")
        if cute.arch.lane_idx() == 0:
            shared.taken[cute.arch.warp_idx()] = Uint32(sure)

    @cute.jit
    def _send(self, part, count, keys: cute.Tensor, shared: Shared):
        """Every part gets this CTA's candidates, and how many of its keys are chosen anyway.

        A warp sends all of them to one part at a time: neighbouring words cost little more than
        one.
        """
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        if cute.arch.thread_idx()[0] == 0:
            barrier.expect(shared.arrived, Int32(count) * RANK_BYTES + self.parts * 4)
        before, own = Int32(shared.tally.found[3]), Int32(shared.tally.found[4])
        candidates = cute.recast_tensor(shared.candidates, Uint32)
        if warp < self.parts:
            mine = Int32(0)
            if lane < self.warps:
                mine = Int32(shared.taken[lane])
            chosen = Uint32(cute.arch.warp_redux_sync(mine, "add"))
            for peer in cutlass.range(warp, self.parts, self.warps, unroll=1):
                if lane == 0:
                    inbox.send_words([chosen], shared.told, part, shared.arrived, peer)
                for place in cutlass.range(lane, own, reduce.WARP, unroll=1):
                    position = shared.queue[place]
                    rank = self._rank_of(keys[position], position)
                    words = Uint32(rank & Uint64(0xFFFFFFFF)), Uint32(rank >> 32)
                    inbox.send_words(words, candidates, before + place, shared.arrived, peer)

    @cute.jit
    def _rank(self, part, width, count, need, shared: Shared):
        """Marks this part's ones of the `need` candidates ahead, and counts those before."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        at_once = reduce.WARP // RANKERS
        first = part * self.warps * width
        for base in cutlass.range(warp * at_once, count, self.warps * at_once, unroll=1):
            number = base + lane // RANKERS
            mine, ahead = short_list.count_ahead(shared.candidates, number, count)
            if lane % RANKERS == 0 and number < count and ahead < need:
                place = self._position_of(mine) - first
                within = place >= 0 and place < self.warps * width
                memory.add_shared(shared.lower, 0, Uint32(1), place < 0)
                owner = Int32(Uint32(place) // Uint32(width))
                memory.add_shared(shared.taken, owner, Uint32(1), within)
                memory.set_shared(shared.chosen, Uint32(place), within)

    @cute.jit
    def _emit(self, part, share: Share, bin_found, target: Target, shared: Shared):
        """Stores the chosen keys of this warp at their places."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        mine = Int32(0)
        if lane < warp:
            mine = Int32(shared.taken[lane])
        if lane < part:
            mine = mine + Int32(shared.told[lane])
        start = cute.arch.warp_redux_sync(mine, "add") + Int32(shared.lower[0])
        lower_lanes = Uint32(cute.arch.lanemask_lt())
        for base in range(share.first, share.end, RUN):
            chosen, _ = digits.sorted_out(share, shared.digits, base, bin_found)
            bit = share.region + base - share.first + lane * VECTOR
            marks = shared.chosen[bit // memory.WORD_BITS] >> Uint32(bit % memory.WORD_BITS)
            chosen = chosen | (marks & Uint32(2**VECTOR - 1))
            number, place, added = Uint32(cute.arch.popc(chosen)), start, Int32(0)
            for bit in cutlass.range_constexpr(VECTOR.bit_length()):
                odd = (number >> bit) & Uint32(1) != Uint32(0)
                vote = Uint32(cute.arch.vote_ballot_sync(odd))
                place = place + (Int32(cute.arch.popc(vote & lower_lanes)) << bit)
                added = added + (Int32(cute.arch.popc(vote)) << bit)
            while chosen != Uint32(0):
                position = self._lowest(base, chosen)
                target.selected[place] = self._physical(position, target)
                place = place + 1
                chosen = chosen & (chosen - Uint32(1))
            start = start + added
