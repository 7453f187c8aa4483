"""Generated from pipelines/dsa_tp.yaml; do not edit.

Exact top-k of a row's visible scores, as physical cache rows in ascending order of position.

    selected = the min(TOP_K, visible) best keys, as block_table[position // PAGE] * block rows
               + position % PAGE; -1 behind the last
    valid    = how many of them

Scores compare by their bits (+0 above -0), NaN counts as -inf; of equal scores at the TOP_K-th
place the lower positions are kept (`low_id`) or the higher ones (`high_id`).  Row i of request r
sees max(lengths[r] - q + 1 + i, 0) keys, with q = rows / requests.

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
from cutlass import Float32, Int32, Uint16, Uint32, Uint64, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import cluster, histogram, memory, ordered, pdl, reduce, scalar
from kpipe.runtime.host.compile import Symbol, TensorSpec

TOP_K = 2048
CONTEXT = 131072  # columns of a row of scores
PAGE = 64  # tokens of a block of the latent cache
ROW_BYTES = 576  # of one token in it

TIES = ("low_id", "high_id")
PARTS = (1, 2, 4, 8)
THREADS = 1024
WARPS = THREADS // reduce.WARP
VECTOR = 4
"""Scores of one load."""

UNROLL = 4
"""Loads of a lane that are in flight together."""

RUN = reduce.WARP * VECTOR
"""Neighbouring scores that a warp takes at once."""

ALONE = 32768
"""Up to so many keys are one CTA's, as barriers of a cluster would take longer."""

MOST_KEPT = min(65536, THREADS * PAGE)
"""Keys of one CTA: their digits fit into its shared memory, their blocks into a register."""

HALF = 16  # bits of a digit
BIN_BITS = 12
BINS = 2**BIN_BITS
CANDIDATES = 512
"""Keys of one bin that are ranked against each other."""

RANKERS = 8
"""Lanes that count together what is ahead of one candidate."""

