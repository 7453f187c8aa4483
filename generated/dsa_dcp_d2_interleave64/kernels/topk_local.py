"""Generated from pipelines/dsa_dcp_d2_interleave64.yaml; do not edit.

Exact top-k of a row's scores on this rank, sent to every rank in ascending order of position.

    candidates[this rank, row, place] = (bits of the score, global id) of the min(TOP_K, visible)
                                        best keys; (-inf, EMPTY_ID) behind the last

Scores compare by their bits (+0 above -0), NaN counts as -inf and is sent as such, so that no word
is the sentinel; of equal scores at the TOP_K-th place the lower ids are kept (`low_id`) or the
higher ones (`high_id`), which on one rank are the lower or higher positions.  Row i of request r
sees the first max(lengths[r] - q + 1 + i, 0) keys, with q = rows / requests; of these the rank
holds a share.

Grid     (parts, rows); the CTAs of a row are a cluster and share its keys evenly, every warp
         takes neighbouring ones. Up to ALONE keys are left to the first CTA.
Rank     a key's place follows from (score, position) as one integer, in which no two are equal.
Search   the scores are read once, cut to FP16: a histogram of the upper BIN_BITS bits finds the
         bin of the TOP_K-th key. Keys in better bins are chosen, the few in this bin are sent to
         every CTA and each counts those ahead of it. More than CANDIDATES of them (ties, scores
         beyond FP16) are narrowed down by histograms of the integers first.
Places   follow from counts of lower parts, warps and lanes; the list does not depend on timing.
Wait     nothing is static; the wait comes first, the release behind the last scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint16, Uint32, Uint64, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import (
    cluster,
    digits,
    histogram,
    mailbox,
    memory,
    ordered,
    page_share,
    pdl,
    reduce,
    scalar,
    short_list,
)
from kpipe.runtime.device.digits import BIN_BITS, BINS, RUN, UNROLL, VECTOR
from kpipe.runtime.device.short_list import RANKERS, TIED, Share
from kpipe.runtime.host.compile import Symbol, TensorSpec
from kpipe.runtime.sharding import Shard

TOP_K = 2048
CONTEXT = 131072  # columns of a row of scores
RANKS = 2

TIES = ("low_id", "high_id")
PARTS = (1, 2, 4, 8)
THREADS = 1024
WARPS = THREADS // reduce.WARP
ALONE = 16384
"""Up to so many keys are one CTA's, as barriers of a cluster would take longer."""

MOST_KEPT = 65536
"""Keys whose digits fit into the shared memory of one CTA."""

CANDIDATES = 512
"""Keys of one bin that are ranked against each other."""

