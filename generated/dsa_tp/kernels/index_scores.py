"""Generated from pipelines/dsa_tp.yaml; do not edit.

Scores of the indexer: how much every visible key matters to a query row.

    score[row, j] = scale_j * sum over h of index_w[row, h] * relu(q[row, h] . k_j)      FP32

Row i of request r sees the first max(lengths[r] - q + 1 + i, 0) keys, with q = rows / requests;
of these a rank that holds a share of the context scores its own. Columns from there on keep what
they hold. Keys lie in pages, their place given by index_table: codes of the PAGE tokens, then
their scales.

Grid     `ctas` CTAs, one an SM. The pages that the requests see form one list, request after
         request; every CTA takes an equal share of it, so any mix of lengths is balanced. The
         last warp fetches the pages, the others score them, WARPS warps a page: a warp keeps the
         query of one row in registers and takes q tiles of 16 keys, so the rows of a request
         share the bytes of its keys.
Loads    a page is one bulk copy into a ring of STAGES pages. E4M3 becomes FP16 without loss, the
         tensor cores multiply FP16 and add in FP32: keys are their 16 rows, heads their columns.
Wait     nothing here is static: all loads lie behind it, the release right behind it.
Rounding FP32 sums: over INDEX_DIM in the tensor core, over a lane's heads in ascending order,
         then over the four lanes of a key. A score depends on its query and key alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import bulk, fp8, memory, mma, pdl, reduce, scalar, warpgroup
from kpipe.runtime.host.compile import Symbol, TensorSpec

INDEX_HEADS = 32
INDEX_DIM = 128
PAGE = 64  # tokens of a cache page

FP32_BYTES = 4
TOKEN_BYTES = INDEX_DIM + FP32_BYTES  # E4M3 codes and one scale
KEY_BYTES = PAGE * INDEX_DIM  # of a page; the scales follow
PAGE_BYTES = PAGE * TOKEN_BYTES
SHARED_BYTES = 180 * 1024  # of the ring, at most
MAX_STAGES = 18
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
LINE_ENTRIES = memory.LINE_BYTES // 4  # i32 of a cache line
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
    ctas:     CTAs of the grid, a multiple of the SMs.
    groups:   pages that a CTA scores at a time.
    """

    release: bool = True
    pdl: bool = True
    rank: int = 0
    ranks: int = 1
    interleave: int = 1
    ctas: int = 132
    groups: int = 3
    stages: int = 18
    evict: bool = True
    warm: bool = True

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
        self.index_scores(
            index_q8=index_q8,
            index_w=index_w,
            index_kv=index_kv,
            index_table=index_table,
            lengths=lengths,
            scores=scores,
        ).launch(
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
        stages = self._stages()
        columns = MAX_QUERIES * ROW_COLUMNS
        operand = cute.make_layout(warpgroup.operand_words(columns, WORDS))
        shared = SmemAllocator()
        ring = shared.allocate_tensor(
            Uint8, cute.make_layout((stages, PAGE_BYTES), stride=(PAGE_BYTES, 1)), 128
        )
        query = shared.allocate_tensor(Uint32, operand, 128)
        weights = shared.allocate_tensor(Float32, cute.make_layout(columns), memory.VECTOR_BYTES)
        filled = shared.allocate_array(Int64, stages)
        drained = shared.allocate_array(Int64, stages)
        if fetches:
            place = cute.arch.lane_idx()
            if place < stages:
                bulk.make_ready(filled + place, 1, 1)
                bulk.make_ready(drained + place, 1, WARPS)
                bulk.fence_ready()
            if cutlass.const_expr(self.warm):
                self._warm(index_table, lengths)

        pdl.wait()
        if cutlass.const_expr(self.release):
            pdl.release()
        reach = cutlass.min(index_table.shape[1] * PAGE, scores.shape[1])
        share = self._share(lengths, reach)
        cute.arch.sync_threads()
        queries = index_q8.shape[0] // lengths.shape[0]
        scoring = (index_q8, index_w, lengths, scores, reach, ring, query, weights)
        if fetches:
            self._fetch(index_kv, index_table, lengths, reach, ring, filled, drained, share)
        elif queries == 1:
            self._score(*scoring, filled, drained, share, 1)
        elif queries == 2:
            self._score(*scoring, filled, drained, share, 2)
        else:
            self._score(*scoring, filled, drained, share, MAX_QUERIES)

    def _stages(self) -> int:
        """Pages of the ring. A place of the ring always serves the same group: waiting for a
        phase two ahead of the barrier would return at once."""
        return min(self.stages, SHARED_BYTES // PAGE_BYTES) // self.groups * self.groups

    def _scorers(self) -> int:
        """Threads that score."""
        return self.groups * WARPS * reduce.WARP

    def _keys(self, visible) -> Int32:
        """How many of the first `visible` keys this rank holds."""
        visible = cutlass.max(visible, 0)
        if self.ranks == 1:
            return visible
        period = self.ranks * self.interleave
        rest = visible % period - self.rank * self.interleave
        whole = visible // period * self.interleave
        return whole + cutlass.min(cutlass.max(rest, 0), self.interleave)

    def _pages(self, lengths: cute.Tensor, request, reach) -> Int32:
        """Pages that a request sees here."""
        keys = cutlass.min(self._keys(lengths[request]), reach)
        return (keys + PAGE - 1) // PAGE

    @cute.jit
    def _warm(self, index_table: cute.Tensor, lengths: cute.Tensor):
        """Brings table and lengths into the L2 cache; reads no value, so it may precede the wait."""
        ctas = cute.arch.grid_dim()[0]
        first = cute.arch.block_idx()[0] * reduce.WARP + cute.arch.lane_idx()
        lines = (index_table.shape[1] + LINE_ENTRIES - 1) // LINE_ENTRIES
        for line in range(first, index_table.shape[0] * lines, ctas * reduce.WARP):
            memory.prefetch(index_table[line // lines, None], line % lines * LINE_ENTRIES)
        for line in range(first, (lengths.shape[0] + LINE_ENTRIES - 1) // LINE_ENTRIES, ctas * reduce.WARP):
            memory.prefetch(lengths, line * LINE_ENTRIES)

    @cute.jit
    def _share(self, lengths: cute.Tensor, reach):
        """This CTA's share of the list of pages: how many, and where the first one is.

        The place is a request and a page counted from its first one, which may lie in one of the
        next requests; each lane counts the pages of a run of requests.
        """
        lane = cute.arch.lane_idx()
        requests = lengths.shape[0]
        run = (requests + reduce.WARP - 1) // reduce.WARP
        pages = Int32(0)
        for request in range(lane * run, cutlass.min(lane * run + run, requests)):
            pages = pages + self._pages(lengths, request, reach)
        end = reduce.lanes_scan(pages)
        total = cute.arch.shuffle_sync(end, reduce.WARP - 1)
        # The first `total % ctas` shares have one page more than the others.
        cta = cute.arch.block_idx()[0]
        ctas = cute.arch.grid_dim()[0]
        first = total // ctas * cta + cutlass.min(total % ctas, cta)
        count = total // ctas + (1 if cta < total % ctas else 0)
        passed = end <= first
        lanes = cute.arch.popc(cute.arch.vote_ballot_sync(passed))
        begin = cute.arch.warp_redux_sync(end if passed else Int32(0), "max")
        return count, lanes * run, first - begin

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
        share,
    ):
        """Copies the share's pages into the ring, in their order."""
        lane = cute.arch.lane_idx()
        count, request, page = share
        stages = self._stages()
        number = Int32(0)
        while number < count:
            pages = self._pages(lengths, request, reach)
            end = cutlass.min(pages, page + count - number)
            while page < end:
                entry = index_table[request, cutlass.min(page + lane, end - 1)]
                entries = cutlass.min(end - page, reduce.WARP)
                for place in range(entries):
                    block = Int64(cute.arch.shuffle_sync(entry, place))
                    stage = number % stages
                    bulk.wait(drained + stage, (number // stages + 1) % 2)
                    if lane == 0:
                        bulk.expect(filled + stage, PAGE_BYTES)
                        source = cute.make_tensor(
                            index_kv[block, None, None].iterator, cute.make_layout(PAGE_BYTES)
                        )
                        bulk.copy_run(source, ring[stage, None], filled + stage, self.evict)
                    number = number + 1
                page = page + entries
            request = request + 1
            page = cutlass.max(page - pages, 0)

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
        share,
        queries: cutlass.Constexpr,
    ):
        """Scores the share's pages that fall to this warp's group, against `queries` rows."""
        count, request, page = share
        stages = self._stages()
        group = cute.arch.warp_idx() // WARPS
        number = Int32(0)  # of the first page of this request in the share
        while number < count:
            pages = self._pages(lengths, request, reach)
            end = cutlass.min(pages, page + count - number)
            if page < end:
                turns = self._own_turns(queries)
                targets = [scores[request * queries + turn, None] for turn in turns]
                visible = [
                    self._visible(lengths[request] - (queries - 1 - turn), reach) for turn in turns
                ]
                self._sync_scorers()  # nobody reads the query of the request before
                self._load_query(index_q8, index_w, request, query, weights, queries)
                self._sync_scorers()
                skipped = (group + self.groups - number % self.groups) % self.groups
                for place in range(number + skipped, number + end - page, self.groups):
                    stage = place % stages
                    bulk.wait(filled + stage, place // stages % 2)
                    keys, scale = self._load_keys(ring[stage, None])
                    cute.arch.sync_warp()
                    if cute.arch.lane_idx() == 0:
                        bulk.arrive(drained + stage)
                    totals = self._weighted_sums(keys, query, weights, queries)
                    position = (page + place - number) * PAGE + self._own_key()
                    sums = self._sum_over_lanes(totals)
                    for own in cutlass.range_constexpr(len(sums)):
                        if position < visible[own]:
                            targets[own][position] = sums[own] * scale
            number = number + cutlass.max(end - page, 0)
            request = request + 1
            page = cutlass.max(page - pages, 0)

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
            chunk, lane = vector // mma.GROUP_LANES, vector % mma.GROUP_LANES
            for word in range(CHUNK_WORDS):
                step = chunk * CHUNK_WORDS + word
                for half, pair in enumerate(fp8.unpack_e4m3(codes[word])):
                    query[warpgroup.word_of(n, column, step, half, lane)] = pair
        for first in range(0, n, self._scorers()):
            column = cutlass.min(first + thread, n - 1)
            row = request * queries + column // ROW_COLUMNS
            head = column % ROW_COLUMNS
            weight = index_w[row, cutlass.min(head, INDEX_HEADS - 1)] * Float32(0.5)
            weights[column] = scalar.select(head < INDEX_HEADS, weight, Float32(0.0))
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
        upper = self._load_codes(codes[key, None], group_lane)
        lower = self._load_codes(codes[key + mma.HALF_M, None], group_lane)
        return list(zip(upper, lower, strict=True)), scales[self._own_key()]

    def _load_codes(self, row: cute.Tensor, group_lane) -> list[Uint32]:
        """This lane's words of the INDEX_DIM codes of `row`."""
        words = []
        for chunk in range(CHUNKS):
            vector = memory.vector_at(row, chunk * mma.GROUP_LANES + group_lane, CHUNK)
            loaded = cute.recast_tensor(vector, Uint32).load()
            words += [loaded[place] for place in range(CHUNK_WORDS)]
        return words

    def _visible(self, seen, reach) -> Int32:
        """Keys here of the first `seen`."""
        return cutlass.min(self._keys(seen), reach)

    def _own_key(self) -> Int32:
        """The key of the page whose score this lane ends up with."""
        group, group_lane = mma.fragment_place(cute.arch.lane_idx())
        return cute.arch.warp_idx() % WARPS * mma.TILE_M + group + mma.HALF_M * (group_lane % 2)

    def _weighted_sums(self, keys, query, weights, queries: int) -> list:
        """For each row, this lane's part of the sums over the heads, for its two keys."""
        fragments = []
        for upper, lower in keys:
            upper_low, upper_high = fp8.unpack_e4m3(upper)
            lower_low, lower_high = fp8.unpack_e4m3(lower)
            fragments.append((upper_low, lower_low, upper_high, lower_high))
        dots = warpgroup.product(fragments, query, queries * ROW_COLUMNS)
        group_lane = cute.arch.lane_idx() % mma.GROUP_LANES
        totals = [[Float32(0.0), Float32(0.0)] for _ in range(queries)]
        for tile, values in enumerate(dots):
            pair = memory.vector_at(weights, tile * mma.GROUP_LANES + group_lane, 2).load()
            total = totals[tile // HEAD_TILES]
            for place, value in enumerate(values):
                # x + |x| is twice the ReLU, exactly, and cheaper than a maximum.
                positive = value + cute.math.absf(value)
                total[place // 2] = cute.math.fma(pair[place % 2], positive, total[place // 2])
        return totals

    def _sum_over_lanes(self, totals: list) -> list[Float32]:
        """Sums over the four lanes of a key: of its own key and turns in each lane."""
        odd = cute.arch.lane_idx() % 2 == 1
        pairs = [self._exchange(upper, lower, odd, 1) for upper, lower in totals]
        if len(pairs) == 1:
            return [pairs[0] + cute.arch.shuffle_sync_bfly(pairs[0], 2)]
        later = cute.arch.lane_idx() % mma.GROUP_LANES >= 2
        half = len(pairs) // 2
        return [
            self._exchange(first, second, later, 2)
            for first, second in zip(pairs[:half], pairs[half:], strict=True)
        ]

    def _exchange(self, first: Float32, second: Float32, wants_second, distance: int) -> Float32:
        """This lane's and its partner's part of the one that this lane wants, added."""
        kept = scalar.select(wants_second, second, first)
        given = scalar.select(wants_second, first, second)
        return kept + cute.arch.shuffle_sync_bfly(given, distance)

    def _own_turns(self, queries: int) -> list[Int32]:
        """The rows of the request whose scores this lane ends up with."""
        later = cute.arch.lane_idx() % mma.GROUP_LANES // 2
        return [later * (queries // 2) + place for place in range(max(queries // 2, 1))]