POSITION_BITS = (CONTEXT - 1).bit_length()
RANK_BITS = 32 + POSITION_BITS
FIRST_SHIFT = RANK_BITS
if 2 ** (RANK_BITS % BIN_BITS) > CANDIDATES:  # the last histogram would leave too many
    FIRST_SHIFT = -(-RANK_BITS // BIN_BITS) * BIN_BITS
TIED = 1 << (HALF - 1)
"""Mark of a listed key that is a candidate; the rest is its place in the queue."""

NOTHING = -1


class Share(NamedTuple):
    """Keys of one warp."""

    keys: cute.Tensor  # scores of the row
    first: Int32  # position of the first
    length: Int32  # how many
    region: Int32  # place of the first among the digits of the CTA


class Shared(NamedTuple):
    """Shared memory of a CTA."""

    digits: cute.Tensor  # two of 16 bits a word, every warp's in a region of its own
    lists: cute.Tensor  # the same memory: keys that may be chosen, by distance into the share
    counts: cute.Tensor  # histogram of this CTA
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
    parts:   CTAs that share a row, 1 to 8, a power of two.
    """

    release: bool = True
    pdl: bool = True
    tie: str = "low_id"
    parts: int = 8

    def __post_init__(self) -> None:
        if self.tie not in TIES:
            raise ValueError(f"tie is {self.tie!r}; choose from {', '.join(TIES)}")
        if self.parts not in PARTS:
            raise ValueError(f"parts is {self.parts}; choose 1, 2, 4 or 8")
        if self.kept > MOST_KEPT:
            least = -(-CONTEXT // MOST_KEPT)
            raise ValueError(
                f"parts is {self.parts}: a CTA keeps {MOST_KEPT} keys, so a context of {CONTEXT} "
                f"needs at least {least} parts"
            )

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
        block_table: cute.Tensor,
        latent_kv: cute.Tensor,
        selected: cute.Tensor,
        valid: cute.Tensor,
        stream,
    ):
        block_rows = Int32(latent_kv.layout.stride[0] // ROW_BYTES)
        self.topk_select(scores, lengths, block_table, block_rows, selected, valid).launch(
            grid=[self.parts, scores.shape[0], 1],
            block=[THREADS, 1, 1],
            cluster=[self.parts, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
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
        # Peers write to these once the whole cluster has cleared them.
        self._clear(shared)
        histogram.clear(shared.lower, THREADS)
        self._meet(self.parts)

        queries = scores.shape[0] // lengths.shape[0]
        request = row // queries
        later = queries - 1 - row % queries
        pdl.wait()
        visible = cutlass.max(lengths[request] - later, 0)
        table = block_table[request, None]
        targets = selected[row, None]
        keys = scores[row, None]
        if part == 0 and cute.arch.thread_idx()[0] == 0:
            valid[row] = cutlass.min(visible, TOP_K)

        if visible <= TOP_K:
            if self.release:
                pdl.release()
            self._take_all(part, visible, table, block_rows, targets)
        elif visible <= ALONE or cutlass.const_expr(self.parts == 1):
            if part == 0:
                self._select(1, 0, visible, keys, table, block_rows, targets, shared)
        else:
            self._select(self.parts, part, visible, keys, table, block_rows, targets, shared)

    def _shared(self, allocator: SmemAllocator) -> Shared:
        def words(count: int, dtype: type = Uint32) -> cute.Tensor:
            return allocator.allocate_tensor(dtype, cute.make_layout(count), 16)

        digits = words(self.kept // 2)
        return Shared(
            digits=digits,
            lists=cute.recast_tensor(digits, Uint16),
            counts=words(BINS),
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
        histogram.clear(shared.groups, THREADS)

    @cute.jit
    def _meet(self, parts: cutlass.Constexpr):
        """Barrier of the CTAs that work on the row."""
        if cutlass.const_expr(parts > 1):
            cluster.sync()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _take_all(self, part, visible, table: cute.Tensor, block_rows, targets: cute.Tensor):
        """Every visible position in order, and nothing behind them."""
        start = part * THREADS + cute.arch.thread_idx()[0]
        for place in range(start, TOP_K, self.parts * THREADS):
            target = Int32(NOTHING)
            if place < visible:
                target = self._physical(place, table, block_rows)
            targets[place] = target

    @cute.jit
    def _physical(self, position, table: cute.Tensor, block_rows):
        """The cache row of a position."""
        return table[position // PAGE] * block_rows + position % PAGE

    @cute.jit
    def _select(
        self,
        parts: cutlass.Constexpr,
        part,
        visible,
        keys: cute.Tensor,
        table: cute.Tensor,
        block_rows,
        targets: cute.Tensor,
        shared: Shared,
    ):
        """The list of a row with more than TOP_K visible keys, by `parts` CTAs."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        width = cute.ceil_div(visible, parts * WARPS * RUN) * RUN  # keys of a warp
        first = (part * WARPS + warp) * width
        length = cutlass.max(cutlass.min(width, visible - first), 0)
        share = Share(keys, first, length, warp * width)
        # Lane by lane the blocks of this warp's keys; the list needs them at the end.
        block = table[cutlass.min(first // PAGE + lane, (visible - 1) // PAGE)]
        self._count_digits(parts, share, shared)
        self._search(parts, part, Uint32(TOP_K), shared)
        above, count = shared.found[1], shared.found[2]
        ahead = shared.found[0] << (2 * HALF - BIN_BITS)
        limit = ahead + Uint32(1 << (2 * HALF - BIN_BITS))
        if count > Uint32(CANDIDATES):
            shift, prefix = Int32(FIRST_SHIFT), Uint64(0)
            above = Uint32(0)
            while count > Uint32(CANDIDATES):
                self._meet(parts)  # all have read what they found
                self._clear(shared)
                self._meet(parts)
                shift = shift - BIN_BITS
                self._count_ranks(share, prefix, shift, shared.counts)
                self._search(parts, part, Uint32(TOP_K) - above, shared)
                prefix = (prefix << BIN_BITS) | Uint64(shared.found[0])
                above = above + shared.found[1]
                count = shared.found[2]
            self._mark(share, prefix, shift, shared)
            ahead, limit = Uint32(1 << HALF), Uint32(2 << HALF)
        listed = self._list(share, ahead, limit, shared)
        cute.arch.sync_threads()
        self._send(parts, part, keys, shared)
        if self.release:
            pdl.release()
        self._meet(parts)  # nothing of a peer is touched behind this
        self._rank(part, width, Int32(count), Int32(TOP_K) - Int32(above), shared)
        cute.arch.sync_threads()
        self._emit(share, listed, block, block_rows, targets, shared)

    def _run(self, keys: cute.Tensor, base) -> list:
        """This lane's scores of the run at `base`; runs never pass the end of a row."""
        return list(memory.load_scores(keys, base + cute.arch.lane_idx() * VECTOR))

    def _runs(self, share: Share, base, count: int) -> list:
        """This lane's scores of `count` runs at distance `base`; the last run again behind it."""
        final = (share.length - 1) // RUN * RUN
        runs = [cutlass.min(base + number * RUN, final) for number in range(count)]
        return [word for run in runs for word in self._run(share.keys, share.first + run)]

    def _rank_of(self, score: Float32, position) -> Uint64:
        """What a key is ranked by: the smaller is ahead."""
        order = position if self.tie == "low_id" else 2**POSITION_BITS - 1 - position
        return ordered.rank(score, order, POSITION_BITS)

    def _position_of(self, rank: Uint64) -> Int32:
        """The position within a rank."""
        order = Int32(Uint32(rank & Uint64(2**POSITION_BITS - 1)))
        return order if self.tie == "low_id" else 2**POSITION_BITS - 1 - order

    @cute.jit
    def _count_digits(self, parts: cutlass.Constexpr, share: Share, shared: Shared):
        """Reads this warp's scores, keeps their digits and counts them by bin."""
        step = UNROLL * RUN
        if share.length > 2 * RUN:
            loaded = self._runs(share, 0, UNROLL)
            for base in range(0, share.length, step):
                if cutlass.const_expr(parts * WARPS * step < CONTEXT and parts > 1):
                    following = self._runs(share, base + step, UNROLL)
                    self._keep(share, base, loaded, shared)
                    loaded = following
                else:  # a share is one step, or a few in a row for one CTA
                    self._keep(share, base, self._runs(share, base, UNROLL), shared)
        elif share.length > RUN:
            self._keep(share, 0, self._runs(share, 0, 2), shared)
        elif share.length > 0:
            self._keep(share, 0, self._runs(share, 0, 1), shared)

    @cute.jit
    def _keep(self, share: Share, base, loaded, shared: Shared):
        """Digits of the loaded runs to shared memory and into the histogram.

        What does not exist gets the last bin, which no search reaches.
        """
        bins = Uint32(shared.counts.iterator.toint())
        for number in cutlass.range_constexpr(len(loaded) // VECTOR):
            distance = base + number * RUN + cute.arch.lane_idx() * VECTOR
            pairs = []
            for pair in cutlass.range_constexpr(VECTOR // 2):
                place = number * VECTOR + 2 * pair
                halves = ordered.descending_halves(loaded[place], loaded[place + 1])
                left = share.length - distance - 2 * pair  # keys from here on
                halves = halves | scalar.choose(left > 0, Uint32(0), Uint32(0xFFFF))
                halves = halves | scalar.choose(left > 1, Uint32(0), Uint32(0xFFFF0000))
                for shift in (HALF - BIN_BITS, 2 * HALF - BIN_BITS):
                    offset = (halves >> (shift - 2)) & Uint32(4 * BINS - 4)  # in bytes
                    memory.add_shared_at(bins, offset, Uint32(1))
                pairs.append(halves)
            inside = base + number * RUN < share.length
            place = (share.region + distance) // VECTOR
            memory.store_pair(shared.digits, place, *pairs, inside)

    @cute.jit
    def _count_ranks(self, share: Share, prefix: Uint64, shift, counts: cute.Tensor):
        """Counts this warp's keys whose rank begins with `prefix` by their next bits."""
        for base in range(0, share.length, RUN):
            loaded = self._run(share.keys, share.first + base)
            for place in cutlass.range_constexpr(VECTOR):
                distance = base + cute.arch.lane_idx() * VECTOR + place
                rank = self._rank_of(loaded[place], share.first + distance)
                inside = distance < share.length and (rank >> (shift + BIN_BITS)) == prefix
                digit = Int32(Uint32(rank >> shift) & Uint32(BINS - 1))
                memory.add_shared(counts, digit, Uint32(1), inside)

    @cute.jit
    def _mark(self, share: Share, prefix: Uint64, shift, shared: Shared):
        """New digits: 0 for ranks that begin with less than `prefix`, 1 for it, else the last."""
        for base in range(0, share.length, RUN):
            distance = base + cute.arch.lane_idx() * VECTOR
            loaded = self._run(share.keys, share.first + base)
            digits = []
            for place in cutlass.range_constexpr(VECTOR):
                upper = self._rank_of(loaded[place], share.first + distance + place) >> shift
                near = scalar.choose(upper < prefix, Uint32(0), Uint32(1))
                inside = distance + place < share.length and upper <= prefix
                digits.append(scalar.choose(inside, near, Uint32(0xFFFF)))
            pairs = [low | (high << HALF) for low, high in zip(digits[::2], digits[1::2])]
            place = (share.region + distance) // VECTOR
            memory.store_pair(shared.digits, place, *pairs, base < share.length)

    @cute.jit
    def _search(self, parts: cutlass.Constexpr, part, wanted, shared: Shared):
        """shared.found for the histogram that this CTA's warps have counted."""
        cute.arch.sync_threads()
        histogram.share(shared.counts, shared.groups, parts, THREADS)
        self._meet(parts)
        if cute.arch.warp_idx() == 0:
            histogram.find(shared.counts, shared.groups, part, parts, wanted, shared.found)
        cute.arch.sync_threads()

    @cute.jit
    def _list(self, share: Share, ahead, limit, shared: Shared):
        """Lists this warp's keys with digits below `limit`, over the digits; how many they are.

        Those from `ahead` on (both as the upper half of a word) are candidates: they go to the
        queue, and their entry says where.
        """
        lane, listed, tied = cute.arch.lane_idx(), Int32(0), Int32(0)
        lists = Uint32(shared.lists.iterator.toint()) + Uint32(2 * share.region)
        for base in range(0, share.length, UNROLL * RUN):
            digits, counts, doubtful = [], Uint32(0), Uint32(0)
            for number in cutlass.range_constexpr(UNROLL):
                of_run = [Uint32(0xFFFFFFFF)] * VECTOR
                distance = base + number * RUN
                if distance < share.length:
                    place = (share.region + distance) // VECTOR + lane
                    halves = memory.vector_at(shared.digits, place, VECTOR // 2).load()
                    # A digit in the upper half; what stands below it does not matter.
                    low, high = halves[0], halves[1]
                    of_run = [low << HALF, low, high << HALF, high]
                    for digit in of_run:
                        counts = counts + scalar.choose(
                            digit < limit, Uint32(1 << (8 * number)), Uint32(0)
                        )
                        candidate = digit < limit and digit >= ahead
                        doubtful = doubtful | scalar.choose(
                            candidate, Uint32(1 << number), Uint32(0)
                        )
                digits.append(of_run)
            # Sums of UNROLL runs at once, a byte each: a run has fewer than 256 keys.
            upto = reduce.running_sum(counts)
            sums = cute.arch.shuffle_sync(upto, reduce.WARP - 1)
            before = upto - counts
            cute.arch.sync_warp()  # the list overwrites digits that have been read
            for number in cutlass.range_constexpr(UNROLL):
                distance = base + number * RUN + lane * VECTOR
                if base + number * RUN < share.length:
                    target = listed + Int32((before >> (8 * number)) & Uint32(0xFF))
                    start = target
                    for place in cutlass.range_constexpr(VECTOR):
                        member = digits[number][place] < limit
                        address = lists + Uint32(2 * target)
                        memory.store_half(address, Uint32(distance + place), member)
                        target = target + Int32(member)
                    if (doubtful >> number) & Uint32(1) != Uint32(0):
                        for place in cutlass.range_constexpr(VECTOR):
                            digit = digits[number][place]
                            if digit < limit:
                                if digit >= ahead:
                                    slot = memory.take_shared(shared.lower, 1)
                                    position = share.first + distance + place
                                    shared.queue[Int32(slot)] = Uint32(position)
                                    shared.lists[share.region + start] = Uint16(slot | Uint32(TIED))
                                    tied = tied + 1
                                start = start + 1
                    listed = listed + Int32((sums >> (8 * number)) & Uint32(0xFF))
        tied = cute.arch.warp_redux_sync(tied, "add")
        if lane == 0:
            shared.taken[cute.arch.warp_idx()] = Uint32(listed - tied)
        return listed

    @cute.jit
    def _send(self, parts: cutlass.Constexpr, part, keys: cute.Tensor, shared: Shared):
        """This CTA's candidates to every part, and to higher parts how many it has chosen."""
        if cutlass.const_expr(parts > 1):
            if cute.arch.warp_idx() == 0:
                lane = cute.arch.lane_idx()
                mine = Int32(0)
                if lane < WARPS:
                    mine = Int32(shared.taken[lane])
                chosen = Uint32(cute.arch.warp_redux_sync(mine, "add"))
                if lane > part and lane < parts:
                    cluster.add(shared.lower, 0, chosen, lane)
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
        helper, at_once = lane % RANKERS, reduce.WARP // RANKERS
        for base in range(warp * at_once, count, WARPS * at_once):
            number = base + lane // RANKERS
            mine = shared.candidates[cutlass.min(number, count - 1)]
            ahead = Int32(0)
            for other in cutlass.range(helper, count, RANKERS, unroll=4):
                ahead = ahead + Int32(shared.candidates[other] < mine)
            distance = 1
            for _ in cutlass.range_constexpr(RANKERS.bit_length() - 1):
                ahead = ahead + cute.arch.shuffle_sync_bfly(ahead, distance)
                distance = 2 * distance
            if helper == 0 and number < count and ahead < need:
                owner = self._position_of(mine) // width - part * WARPS
                within = owner >= 0 and owner < WARPS
                memory.add_shared(shared.lower, 0, Uint32(1), owner < 0)
                memory.add_shared(shared.taken, owner, Uint32(1), within)
                if ahead == need - 1:
                    shared.last[0] = mine

    @cute.jit
    def _emit(self, share: Share, listed, block, block_rows, targets: cute.Tensor, shared: Shared):
        """Stores the chosen keys of this warp's list at their places."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        mine = Int32(0)
        if lane < warp:
            mine = Int32(shared.taken[lane])
        start = cute.arch.warp_redux_sync(mine, "add") + Int32(shared.lower[0])
        for base in range(0, listed, reduce.WARP):
            distance, chosen = Int32(0), Int32(0)
            if base + lane < listed:
                entry = Int32(shared.lists[share.region + base + lane])
                distance, chosen = entry, Int32(1)
                if entry >= TIED:
                    slot = entry - TIED
                    distance = Int32(shared.queue[slot]) - share.first
                    rank = shared.candidates[Int32(shared.found[3]) + slot]
                    chosen = Int32(rank <= shared.last[0])
            position = share.first + distance
            row = cute.arch.shuffle_sync(block, position // PAGE - share.first // PAGE)
            row = row * block_rows + position % PAGE
            vote = Uint32(cute.arch.vote_ballot_sync(chosen == 1))
            place = Int32(cute.arch.popc(vote & Uint32(cute.arch.lanemask_lt())))
            if chosen == 1:
                targets[start + place] = row
            start = start + Int32(cute.arch.popc(vote))
