"""Generated from pipelines/dsa_dcp.yaml; do not edit.

Scores of the indexer: how much every visible key matters to a query row.

    score[row, j] = scale_j * sum over h of index_w[row, h] * relu(q[row, h] . k_j)      FP32

Row i of request r sees the first max(lengths[r] - q + 1 + i, 0) keys, with q = rows / requests;
of these a rank that holds a share of the context scores its own. Columns from there on keep what
they hold. Keys lie in pages, their place given by index_table: codes of the PAGE tokens, then
their scales.

Grid     `ctas` CTAs, one an SM. The pages that the requests see form one list, request after
         request; every CTA takes an equal share of it, so any mix of lengths is balanced, but for
         a lead of those that start ahead of others. The last warp fetches the pages; `groups`
         groups of WARPS warps score one page each, 16 keys a warp, against all rows of the request
         at once.
Loads    a page is one bulk copy into a ring of `stages` pages. Codes of keys become FP16 (exactly)
         in registers, those of the query in shared memory, once a request: the columns of the
         product are the heads of all its rows, so that their keys are read and converted once.
Wait     lengths, and the first entries of index_table, are read ahead of it: the step's own,
         which no kernel of it writes. The rest lies behind it, the release right behind it.
Rounding FP32 sums: over INDEX_DIM in the tensor core, over a lane's heads in ascending order,
         then over the four lanes of a key. A score depends on its query and key alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import (
    barrier,
    bulk,
    fp8,
    memory,
    mma,
    page_share,
    pdl,
    reduce,
    scalar,
    warpgroup,
)
from kpipe.runtime.host.compile import Symbol, TensorSpec
from kpipe.runtime.sharding import Shard

INDEX_HEADS = 32
INDEX_DIM = 128
PAGE = 64  # tokens of a cache page

FP32_BYTES = 4
TOKEN_BYTES = INDEX_DIM + FP32_BYTES  # E4M3 codes and one scale
KEY_BYTES = PAGE * INDEX_DIM  # of a page; the scales follow
PAGE_BYTES = PAGE * TOKEN_BYTES
WARPS = warpgroup.WARPS  # that share a page
HEAD_TILES = -(-INDEX_HEADS // mma.TILE_N)
LANE_BYTES = INDEX_DIM // mma.GROUP_LANES  # of a key, or of a head's query
CHUNK = memory.vector_width(1, LANE_BYTES)  # bytes of one access
CHUNKS = LANE_BYTES // CHUNK
CHUNK_WORDS = CHUNK // fp8.WORD_BYTES
WORDS = LANE_BYTES // fp8.WORD_BYTES  # steps of the tensor core: one a word of four codes
CODE_VECTORS = CHUNKS * mma.GROUP_LANES  # accesses of a head's query
ROW_COLUMNS = HEAD_TILES * mma.TILE_N  # columns of the product for one row
MAX_QUERIES = 4
OPERAND_WORDS = warpgroup.operand_words(MAX_QUERIES * ROW_COLUMNS, WORDS)
SHARED_BYTES = 224 * 1024  # of ring and query; the rest of an SM's holds weights and barriers
MAX_STAGES = (SHARED_BYTES - OPERAND_WORDS * fp8.WORD_BYTES) // PAGE_BYTES
BANK_TILES = 2 - HEAD_TILES % 2  # tiles of the product whose weights are one access
GROUPS = (1, 2, 3)
SCORERS = 1  # the barrier of the warps that score


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows, requests = Symbol("rows"), Symbol("requests")
    # A page may lie among other layers' bytes; block * stride passes 2^31 in a large cache.
    page_stride = Symbol("page_stride", multiple=bulk.RUN_BYTES, bits=64)
    page_shape, page_strides = (PAGE, TOKEN_BYTES), (TOKEN_BYTES, 1)
    table_strides = (Symbol("table_pitch"), 1)
    score_strides = (Symbol("score_pitch", bits=64), 1)
    return (
        TensorSpec("index_q8", "u8", (rows, INDEX_HEADS, INDEX_DIM)),
        TensorSpec("index_w", "fp32", (rows, INDEX_HEADS)),
        TensorSpec("index_kv", "u8", (None, *page_shape), (page_stride, *page_strides)),
        TensorSpec("index_table", "i32", (requests, None), table_strides, align=4),
        TensorSpec("lengths", "i32", (requests,), align=4),
        TensorSpec("scores", "fp32", (rows, None), score_strides, align=4),
    )


@dataclass(frozen=True)
class IndexScores:
    """score_j = scale_j * sum_h w_h * relu(q_h . k_j) of the keys that a row sees.

    release:  let the dependent grid start right behind the wait (not where it reads early what
              this kernel writes).
    pdl:      launch with the attribute that lets this grid start before its predecessor ends.
    rank, ranks, interleave: this rank's share of every context, as runtime.sharding.Shard has it.
    ctas:     CTAs of the grid.
    ahead:    CTAs that find a multiprocessor at once where others wait for one: these take `lead`
    lead:     pages more, what they score in that time.
    groups:   pages that a CTA scores at a time, 1 to 3.
    stages:   pages of the ring.
    product:  f16, exact but for the FP32 sum; or e4m3, which multiplies the codes as they are
              (sm_90a only): faster where rows share keys, but Hopper then keeps some 14 bits of a
              sum, an error of 2^-14 or less of the sum of all magnitudes.
    """

    release: bool = True
    pdl: bool = True
    rank: int = 0
    ranks: int = 1
    interleave: int = 1
    ctas: int = 132
    ahead: int = 0
    lead: int = 0
    groups: int = 3
    stages: int = min(9, MAX_STAGES)
    product: str = "f16"

    def __post_init__(self) -> None:
        if self.groups not in GROUPS:
            raise ValueError(f"groups {self.groups} is none of {', '.join(map(str, GROUPS))}")
        if not self.groups <= self.stages <= MAX_STAGES:
            raise ValueError(
                f"stages {self.stages} is outside {self.groups}..{MAX_STAGES}: a stage a group, "
                "all in shared memory"
            )
        if self.ctas < 1:
            raise ValueError(f"ctas {self.ctas}: at least one is needed")
        if self.ahead < 0 or self.lead < 0:
            raise ValueError(f"ahead {self.ahead} and lead {self.lead}: neither is negative")
        if self.product not in warpgroup.KINDS:
            known = ", ".join(warpgroup.KINDS)
            raise ValueError(f"unknown product {self.product!r}; choose from {known}")
        self.shard  # noqa: B018  refuses what is no share

    @property
    def shard(self) -> Shard:
        """This rank's share of every context."""
        return Shard(self.rank, self.ranks, self.interleave)

    @property
    def ring(self) -> int:
        """Pages of the ring: `stages`, rounded down so that a place always serves one group.

        Else a group could wait for a phase two ahead of the barrier, which returns at once.
        """
        return self.stages // self.groups * self.groups

    @cute.jit
    def __call__(
        self,
        index_q8: cute.Tensor,
        index_w: cute.Tensor,
        index_kv: cute.Tensor,
        index_table: cute.Tensor,
        lengths: cute.Tensor,
        scores: cute.Tensor,
        stream,
    ):
        pages = index_table.shape[0] * index_table.shape[1]
        self.index_scores(index_q8, index_w, index_kv, index_table, lengths, scores).launch(
            grid=[cutlass.min(pages, self.ctas), 1, 1],
            block=[self._scorers() + reduce.WARP, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def index_scores(
        self,
        index_q8: cute.Tensor,
        index_w: cute.Tensor,
        index_kv: cute.Tensor,
        index_table: cute.Tensor,
        lengths: cute.Tensor,
        scores: cute.Tensor,
    ):
        fetches = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.groups * WARPS
        stages = self.ring
        shared = SmemAllocator()
        query = shared.allocate_tensor(Uint32, cute.make_layout(OPERAND_WORDS), warpgroup.ALIGNMENT)
        ring = shared.allocate_tensor(
            Uint8, cute.make_layout((stages, PAGE_BYTES), stride=(PAGE_BYTES, 1)), 128
        )
        columns = cute.make_layout(MAX_QUERIES * ROW_COLUMNS)
        weights = shared.allocate_tensor(Float32, columns, memory.VECTOR_BYTES)
        filled = barrier.allocate(shared, stages)
        drained = barrier.allocate(shared, stages)
        if fetches and cute.arch.lane_idx() == 0:
            barrier.make_ready(filled, stages, 1)
            barrier.make_ready(drained, stages, WARPS * barrier.WARP_ARRIVALS)
            barrier.fence_ready()

        reach = cutlass.min(index_table.shape[1] * PAGE, scores.shape[1])
        count, request, page = page_share.share(
            lengths, reach, PAGE, self.shard, self.ahead, self.lead
        )
        # Where this CTA has no page, its place lies behind the last request.
        length = lengths[cutlass.min(request, lengths.shape[0] - 1)]
        entry = Int32(0)
        if fetches and count > 0:
            entry = self._entry(index_table, request, page)
        cute.arch.sync_threads()
        pdl.wait()
        if cutlass.const_expr(self.release):
            pdl.release()
        queries = index_q8.shape[0] // lengths.shape[0]
        first = (count, request, page, length)
        scoring = (index_q8, index_w, lengths, scores, reach, ring, query, weights)
        if fetches:
            self._fetch(index_kv, index_table, lengths, reach, ring, filled, drained, first, entry)
        elif queries == 1:
            self._score(*scoring, filled, drained, first, 1)
        elif queries == 2:
            self._score(*scoring, filled, drained, first, 2)
        else:
            self._score(*scoring, filled, drained, first, MAX_QUERIES)

    def _scorers(self) -> int:
        """Threads that score."""
        return self.groups * WARPS * reduce.WARP

    def _entry(self, index_table: cute.Tensor, request, page) -> Int32:
        """This lane's entry of a request: of page `page + lane`, or of the last one."""
        place = cutlass.min(page + cute.arch.lane_idx(), index_table.shape[1] - 1)
        return index_table[request, place]

    @cute.jit
    def _fetch(
        self,
        index_kv: cute.Tensor,
        index_table: cute.Tensor,
        lengths: cute.Tensor,
        reach,
        ring: cute.Tensor,
        filled: cute.Pointer,
        drained: cute.Pointer,
        first,
        entry,
    ):
        """Copies the share's pages into the ring, in their order.

        `first` is the share, and the length of its first request; `entry` that of `_entry` there.
        """
        lane = cute.arch.lane_idx()
        count, request, page, length = first
        stages = self.ring
        number = Int32(0)
        while number < count:
            pages = page_share.pages_of(length, reach, PAGE, self.shard)
            end = cutlass.min(pages, page + count - number)
            while page < end:
                entries = cutlass.min(end - page, reduce.WARP)
                for place in range(entries):
                    block = Int64(cute.arch.shuffle_sync(entry, place))
                    stage = number % stages
                    barrier.wait(drained + stage, (number // stages + 1) % 2)
                    if lane == 0:
                        barrier.expect(filled + stage, PAGE_BYTES)
                        source = cute.make_tensor(
                            index_kv[block, None, None].iterator, cute.make_layout(PAGE_BYTES)
                        )
                        bulk.copy_run(source, ring[stage, None], filled + stage, once=True)
                    number = number + 1
                page = page + entries
                if page < end:
                    entry = self._entry(index_table, request, page)
            request = request + 1
            page = cutlass.max(page - pages, 0)
            if number < count:
                length = lengths[request]
                entry = self._entry(index_table, request, page)

    @cute.jit
    def _score(
        self,
        index_q8: cute.Tensor,
        index_w: cute.Tensor,
        lengths: cute.Tensor,
        scores: cute.Tensor,
        reach,
        ring: cute.Tensor,
        query: cute.Tensor,
        weights: cute.Tensor,
        filled: cute.Pointer,
        drained: cute.Pointer,
        first,
        queries: cutlass.Constexpr,
    ):
        """Scores the share's pages that fall to this warp's group, against `queries` rows.

        `first` is the share, and the length of its first request.
        """
        count, request, page, length = first
        stages = self.ring
        group = cute.arch.warp_idx() // WARPS
        number = Int32(0)  # of the first page of this request in the share
        while number < count:
            pages = page_share.pages_of(length, reach, PAGE, self.shard)
            end = cutlass.min(pages, page + count - number)
            if page < end:
                turns = self._own_turns(queries)
                targets = [scores[request * queries + turn, None] for turn in turns]
                fewest = length - (queries - 1)  # keys of the request's first row
                seen = [page_share.keys_here(fewest + turn, self.shard) for turn in turns]
                visible = [cutlass.min(keys, reach) for keys in seen]
                self._sync_scorers()  # nobody reads the query of the request before
                self._load_query(index_q8, index_w, request, query, weights, queries)
                self._sync_scorers()
                skipped = (group + self.groups - number % self.groups) % self.groups
                for place in range(number + skipped, number + end - page, self.groups):
                    stage = place % stages
                    barrier.wait(filled + stage, place // stages % 2)
                    keys, scale = self._load_keys(ring[stage, None])
                    position = (page + place - number) * PAGE + self._own_key()
                    sums = self._sum_over_lanes(self._weighted_sums(keys, query, weights, queries))
                    for own in cutlass.range_constexpr(len(sums)):
                        if position < visible[own]:
                            targets[own][position] = sums[own] * scale
                    # Not before what came from the stage has been used: loads that are merely
                    # issued would race with the next copy.
                    barrier.arrive_as_warp(drained + stage)
            number = number + cutlass.max(end - page, 0)
            request = request + 1
            page = cutlass.max(page - pages, 0)
            if number < count:
                length = lengths[request]

    def _sync_scorers(self):
        cute.arch.barrier(barrier_id=SCORERS, number_of_threads=self._scorers())

    def _load_query(self, index_q8, index_w, request, query, weights, queries: int):
        """The request's rows as operand B of the product, and half the weights of its columns."""
        thread = cute.arch.thread_idx()[0]
        n = queries * ROW_COLUMNS
        vectors = n * CODE_VECTORS
        for first in range(0, vectors, self._scorers()):
            place = cutlass.min(first + thread, vectors - 1)  # several may store the last one
            column, vector = place // CODE_VECTORS, place % CODE_VECTORS
            row = request * queries + column // ROW_COLUMNS
            head = cutlass.min(column % ROW_COLUMNS, INDEX_HEADS - 1)
            source = memory.vector_at(index_q8[row, head, None], vector, CHUNK)
            codes = cute.recast_tensor(source, Uint32).load()
            first_word, lane = vector // mma.GROUP_LANES * CHUNK_WORDS, vector % mma.GROUP_LANES
            for word in range(CHUNK_WORDS):
                step = first_word + word
                warpgroup.store_b(query, n, column, step, lane, codes[word], self.product)
        for first in range(0, n, self._scorers()):
            column = cutlass.min(first + thread, n - 1)
            row = request * queries + column // ROW_COLUMNS
            head = column % ROW_COLUMNS
            weight = index_w[row, cutlass.min(head, INDEX_HEADS - 1)] * Float32(0.5)
            weight = scalar.select(head < INDEX_HEADS, weight, Float32(0.0))
            weights[self._weight_place(column)] = weight
        warpgroup.fence_operand()

    def _load_keys(self, stage: cute.Tensor) -> tuple:
        """This lane's words of its warp's 16 keys, and the scale of its own key."""
        codes = cute.make_tensor(
            stage.iterator, cute.make_layout((PAGE, INDEX_DIM), stride=(INDEX_DIM, 1))
        )
        scales = cute.make_tensor(
            cute.recast_ptr(stage.iterator + KEY_BYTES, dtype=Float32), cute.make_layout(PAGE)
        )
        group, group_lane = mma.fragment_place(cute.arch.lane_idx())
        key = cute.arch.warp_idx() % WARPS * mma.TILE_M + group
        upper = self._load_key(codes[key, None], group, group_lane)
        lower = self._load_key(codes[key + mma.HALF_M, None], group, group_lane)
        return list(zip(upper, lower, strict=True)), scales[self._own_key()]

    def _load_key(self, row: cute.Tensor, group, group_lane) -> list[Uint32]:
        """This lane's words of the INDEX_DIM codes of `row`, the group-th of its warp.

        Neighbouring rows lie in the same banks: odd ones load their chunks in the other order.
        """
        swap = CHUNKS % 2 == 0
        odd = group % 2 if swap else 0
        chunks = []
        for chunk in range(CHUNKS):
            place = (chunk ^ odd if swap else chunk) * mma.GROUP_LANES + group_lane
            loaded = cute.recast_tensor(memory.vector_at(row, place, CHUNK), Uint32).load()
            chunks.append([loaded[word] for word in range(CHUNK_WORDS)])
        if swap:
            for first in range(0, CHUNKS, 2):
                pairs = list(zip(chunks[first], chunks[first + 1], strict=True))
                chunks[first] = [Uint32(select_(odd == 1, b, a)) for a, b in pairs]
                chunks[first + 1] = [Uint32(select_(odd == 1, a, b)) for a, b in pairs]
        return [word for chunk in chunks for word in chunk]

    def _own_key(self) -> Int32:
        """The key of the page whose score this lane ends up with."""
        group, group_lane = mma.fragment_place(cute.arch.lane_idx())
        return cute.arch.warp_idx() % WARPS * mma.TILE_M + group + mma.HALF_M * (group_lane % 2)

    def _weight_place(self, column) -> Int32:
        """Where a column's weight lies: a lane's columns of BANK_TILES tiles side by side."""
        tile, inner = column // mma.TILE_N, column % mma.TILE_N
        bank = tile // BANK_TILES * mma.GROUP_LANES + inner // 2
        return (bank * BANK_TILES + tile % BANK_TILES) * 2 + inner % 2

    def _weighted_sums(self, keys, query, weights, queries: int) -> list:
        """For each row, this lane's part of the sums over the heads, for its two keys."""
        n = queries * ROW_COLUMNS
        dots = warpgroup.product(warpgroup.operand_a(keys, self.product), query, n, self.product)
        group_lane = cute.arch.lane_idx() % mma.GROUP_LANES
        totals = [[Float32(0.0), Float32(0.0)] for _ in range(queries)]
        for first in range(0, len(dots), BANK_TILES):
            place = first // BANK_TILES * mma.GROUP_LANES + group_lane
            bank = memory.vector_at(weights, place, 2 * BANK_TILES).load()
            total = totals[first // HEAD_TILES]
            for tile, place in itertools.product(range(BANK_TILES), range(mma.TILE_N // 2)):
                # x + |x| is twice the ReLU, exactly, and cheaper than a maximum.
                positive = dots[first + tile][place] + cute.math.absf(dots[first + tile][place])
                weight = bank[2 * tile + place % 2]
                total[place // 2] = cute.math.fma(weight, positive, total[place // 2])
        return totals

    def _sum_over_lanes(self, totals: list) -> list[Float32]:
        """Sums over the four lanes of a key: of its own key and turns in each lane."""
        odd = cute.arch.lane_idx() % 2 == 1
        pairs = [reduce.lanes_exchange(upper, lower, odd, 1) for upper, lower in totals]
        if len(pairs) == 1:
            return [pairs[0] + cute.arch.shuffle_sync_bfly(pairs[0], 2)]
        later = cute.arch.lane_idx() % mma.GROUP_LANES >= 2
        half = len(pairs) // 2
        return [
            reduce.lanes_exchange(first, second, later, 2)
            for first, second in zip(pairs[:half], pairs[half:], strict=True)
        ]

    def _own_turns(self, queries: int) -> list[Int32]:
        """The rows of the request whose scores this lane ends up with."""
        later = cute.arch.lane_idx() % mma.GROUP_LANES // 2
        return [later * (queries // 2) + place for place in range(max(queries // 2, 1))]
