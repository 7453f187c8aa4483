"""Generated from pipelines/dsa_tp.yaml; do not edit.

Exact top-k of a row's visible scores, as physical cache rows in ascending order of position.

    selected = the min(TOP_K, visible) best keys, as block_table[position // PAGE] * block rows
               + position % PAGE; -1 behind the last
    valid    = how many of them

Scores compare by their bits (+0 above -0), NaN counts as -inf; of equal scores at the TOP_K-th
place the lower positions are kept (`low_id`) or the higher ones (`high_id`).  Row i of request r
sees max(lengths[r] - q + 1 + i, 0) keys, with q = rows / requests.

Grid     (parts, rows); the `parts` CTAs of a row are a cluster and share its keys evenly, every
         warp a run of neighbouring ones.
Search   radix select: three histograms over 11, 11 and 10 bits of the order-preserving integer of
         a score. The bins are spread over the cluster: every CTA adds its counts to the bins'
         owners, and the sums of all owners' stretches to everybody, so that one cluster barrier
         a histogram is enough.
Places   follow from counts: keys chosen by lower parts, lower warps and lower lanes come first,
         so that the list does not depend on timing.
Wait     nothing is static; the wait comes first, the release behind the last scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import cluster, memory, pdl, reduce, scalar
from kpipe.runtime.host.compile import Symbol, TensorSpec

TOP_K = 2048
CONTEXT = 131072  # columns of a row of scores
PAGE = 64  # tokens of a block of the latent cache
ROW_BYTES = 576  # of one token in it

TIES = ("low_id", "high_id")
THREADS = 512
WARPS = THREADS // reduce.WARP
DIGITS = (11, 11, 10)
"""Bits of the histograms, from the highest down."""

BINS = 2 ** max(DIGITS)
MAX_PARTS = 8
VECTOR = memory.vector_width(4, CONTEXT)
"""Scores of one load."""

UNROLL = 2
"""Loads of a lane that are in flight together."""

RUN = reduce.WARP * VECTOR
RUNS = range(UNROLL)
LOW_HALF = 0xFFFF
STEP = UNROLL * RUN
"""Neighbouring scores that a warp takes at once, in UNROLL runs."""


OUTSIDE = 0
"""Key of a place behind the last score: below that of -inf."""

SIGN = -(2**31)
INFINITY = float("inf")
NOTHING = -1


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
        if self.parts not in (1, 2, 4, 8):
            raise ValueError(f"parts is {self.parts}; choose 1, 2, 4 or 8")

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
        shared = SmemAllocator()
        histogram = shared.allocate_tensor(Uint32, cute.make_layout(BINS), 16)
        width = BINS // self.parts
        rounds = len(DIGITS)
        totals = shared.allocate_tensor(Uint32, cute.make_layout((width, rounds)), 16)
        stretches = shared.allocate_tensor(Uint32, cute.make_layout((MAX_PARTS, rounds)), 16)
        sums = shared.allocate_tensor(Uint32, cute.make_layout(WARPS), 16)
        found = shared.allocate_tensor(Uint32, cute.make_layout(3), 16)
        chosen = shared.allocate_tensor(Uint32, cute.make_layout((WARPS, 2)), 16)
        of_part = shared.allocate_tensor(Uint32, cute.make_layout(2), 16)

        # Peers add to these once the whole cluster has cleared them.
        self._clear(histogram)
        self._clear(totals)
        self._clear(stretches)
        cluster.sync()

        pdl.wait()
        queries = scores.shape[0] // lengths.shape[0]
        request = row // queries
        later = queries - 1 - row % queries
        visible = cutlass.max(lengths[request] - later, 0)
        table = block_table[request, None]
        targets = selected[row, None]
        if part == 0 and cute.arch.thread_idx()[0] == 0:
            valid[row] = cutlass.min(visible, TOP_K)

        if visible <= TOP_K:
            if self.release:
                pdl.release()
            self._take_all(part, visible, table, block_rows, targets)
        else:
            # Every warp of the cluster owns `span` neighbouring keys.
            share = cute.ceil_div(visible, self.parts * WARPS * RUN) * RUN
            first = (part * WARPS + cute.arch.warp_idx()) * share
            end = cutlass.min(first + share, visible)
            keys = scores[row, None]
            prefix, above = Uint32(0), Uint32(0)
            for digit in cutlass.range_constexpr(rounds):
                bits = DIGITS[digit]
                shift = 32 - sum(DIGITS[: digit + 1])
                self._count(keys, first, end, prefix, shift, bits, histogram)
                cute.arch.sync_threads()
                self._spread(histogram, totals[None, digit], stretches[None, digit])
                cluster.sync()
                wanted = Uint32(TOP_K) - above
                self._find(totals[None, digit], stretches[None, digit], sums, wanted, found)
                prefix = (prefix << bits) | found[0]
                above = above + found[1]
            # Now `prefix` is the key at the TOP_K-th place, `above` how many are better.
            ties = found[2]
            need = Uint32(TOP_K) - above
            self._count_chosen(keys, first, end, prefix, chosen)
            self._emit(
                part, keys, first, end, prefix, (ties, need), chosen, of_part,
                table, block_rows, targets,
            )
            if self.release:
                pdl.release()
            cluster.sync()  # nobody ends while a peer reads its counts

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

    def _load_keys(self, keys: cute.Tensor, base, end) -> list:
        """Order-preserving integers of this lane's scores of the step at `base`, run by run.

        Runs beyond the end read its last vector again; nothing behind the row is touched.
        """
        loaded = []
        for run in range(UNROLL):
            index = cutlass.min(base + run * RUN, (end - 1) // RUN * RUN) // VECTOR
            vector = memory.vector_at(keys, index + cute.arch.lane_idx(), VECTOR)
            words = vector.load()
            loaded += [words[place] for place in range(VECTOR)]
        return [
            scalar.choose(self._position(base, place) < end, self._order(word), Uint32(OUTSIDE))
            for place, word in enumerate(loaded)
        ]

    def _position(self, base, place: int):
        """The position of this lane's `place`-th score of the step at `base`."""
        return base + place // VECTOR * RUN + cute.arch.lane_idx() * VECTOR + place % VECTOR

    def _order(self, score: Float32) -> Uint32:
        """An unsigned integer that compares as the score does; NaN as -inf."""
        bits = cute.arch.fmax(score, Float32(-INFINITY)).bitcast(Int32)  # the number of the two
        return Uint32(bits ^ ((bits >> 31) | Int32(SIGN)))

    @cute.jit
    def _clear(self, counters: cute.Tensor):
        """Zeroes shared counters; the caller puts a barrier behind it."""
        flat = cute.make_tensor(counters.iterator, cute.make_layout(cute.size(counters)))
        for place in range(cute.arch.thread_idx()[0], cute.size(counters), THREADS):
            flat[place] = Uint32(0)

    @cute.jit
    def _count(
        self, keys: cute.Tensor, first, end, prefix, shift: cutlass.Constexpr,
        bits: cutlass.Constexpr, histogram: cute.Tensor,
    ):
        """Adds the next `bits` bits of this CTA's keys that begin with `prefix` to a histogram."""
        for base in range(first, end, STEP):
            loaded = self._load_keys(keys, base, end)
            for place in cutlass.range_constexpr(UNROLL * VECTOR):
                mine = loaded[place] != Uint32(OUTSIDE)
                if cutlass.const_expr(shift + bits < 32):
                    mine = (loaded[place] >> (shift + bits)) == prefix
                digit = (loaded[place] >> shift) & Uint32(2**bits - 1)
                memory.add_shared(histogram, Int32(digit), Uint32(1), mine)

    @cute.jit
    def _spread(self, histogram: cute.Tensor, totals: cute.Tensor, stretches: cute.Tensor):
        """Adds this CTA's counts to their owners' totals and clears them.

        Owners hold stretches of bins that descend with their rank: rank 0 has the highest bins,
        its first total the highest of all. The sum of a stretch goes to every CTA.
        """
        tid = cute.arch.thread_idx()[0]
        each = BINS // THREADS
        owner = tid * each // (BINS // self.parts)
        sum_of_mine = Uint32(0)
        for place in cutlass.range_constexpr(each):
            number = tid * each + place
            count = histogram[BINS - 1 - number]
            histogram[BINS - 1 - number] = Uint32(0)
            if count != Uint32(0):
                cluster.add(totals, number % (BINS // self.parts), count, owner)
            sum_of_mine = sum_of_mine + count
        # A warp lies within one stretch: BINS / parts / each is a multiple of 32 threads.
        sum_of_warp = Uint32(cute.arch.warp_redux_sync(Int32(sum_of_mine), "add"))
        lane = cute.arch.lane_idx()
        if lane < self.parts and sum_of_warp != Uint32(0):
            cluster.add(stretches, owner, sum_of_warp, lane)

    @cute.jit
    def _find(
        self, totals: cute.Tensor, stretches: cute.Tensor, sums: cute.Tensor, wanted,
        found: cute.Tensor,
    ):
        """found = the digit in which the `wanted`-th key lies, keys above it, keys in it."""
        before, owner, passed = Uint32(0), Int32(0), Uint32(0)
        for peer in cutlass.range_constexpr(self.parts - 1):
            before = before + stretches[peer]
            if before < wanted:
                owner, passed = Int32(peer + 1), before
        width = BINS // self.parts
        each = max(width // THREADS, 1)
        tid, warp = cute.arch.thread_idx()[0], cute.arch.warp_idx()
        first = cutlass.min(tid * each, width - each)  # a thread without a bin repeats the last
        counts = [cluster.load(totals, first + place, owner) for place in range(each)]
        mine = Uint32(0)
        for place in cutlass.range_constexpr(each):
            mine = mine + scalar.choose(tid * each < width, counts[place], Uint32(0))
        upto = self._running_sum(mine)
        if cute.arch.lane_idx() == reduce.WARP - 1:
            sums[warp] = upto
        cute.arch.sync_threads()
        here = passed + upto - mine
        for peer in cutlass.range_constexpr(WARPS):
            here = here + scalar.choose(warp > peer, sums[peer], Uint32(0))
        for place in cutlass.range_constexpr(each):
            count = scalar.choose(tid * each < width, counts[place], Uint32(0))
            if here < wanted and wanted <= here + count:
                found[0] = Uint32(BINS - 1 - (owner * width + first + place))
                found[1] = here
                found[2] = count
            here = here + count
        cute.arch.sync_threads()

    @cute.jit
    def _running_sum(self, value):
        """Sum over the lanes up to and including this one."""
        lane = cute.arch.lane_idx()
        distance = 1
        for _ in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(value, distance, mask_and_clamp=0)
            if lane >= distance:
                value = value + other
            distance = 2 * distance
        return value

    @cute.jit
    def _count_chosen(self, keys: cute.Tensor, first, end, threshold, chosen: cute.Tensor):
        """Per warp: keys above the threshold, and keys equal to it."""
        better, equal = Int32(0), Int32(0)
        for base in range(first, end, STEP):
            loaded = self._load_keys(keys, base, end)
            for place in cutlass.range_constexpr(UNROLL * VECTOR):
                better = better + Int32(loaded[place] > threshold)
                equal = equal + Int32(loaded[place] == threshold)
        better = cute.arch.warp_redux_sync(better, "add")
        equal = cute.arch.warp_redux_sync(equal, "add")
        if cute.arch.lane_idx() == 0:
            chosen[cute.arch.warp_idx(), 0] = Uint32(better)
            chosen[cute.arch.warp_idx(), 1] = Uint32(equal)

    @cute.jit
    def _emit(
        self, part, keys: cute.Tensor, first, end, threshold, tie_counts, chosen: cute.Tensor,
        of_part: cute.Tensor, table: cute.Tensor, block_rows, targets: cute.Tensor,
    ):
        """Stores the chosen keys at their places."""
        ties, need = tie_counts
        cute.arch.sync_threads()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        if warp < 2:
            mine = Uint32(0)
            if lane < WARPS:
                mine = chosen[lane, warp]
            upto = self._running_sum(mine)
            if lane < WARPS:
                chosen[lane, warp] = upto - mine  # in the warps ahead
            if lane == WARPS - 1:
                of_part[warp] = upto
        cluster.sync()
        better, equal = chosen[warp, 0], chosen[warp, 1]
        for peer in cutlass.range_constexpr(self.parts):
            if peer < part:
                better = better + cluster.load(of_part, 0, peer)
                equal = equal + cluster.load(of_part, 1, peer)
        # Ties with a number in [lowest, lowest + need) are kept.
        lowest = Uint32(0) if cutlass.const_expr(self.tie == "low_id") else ties - need
        for base in range(first, end, STEP):
            loaded = self._load_keys(keys, base, end)
            # The loads of a step are independent of one another: one block a lane and run.
            blocks = [self._block(self._position(base, run * VECTOR), end, table) for run in RUNS]
            counts = [self._count_of_run(loaded, run, threshold) for run in RUNS]
            sums = [self._running_sum(count) for count in counts]
            for run in cutlass.range_constexpr(UNROLL):
                ahead = sums[run] - counts[run]
                here_better = better + (ahead >> 16)
                here_equal = equal + (ahead & Uint32(LOW_HALF))
                for place in cutlass.range_constexpr(VECTOR):
                    key = loaded[run * VECTOR + place]
                    position = self._position(base, run * VECTOR + place)
                    above = key > threshold
                    tied = key == threshold
                    kept = tied and here_equal >= lowest and here_equal < lowest + need
                    # ties in front of this place that are kept
                    passed = cutlass.max(Int32(here_equal) - Int32(lowest), 0)
                    target = Int32(here_better) + cutlass.min(passed, Int32(need))
                    if above or kept:
                        targets[target] = blocks[run] * block_rows + position % PAGE
                    here_better = here_better + Uint32(above)
                    here_equal = here_equal + Uint32(tied)
                last = cute.arch.shuffle_sync(sums[run], reduce.WARP - 1)
                better = better + (last >> 16)
                equal = equal + (last & Uint32(LOW_HALF))

    def _block(self, position, end, table: cute.Tensor):
        """The block of a vector of scores; VECTOR divides PAGE, so it has one."""
        return table[cutlass.min(position, end - 1) // PAGE]

    def _count_of_run(self, loaded: list, run: int, threshold) -> Uint32:
        """This lane's keys of a run above the threshold (high half) and equal to it (low)."""
        counts = Uint32(0)
        for key in loaded[run * VECTOR : (run + 1) * VECTOR]:
            counts = counts + (Uint32(key > threshold) << 16) + Uint32(key == threshold)
        return counts
