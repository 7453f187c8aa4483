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
         a score; each is summed over the cluster in distributed shared memory.
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
VECTOR = memory.vector_width(4, CONTEXT)
"""Scores of one load."""

STEP = reduce.WARP * VECTOR
"""Neighbouring scores that a warp takes at once."""

KEY_OF_MINUS_INFINITY = 0x007F_FFFF
SIGN = 0x8000_0000
INFINITY = 0x7F80_0000
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
        totals = shared.allocate_tensor(Uint32, cute.make_layout(BINS // self.parts), 16)
        segment = shared.allocate_tensor(Uint32, cute.make_layout(1), 16)
        found = shared.allocate_tensor(Uint32, cute.make_layout(3), 16)
        chosen = shared.allocate_tensor(Uint32, cute.make_layout((WARPS, 2)), 16)
        of_part = shared.allocate_tensor(Uint32, cute.make_layout(2), 16)

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
            share = cute.ceil_div(visible, self.parts * WARPS * STEP) * STEP
            first = (part * WARPS + cute.arch.warp_idx()) * share
            end = cutlass.min(first + share, visible)
            keys = scores[row, None]
            prefix, above = Uint32(0), Uint32(0)
            shift = 32
            for bits in cutlass.range_constexpr(len(DIGITS)):
                shift = 32 - sum(DIGITS[: bits + 1])
                self._count(keys, first, end, prefix, shift, DIGITS[bits], histogram)
                self._sum_over_cluster(part, histogram, totals, segment)
                self._find(totals, segment, Uint32(TOP_K) - above, found)
                prefix = (prefix << DIGITS[bits]) | found[0]
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

    def _load_keys(self, keys: cute.Tensor, base) -> list:
        """Order-preserving integers of this lane's VECTOR scores of the step at `base`."""
        index = base // VECTOR + cute.arch.lane_idx()
        words = cute.recast_tensor(memory.vector_at(keys, index, VECTOR), Uint32).load()
        return [self._order(words[place]) for place in range(VECTOR)]

    def _order(self, bits: Uint32) -> Uint32:
        """An unsigned integer that compares as the score does; NaN as -inf."""
        negative = (bits & Uint32(SIGN)) != Uint32(0)
        key = scalar.choose(negative, bits ^ Uint32(0xFFFF_FFFF), bits | Uint32(SIGN))
        is_nan = (bits & Uint32(SIGN - 1)) > Uint32(INFINITY)
        return scalar.choose(is_nan, Uint32(KEY_OF_MINUS_INFINITY), key)

    @cute.jit
    def _count(
        self, keys: cute.Tensor, first, end, prefix, shift: cutlass.Constexpr,
        bits: cutlass.Constexpr, histogram: cute.Tensor,
    ):
        """The histogram of the next `bits` bits of this CTA's keys that begin with `prefix`."""
        for place in range(cute.arch.thread_idx()[0], BINS, THREADS):
            histogram[place] = Uint32(0)
        cute.arch.sync_threads()
        for base in range(first, end, STEP):
            loaded = self._load_keys(keys, base)
            for place in cutlass.range_constexpr(VECTOR):
                position = base + cute.arch.lane_idx() * VECTOR + place
                mine = position < end
                if cutlass.const_expr(shift + bits < 32):
                    mine = mine and (loaded[place] >> (shift + bits)) == prefix
                if mine:
                    digit = (loaded[place] >> shift) & Uint32(2**bits - 1)
                    cute.arch.atomic_add(histogram.iterator + Int32(digit), Uint32(1))

    @cute.jit
    def _sum_over_cluster(
        self, part, histogram: cute.Tensor, totals: cute.Tensor, segment: cute.Tensor
    ):
        """This CTA's stretch of the bins, summed over all CTAs, and the sum of the stretch.

        Stretches descend with the parts: part 0 has the highest bins, its first total the
        highest of all.
        """
        cluster.sync()
        tid = cute.arch.thread_idx()[0]
        if tid == 0:
            segment[0] = Uint32(0)
        cute.arch.sync_threads()
        width = BINS // self.parts
        for place in range(tid, width, THREADS):
            digit = BINS - 1 - (part * width + place)
            total = Uint32(0)
            for peer in cutlass.range_constexpr(self.parts):
                total = total + cluster.load(histogram, digit, peer)
            totals[place] = total
            if total != Uint32(0):
                cute.arch.atomic_add(segment.iterator, total)
        cluster.sync()

    @cute.jit
    def _find(self, totals: cute.Tensor, segment: cute.Tensor, wanted, found: cute.Tensor):
        """found = the digit in which the `wanted`-th key lies, keys above it, keys in it."""
        if cute.arch.warp_idx() == 0:
            lane = cute.arch.lane_idx()
            before, stretch, passed = Uint32(0), Int32(0), Uint32(0)
            for peer in cutlass.range_constexpr(self.parts):
                size = cluster.load(segment, 0, peer)
                if before + size < wanted and peer + 1 < self.parts:
                    stretch = Int32(peer + 1)
                    passed = before + size
                before = before + size
            width = BINS // self.parts
            each = width // reduce.WARP
            mine = Uint32(0)
            for place in cutlass.range_constexpr(each):
                mine = mine + cluster.load(totals, lane * each + place, stretch)
            upto = self._running_sum(mine)
            here = passed + upto - mine
            if here < wanted and wanted <= passed + upto:
                digit, above, size = Uint32(0), here, Uint32(0)
                for place in cutlass.range_constexpr(each):
                    count = cluster.load(totals, lane * each + place, stretch)
                    if here < wanted and wanted <= here + count:
                        digit = Uint32(BINS - 1 - (stretch * width + lane * each + place))
                        above, size = here, count
                    here = here + count
                found[0] = digit
                found[1] = above
                found[2] = size
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
            loaded = self._load_keys(keys, base)
            for place in cutlass.range_constexpr(VECTOR):
                inside = base + cute.arch.lane_idx() * VECTOR + place < end
                if inside and loaded[place] > threshold:
                    better = better + 1
                if inside and loaded[place] == threshold:
                    equal = equal + 1
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
        if cute.arch.thread_idx()[0] == 0:
            for kind in cutlass.range_constexpr(2):
                total = Uint32(0)
                for peer in cutlass.range_constexpr(WARPS):
                    total = total + chosen[peer, kind]
                of_part[kind] = total
        cluster.sync()
        better, equal = Uint32(0), Uint32(0)
        for peer in cutlass.range_constexpr(self.parts):
            if peer < part:
                better = better + cluster.load(of_part, 0, peer)
                equal = equal + cluster.load(of_part, 1, peer)
        for peer in cutlass.range_constexpr(WARPS):
            if peer < warp:
                better = better + chosen[peer, 0]
                equal = equal + chosen[peer, 1]
        # Ties with a number in [lowest, lowest + need) are kept.
        lowest = Uint32(0) if cutlass.const_expr(self.tie == "low_id") else ties - need
        for base in range(first, end, STEP):
            loaded = self._load_keys(keys, base)
            mine_better, mine_equal = Uint32(0), Uint32(0)
            for place in cutlass.range_constexpr(VECTOR):
                inside = base + lane * VECTOR + place < end
                if inside and loaded[place] > threshold:
                    mine_better = mine_better + 1
                if inside and loaded[place] == threshold:
                    mine_equal = mine_equal + 1
            upto_better = self._running_sum(mine_better)
            upto_equal = self._running_sum(mine_equal)
            here_better = better + upto_better - mine_better
            here_equal = equal + upto_equal - mine_equal
            for place in cutlass.range_constexpr(VECTOR):
                position = base + lane * VECTOR + place
                inside = position < end
                above = inside and loaded[place] > threshold
                tied = inside and loaded[place] == threshold
                kept = tied and here_equal >= lowest and here_equal < lowest + need
                if above or kept:
                    # ties in front of this place that are kept
                    passed = cutlass.max(Int32(here_equal) - Int32(lowest), 0)
                    passed = cutlass.min(passed, Int32(need))
                    targets[Int32(here_better) + passed] = self._physical(
                        position, table, block_rows
                    )
                if above:
                    here_better = here_better + 1
                if tied:
                    here_equal = here_equal + 1
            better = better + cute.arch.shuffle_sync(upto_better, reduce.WARP - 1)
            equal = equal + cute.arch.shuffle_sync(upto_equal, reduce.WARP - 1)