POSITION_BITS = (CONTEXT - 1).bit_length()
RANK_BITS = 32 + POSITION_BITS
FIRST_SHIFT = RANK_BITS
if 2 ** (RANK_BITS % BIN_BITS) > CANDIDATES:  # the last histogram would leave too many
    FIRST_SHIFT = -(-RANK_BITS // BIN_BITS) * BIN_BITS
PAIR_BYTES = 8  # of a candidate
MINUS_INFINITY = 0xFF80_0000
EMPTY_ID = 0x8000_0000


class Target(NamedTuple):
    """Where a row's list goes."""

    keys: cute.Tensor  # its scores
    peers: cute.Tensor  # addresses of this rank's rows
    offset: Int64  # of this row, in bytes


class Shared(NamedTuple):
    """Shared memory of a CTA."""

    digits: cute.Tensor  # two of 16 bits a word, every warp's in a region of its own
    lists: cute.Tensor  # the same memory: keys that may be chosen, by distance into the share
    counts: cute.Tensor  # histogram of this CTA
    totals: cute.Tensor
    groups: cute.Tensor
    found: cute.Tensor
    taken: cute.Tensor  # chosen keys by warp
    lower: cute.Tensor  # chosen keys of lower parts; length of the queue
    queue: cute.Tensor  # positions of this CTA's candidates
    candidates: cute.Tensor  # ranks of all parts' candidates
    last: cute.Tensor  # rank of the TOP_K-th key


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows = Symbol("rows")
    return (
        TensorSpec("scores", "fp32", (rows, CONTEXT)),
        TensorSpec("lengths", "i32", (None,), align=4),
        TensorSpec("candidates_peers", "i64", (RANKS,)),
    )


@dataclass(frozen=True)
class TopkLocal:
    """Every rank's mailbox gets the exact top-k that this rank has of every row.

    release: let the dependent grid start once the scores have been read for the last time.
    pdl:     launch with the attribute that lets this grid start before its predecessor ends.
    tie:     low_id or high_id.
    parts:   CTAs that share a row, 1 to 8, a power of two.
    rank, ranks, interleave: this rank's share of every context, as runtime.sharding.Shard has it.
    """

    release: bool = True
    pdl: bool = True
    tie: str = "low_id"
    parts: int = 8
    rank: int = 0
    ranks: int = RANKS
    interleave: int = 64

    def __post_init__(self) -> None:
        if self.tie not in TIES:
            raise ValueError(f"tie is {self.tie!r}; choose from {', '.join(TIES)}")
        if self.parts not in PARTS:
            raise ValueError(f"parts is {self.parts}; choose 1, 2, 4 or 8")
        if self.kept > MOST_KEPT:
            least = -(-CONTEXT // MOST_KEPT)
            reason = f"a CTA keeps {MOST_KEPT} of {CONTEXT} keys at most"
            raise ValueError(f"parts is {self.parts}; {reason}: choose at least {least}")
        self.shard  # noqa: B018  refuses what is no share

    @property
    def shard(self) -> Shard:
        """This rank's share of every context."""
        return Shard(self.rank, self.ranks, self.interleave)

    @property
    def kept(self) -> int:
        """Keys that a CTA has at most, in whole runs of all its warps."""
        most = max(-(-CONTEXT // self.parts), min(ALONE, CONTEXT))
        return -(-most // (WARPS * RUN)) * WARPS * RUN

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        lengths: cute.Tensor,
        candidates_peers: cute.Tensor,
        stream,
    ):
        self.topk_local(scores, lengths, candidates_peers).launch(
            grid=[self.parts, scores.shape[0], 1],
            block=[THREADS, 1, 1],
            cluster=[self.parts, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def topk_local(self, scores: cute.Tensor, lengths: cute.Tensor, candidates_peers: cute.Tensor):
        part, row, _ = cute.arch.block_idx()
        shared = self._shared(SmemAllocator())
        # Peers write to these once the whole cluster has cleared them.
        self._clear(shared)
        histogram.clear(shared.lower, THREADS)
        cluster.meet(self.parts)

        pdl.wait()
        queries = scores.shape[0] // lengths.shape[0]
        request = row // queries
        later = queries - 1 - row % queries
        keys = scores[row, None]
        visible = page_share.keys_here(lengths[request] - later, self.shard)
        target = Target(keys, candidates_peers, Int64(row) * (TOP_K * PAIR_BYTES))

        if visible <= TOP_K:
            if self.release:
                pdl.release()
            self._take_all(part, visible, target)
        elif visible <= ALONE or cutlass.const_expr(self.parts == 1):
            if part == 0:
                self._select(1, 0, visible, keys, target, shared)
        else:
            self._select(self.parts, part, visible, keys, target, shared)

    def _shared(self, allocator: SmemAllocator) -> Shared:
        def words(count: int, dtype: type = Uint32) -> cute.Tensor:
            return allocator.allocate_tensor(dtype, cute.make_layout(count), 16)

        kept = words(self.kept // 2)
        return Shared(
            digits=kept,
            lists=cute.recast_tensor(kept, Uint16),
            counts=words(BINS),
            totals=words(BINS),
            groups=words(BINS // histogram.GROUP),
            found=words(5),
            taken=words(WARPS),
            lower=words(2),
            queue=words(CANDIDATES),
            candidates=words(CANDIDATES, Uint64),
            last=words(1, Uint64),
        )

    @cute.jit
    def _clear(self, shared: Shared):
        """Zeroes what histograms are added up in."""
        histogram.clear(shared.counts, THREADS)
        histogram.clear(shared.totals, THREADS)
        histogram.clear(shared.groups, THREADS)

    @cute.jit
    def _take_all(self, part, visible, target: Target):
        """Every visible position in order, and nothing behind them."""
        start = part * THREADS + cute.arch.thread_idx()[0]
        for place in range(start, TOP_K, self.parts * THREADS):
            bits, token = Uint32(MINUS_INFINITY), Uint32(EMPTY_ID)
            if place < visible:
                bits, token = self._candidate(place, target)
            self._send_pair(place, bits, token, target)

    def _candidate(self, position, target: Target) -> tuple:
        """Bits of a position's score, and its global id."""
        token = self.shard.global_position(position)
        return ordered.number(target.keys[position]).bitcast(Uint32), Uint32(token)

    def _send_pair(self, place, bits: Uint32, token: Uint32, target: Target) -> None:
        """One candidate to every rank, in one store each."""
        offset = target.offset + place * PAIR_BYTES
        for peer in range(RANKS):
            mailbox.store(target.peers[peer] + offset, [bits, token])

    @cute.jit
    def _select(
        self, parts: cutlass.Constexpr, part, visible, keys: cute.Tensor, target: Target,
        shared: Shared,
    ):  # fmt: skip
        """The list of a row with more than TOP_K visible keys, by `parts` CTAs."""
        warp = cute.arch.warp_idx()
        width = cute.ceil_div(visible, parts * WARPS * RUN) * RUN  # keys of a warp
        first = (part * WARPS + warp) * width
        share = Share(keys, first, cutlass.min(first + width, visible), warp * width)
        digits.count(share, shared.digits, shared.counts)
        self._search(parts, part, Uint32(TOP_K), shared)
        above, count = shared.found[1], shared.found[2]
        listed, tied = Int32(0), Int32(0)
        lists = shared.lists, shared.queue, shared.lower
        if count <= Uint32(CANDIDATES):
            listed, tied = digits.shortlist(shared.found[0], share, shared.digits, *lists)
            short_list.note(listed, tied, shared.taken)
        else:
            shift, prefix = Int32(FIRST_SHIFT), Uint64(0)
            above = Uint32(0)
            while count > Uint32(CANDIDATES):
                cluster.meet(parts)  # all have read what they found
                self._clear(shared)
                cluster.meet(parts)
                shift = shift - BIN_BITS
                self._count_ranks(share, prefix, shift, shared.counts)
                self._search(parts, part, Uint32(TOP_K) - above, shared)
                prefix = (prefix << BIN_BITS) | Uint64(shared.found[0])
                above = above + shared.found[1]
                count = shared.found[2]
            listed, tied = self._list_ranks(share, prefix, shift, *lists)
            short_list.note(listed, tied, shared.taken)
        cute.arch.sync_threads()
        self._send(parts, part, keys, shared)
        if self.release:
            pdl.release()
        cluster.meet(parts)  # nothing of a peer is touched behind this
        self._rank(part, width, Int32(count), Int32(TOP_K) - Int32(above), shared)
        cute.arch.sync_threads()
        self._emit(share, listed, target, shared)

    def _rank_of(self, score: Float32, position) -> Uint64:
        """Score and position as one integer: the smaller is ahead."""
        order = position if self.tie == "low_id" else 2**POSITION_BITS - 1 - position
        return (Uint64(ordered.descending(score)) << POSITION_BITS) | Uint64(Uint32(order))

    def _position_of(self, rank: Uint64) -> Int32:
        order = Int32(Uint32(rank & Uint64(2**POSITION_BITS - 1)))
        return order if self.tie == "low_id" else 2**POSITION_BITS - 1 - order

    @cute.jit
    def _count_ranks(self, share: Share, prefix: Uint64, shift, counts: cute.Tensor):
        """Counts this warp's keys whose rank begins with `prefix` by their next bits."""
        for base in range(share.first, share.end, RUN):
            loaded = digits.run(share.keys, base)
            for place in cutlass.range_constexpr(VECTOR):
                position = base + cute.arch.lane_idx() * VECTOR + place
                rank = self._rank_of(loaded[place], position)
                inside = position < share.end and (rank >> (shift + BIN_BITS)) == prefix
                digit = Int32(Uint32(rank >> shift) & Uint32(BINS - 1))
                memory.add_shared(counts, digit, Uint32(1), inside)

    @cute.jit
    def _search(self, parts: cutlass.Constexpr, part, wanted, shared: Shared):
        """shared.found for the histogram that this CTA's warps have counted."""
        cute.arch.sync_threads()
        histogram.share(shared.counts, shared.totals, shared.groups, part, parts, THREADS)
        cluster.meet(parts)
        if cute.arch.warp_idx() == 0:
            sums = shared.counts, shared.totals, shared.groups
            histogram.find(*sums, part, parts, wanted, shared.found)
        cute.arch.sync_threads()

    @cute.jit
    def _list_ranks(
        self, share: Share, prefix: Uint64, shift, lists: cute.Tensor, queue: cute.Tensor,
        queued: cute.Tensor,
    ):  # fmt: skip
        """Lists this warp's keys whose rank begins with less than `prefix` or with it."""
        lane, listed, tied = cute.arch.lane_idx(), Int32(0), Int32(0)
        for base in range(share.first, share.end, RUN):
            distance = base - share.first + lane * VECTOR
            loaded = digits.run(share.keys, base)
            members, ties = [], []
            for place in cutlass.range_constexpr(VECTOR):
                position = share.first + distance + place
                upper = self._rank_of(loaded[place], position) >> shift
                members.append(position < share.end and upper <= prefix)
                ties.append(upper == prefix)
            listed, tied = short_list.append(
                members, ties, distance, share, (listed, tied), lists, queue, queued
            )
        return listed, tied

    @cute.jit
    def _send(self, parts: cutlass.Constexpr, part, keys: cute.Tensor, shared: Shared):
        """This CTA's candidates to every part."""
        if cutlass.const_expr(parts > 1):
            short_list.tell(parts, part, shared.taken, shared.lower)
        before, own = Int32(shared.found[3]), Int32(shared.found[4])
        for place in range(cute.arch.thread_idx()[0], own, THREADS):
            position = Int32(shared.queue[place])
            rank = self._rank_of(keys[position], position)
            for peer in cutlass.range_constexpr(parts):
                if cutlass.const_expr(parts > 1):
                    cluster.store_wide(shared.candidates, before + place, rank, peer)
                else:
                    shared.candidates[before + place] = rank

    @cute.jit
    def _rank(self, part, width, count, need, shared: Shared):
        """Finds the last of the `need` candidates ahead and counts those that are chosen."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        at_once = reduce.WARP // RANKERS
        for base in range(warp * at_once, count, WARPS * at_once):
            number = base + lane // RANKERS
            mine, ahead = short_list.count_ahead(shared.candidates, number, count)
            if lane % RANKERS == 0 and number < count and ahead < need:
                owner = self._position_of(mine) // width - part * WARPS
                within = owner >= 0 and owner < WARPS
                memory.add_shared(shared.lower, 0, Uint32(1), owner < 0)
                memory.add_shared(shared.taken, owner, Uint32(1), within)
                if ahead == need - 1:
                    shared.last[0] = mine

    @cute.jit
    def _emit(self, share: Share, listed, target: Target, shared: Shared):
        """Stores the chosen keys of this warp's list at their places."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        mine = Int32(0)
        if lane < warp:
            mine = Int32(shared.taken[lane])
        start = cute.arch.warp_redux_sync(mine, "add") + Int32(shared.lower[0])
        for base in range(0, listed, UNROLL * reduce.WARP):
            places = [base + number * reduce.WARP + lane for number in range(UNROLL)]
            found = [self._entry(share, place, listed, shared) for place in places]
            pairs = [self._candidate(position, target) for position, _ in found]
            for number in cutlass.range_constexpr(UNROLL):
                chosen = found[number][1]
                vote = Uint32(cute.arch.vote_ballot_sync(chosen))
                ahead = Int32(cute.arch.popc(vote & Uint32(cute.arch.lanemask_lt())))
                if chosen:
                    self._send_pair(start + ahead, *pairs[number], target)
                start = start + Int32(cute.arch.popc(vote))

    @cute.jit
    def _entry(self, share: Share, place, listed, shared: Shared):
        """(position, chosen) of a place of this warp's list; nothing behind its end is chosen."""
        entry = Uint32(shared.lists[share.region + cutlass.min(place, listed - 1)])
        tied = entry >= Uint32(TIED)
        slot = cutlass.min(Int32(entry & Uint32(TIED - 1)), CANDIDATES - 1)
        number = cutlass.min(Int32(shared.found[3]) + slot, CANDIDATES - 1)
        position = scalar.choose(tied, shared.queue[slot], Uint32(share.first) + entry)
        ahead = entry < Uint32(TIED) or shared.candidates[number] <= shared.last[0]
        return Int32(position), place < listed and ahead
