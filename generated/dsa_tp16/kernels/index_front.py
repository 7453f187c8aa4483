"""Generated from pipelines/dsa_tp16.yaml; do not edit.

The indexer's operands straight from the packed projection: q_a norm, index query and dsa_index.

    q_c    = BF16((q_a * rsqrt(sum(q_a * q_a) / Q_LORA + RMS_EPS)) * q_norm)    or as given
    q      = q_c . index_q_b^T                       FP32, not rounded; INDEX_DIM of every head
    s      = power of two at or above max(amax(q), 1e-4) / 448 of a (row, head)
    index_q8 = E4M3(q / s)
    index_w  = wv * s * INDEX_DIM^-0.5 * INDEX_HEADS^-0.5
    key      LayerNorm(wk), quantised likewise, into the paged cache; see device/index_row.py

A negative slot inserts no key; the row's query is written all the same.

Grid     a cluster a head and `tokens` rows; a CTA has `tile_n` of the head's rows of index_q_b.
         Every one of them norms all rows. Last warp: the key, one row a CTA.
Loads    index_q_b straight into the fragments of the tensor cores, those past `held` and the rows
         through shared memory; a head's largest magnitudes from CTA to CTA.
Wait     weights are requested before it, the rest behind it. Released by the warp of the key once
         its own are stored and fenced, as the dependent grid may read them by bulk copies.
Rounding q_c to BF16; query and key once, to E4M3 (nearest even, saturating).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float32, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import barrier, bulk, cluster, copy_async, inbox, memory, mma, pdl, reduce
from kpipe.runtime.device.index_query import IndexQuery, shares
from kpipe.runtime.device.index_row import IndexRow
from kpipe.runtime.device.rms import RmsNorm
from kpipe.runtime.device.row_tiles import RowTiles
from kpipe.runtime.host.compile import Symbol, TensorSpec

Q_LORA = 1536
INDEX_HEADS = 32
INDEX_DIM = 128
PITCH = 3040  # elements from one packed row to the next
Q_A_COLUMN = 0  # where q_a, wk and wv begin in a packed row
WK_COLUMN = 2880
WV_COLUMN = 3008
PAGE = 64  # tokens of a cache page
RMS_EPS = 1e-06
INDEX_EPS = 1e-06

BF16_BYTES = 2
FP32_BYTES = 4
ROW = IndexRow(INDEX_HEADS, INDEX_DIM, PAGE, INDEX_EPS)
TOKEN_BYTES = ROW.token_bytes
Q_VECTOR = memory.vector_width(BF16_BYTES, Q_LORA // reduce.WARP, PITCH, Q_A_COLUMN)
NORM = RmsNorm(Q_LORA, RMS_EPS, Q_VECTOR)
QUERY_BARRIER = 1
BARRIERS = 3  # q_norm, the largest magnitudes and the staged weights have arrived
SHARED_BYTES = 227 * 1024  # of a CTA at most
HALF_SHARED_BYTES = 113 * 1024  # of each of two CTAs on a multiprocessor
HALF_REGISTERS = 48  # weights of a thread with which two CTAs fit
Q_A_ALIGN = BF16_BYTES * memory.vector_width(BF16_BYTES, PITCH, Q_A_COLUMN)
WK_ALIGN = BF16_BYTES * memory.vector_width(BF16_BYTES, PITCH, WK_COLUMN)


def operands(normalized: bool = False) -> tuple[TensorSpec | None, ...]:
    """Tensors of a launch, in the order of the arguments; None where a flag leaves one out."""
    rows = Symbol("rows")
    # A page may lie among other layers' bytes; slot * stride passes 2^31 in a large cache.
    page_stride = Symbol("page_stride", multiple=FP32_BYTES, bits=64)
    page_shape, page_strides = (PAGE, TOKEN_BYTES), (TOKEN_BYTES, 1)
    q_a = TensorSpec("q_a", "bf16", (rows, Q_LORA), (PITCH, 1), align=Q_A_ALIGN)
    q_c = TensorSpec("q_c", "bf16", (rows, Q_LORA))
    q_norm = TensorSpec("q_norm", "bf16", (Q_LORA,))
    return (
        None if normalized else q_a,
        q_c if normalized else None,
        q_norm,
        TensorSpec("index_q_b", "bf16", (INDEX_HEADS * INDEX_DIM, Q_LORA)),
        TensorSpec("wk", "bf16", (rows, INDEX_DIM), (PITCH, 1), align=WK_ALIGN),
        TensorSpec("wv", "bf16", (rows, INDEX_HEADS), (PITCH, 1), align=BF16_BYTES),
        TensorSpec("index_slots", "i64", (rows,), align=8),
        TensorSpec("index_k_norm", "fp32", (INDEX_DIM,)),
        TensorSpec("index_k_bias", "fp32", (INDEX_DIM,)),
        TensorSpec("index_kv", "u8", (None, *page_shape), (page_stride, *page_strides)),
        TensorSpec("index_q8", "u8", (rows, INDEX_HEADS, INDEX_DIM)),
        TensorSpec("index_w", "fp32", (rows, INDEX_HEADS)),
    )


@dataclass(frozen=True)
class IndexFront:
    """Quantises the index query and key of every row and inserts the key.

    release:    let the dependent grid start behind the keys (not where it reads early what this
                kernel writes).
    pdl:        launch with the attribute that lets this grid start before its predecessor ends.
    normalized: read q_c, which another kernel has written, in place of q_a.
    tile_n:     rows of index_q_b of a CTA, a head's by a power of two; see `shares`.
    tokens:     rows of a cluster, 8 or a multiple of 16.
    held:       rows of index_q_b of a CTA that registers hold at most; the others wait in shared
                memory, so that two CTAs fit a multiprocessor, or a larger tile_n is possible.
    """

    release: bool = True
    pdl: bool = True
    normalized: bool = False
    tile_n: int = 32
    tokens: int = 64
    held: int = 32

    def __post_init__(self) -> None:
        if self.tokens != mma.HALF_M and (self.tokens < mma.TILE_M or self.tokens % mma.TILE_M):
            few, many = mma.HALF_M, mma.TILE_M
            raise ValueError(f"tokens {self.tokens} is neither {few} nor a multiple of {many}")
        if self.held % mma.TILE_N or self.held < 0:
            raise ValueError(f"held {self.held} is not a multiple of {mma.TILE_N}")
        allowed = shares(Q_LORA, INDEX_DIM, self.held)
        if self.tile_n not in allowed:
            choices = ", ".join(map(str, allowed)) or "less held"
            raise ValueError(f"tile_n is {self.tile_n}; choose from {choices}")
        if self._shared_bytes > SHARED_BYTES:
            raise ValueError(
                f"tile_n {self.tile_n}, tokens {self.tokens} and held {self.held} need "
                f"{self._shared_bytes} bytes of shared memory, {SHARED_BYTES} are there"
            )

    @cute.jit
    def __call__(
        self,
        q_a: cute.Tensor | None,
        q_c: cute.Tensor | None,
        q_norm: cute.Tensor,
        index_q_b: cute.Tensor,
        wk: cute.Tensor,
        wv: cute.Tensor,
        index_slots: cute.Tensor,
        index_k_norm: cute.Tensor,
        index_k_bias: cute.Tensor,
        index_kv: cute.Tensor,
        index_q8: cute.Tensor,
        index_w: cute.Tensor,
        stream,
    ):
        self.index_front(
            source=q_c if cutlass.const_expr(self.normalized) else q_a,
            q_norm=q_norm,
            index_q_b=index_q_b,
            wk=wk,
            wv=wv,
            index_slots=index_slots,
            index_k_norm=index_k_norm,
            index_k_bias=index_k_bias,
            index_kv=index_kv,
            index_q8=index_q8,
            index_w=index_w,
        ).launch(
            grid=[self._query.cluster, INDEX_HEADS, cute.ceil_div(wk.shape[0], self.tokens)],
            block=[self._threads + reduce.WARP, 1, 1],
            cluster=[self._query.cluster, 1, 1],
            min_blocks_per_mp=self._resident,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def index_front(
        self,
        source: cute.Tensor,
        q_norm: cute.Tensor,
        index_q_b: cute.Tensor,
        wk: cute.Tensor,
        wv: cute.Tensor,
        index_slots: cute.Tensor,
        index_k_norm: cute.Tensor,
        index_k_bias: cute.Tensor,
        index_kv: cute.Tensor,
        index_q8: cute.Tensor,
        index_w: cute.Tensor,
    ):
        _, head, _ = cute.arch.block_idx()
        if cute.arch.warp_idx() < self._query.product.warps:
            self._quantise_query(
                source,
                q_norm,
                index_q_b,
                wv[None, head],
                index_q8[None, head, None],
                index_w[None, head],
            )
        else:
            self._insert_keys(wk, index_slots, index_k_norm, index_k_bias, index_kv)

    @property
    def _query(self) -> IndexQuery:
        return IndexQuery(Q_LORA, INDEX_DIM, self.tile_n, min(self.tokens, mma.TILE_M), self.held)

    @property
    def _tiles(self) -> RowTiles:
        return RowTiles(NORM, self._query.product, self.tokens)

    @property
    def _few(self) -> bool:
        """Rows of a single tile that are few enough to be normed by all warps together."""
        return not self.normalized and self.tokens == mma.HALF_M

    @property
    def _threads(self) -> int:
        """Threads that work on the query; the key has one more warp."""
        return self._query.product.warps * reduce.WARP

    @property
    def _shared_bytes(self) -> int:
        """Shared memory of a CTA, barriers and gaps rounded up."""
        product = self._query.product
        rows = self._tiles.stages * product.rows + product.staged
        sums = product.warps * product.rows * (self.tile_n + mma.TILE_N)
        kept = self.tokens * (self.tile_n + self._query.cluster)
        return (rows * product.pitch + Q_LORA) * BF16_BYTES + (sums + kept) * FP32_BYTES + 256

    @property
    def _resident(self) -> int:
        """CTAs that a multiprocessor has to hold: two where shared memory and registers allow."""
        small = self._query.product.weight_registers <= HALF_REGISTERS
        return 2 if small and self._shared_bytes <= HALF_SHARED_BYTES else 1

    def _meet(self):
        """Barrier of the warps that work on the query."""
        cute.arch.barrier(barrier_id=QUERY_BARRIER, number_of_threads=self._threads)

    @cute.jit
    def _quantise_query(
        self,
        source: cute.Tensor,
        q_norm: cute.Tensor,
        index_q_b: cute.Tensor,
        wv: cute.Tensor,
        codes: cute.Tensor,
        weights: cute.Tensor,
    ):
        """This CTA's share of the codes of a head, [rows, INDEX_DIM], and the head's weights."""
        part, head, chunk = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        query = self._query
        shared = SmemAllocator()
        align = memory.VECTOR_BYTES
        rows_here = shared.allocate_tensor(BFloat16, self._tiles.layout(), align)
        partial = shared.allocate_tensor(Float32, query.product.partial_layout(), align)
        sums = shared.allocate_tensor(Float32, query.sums_layout(self.tokens), align)
        amax = shared.allocate_tensor(Float32, query.inbox_layout(self.tokens), align)
        norm_weight = shared.allocate_tensor(BFloat16, cute.make_layout(Q_LORA), align)
        barriers = barrier.allocate(shared, BARRIERS)
        norm_here, amax_here, staged_here = (barriers + place for place in range(BARRIERS))
        staged = None
        if cutlass.const_expr(query.staged > 0):
            staged = shared.allocate_tensor(BFloat16, query.product.staged_layout(), align)

        first = chunk * self.tokens
        rows = cutlass.min(source.shape[0] - first, self.tokens)
        if thread == 0:
            inbox.open_inbox(amax_here, query.inbox_bytes(rows))
            if cutlass.const_expr(not self.normalized):
                inbox.open_inbox(norm_here, Q_LORA * BF16_BYTES)
                bulk.copy_run(q_norm, norm_weight, norm_here)
            if cutlass.const_expr(query.staged > 0):
                inbox.open_inbox(staged_here, query.product.staged_bytes)
        output = head * INDEX_DIM + part * self.tile_n
        if cutlass.const_expr(query.staged > 0):
            product = query.product
            product.request_staged(index_q_b, output, staged, staged_here, warp, lane)
        matrix = query.product.load_weights(index_q_b, output, warp, lane)
        cluster.start()
        pdl.wait()

        if cutlass.const_expr(self._few):
            run_sums = shared.allocate_tensor(Float32, self._tiles.sums_layout(), align)
            self._norm_few(source, rows_here, run_sums, norm_weight, norm_here, first, rows)
        else:
            self._tiles.request(source, self._tiles.stage(rows_here, 0), first, warp, lane)
        tile_rows = query.rows
        count = cute.ceil_div(rows, tile_rows)
        for tile in cutlass.range(count, unroll=1):
            tile_row = first + tile * tile_rows
            stage = self._tiles.stage(rows_here, tile)
            copy_async.wait()
            if cutlass.const_expr(not self.normalized and not self._few):
                barrier.wait(norm_here, 0)
                self._tiles.normalise(stage, norm_weight, source.shape[0] - tile_row, warp, lane)
            self._meet()
            if tile + 1 < count:
                next_stage = self._tiles.stage(rows_here, tile + 1)
                self._tiles.request(source, next_stage, tile_row + tile_rows, warp, lane)
            if cutlass.const_expr(query.staged > 0):
                barrier.wait(staged_here, 0)
            query.product.store_products(stage, matrix, partial, warp, lane, staged)
            self._meet()
            query.share_largest(partial, sums, amax, amax_here, tile, rows, part, thread)

        row, piece = thread // query.pieces, thread % query.pieces
        weighs = part == 0 and piece == 0
        head_weight = Float32(0.0)
        if weighs and row < rows:
            head_weight = wv[first + row].to(Float32)
        inbox.receive(amax_here)
        self._meet()
        for token in cutlass.range(row, rows, self._threads // query.pieces, unroll=1):
            scale = query.quantise(sums, amax, codes[first + token, None], token, piece, part)
            if weighs:
                weights[first + token] = ROW.weight(head_weight, scale)
            following = token + self._threads // query.pieces
            if weighs and following < rows:
                head_weight = wv[first + following].to(Float32)

    @cute.jit
    def _norm_few(
        self,
        source: cute.Tensor,
        rows_here: cute.Tensor,
        run_sums: cute.Tensor,
        norm_weight: cute.Tensor,
        norm_here: cute.Pointer,
        first,
        rows,
    ):
        """Loads and norms the only tile; of few rows every warp has a part of each."""
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        tiles = self._tiles
        stage = tiles.stage(rows_here, 0)
        if tiles.spreads(rows):
            tiles.request_spread(source, stage, first, rows, warp, lane)
            copy_async.wait()
            tiles.sum_spread(stage, run_sums, rows, warp, lane)
            self._meet()
            barrier.wait(norm_here, 0)
            tiles.normalise_spread(stage, run_sums, norm_weight, rows, warp, lane)
        else:
            tiles.request(source, stage, first, warp, lane)
            copy_async.wait()
            barrier.wait(norm_here, 0)
            tiles.normalise(stage, norm_weight, rows, warp, lane)

    @cute.jit
    def _insert_keys(
        self,
        wk: cute.Tensor,
        index_slots: cute.Tensor,
        index_k_norm: cute.Tensor,
        index_k_bias: cute.Tensor,
        index_kv: cute.Tensor,
    ):
        """Inserts the keys of this CTA, by one warp; it takes part in no barrier of the query.

        Releases behind them: nobody else of the CTA stores what a bulk copy reads.
        """
        part, head, chunk = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        norm = memory.load_float(index_k_norm, lane, ROW.key_vector)
        bias = memory.load_float(index_k_bias, lane, ROW.key_vector)
        cluster.start()
        parts = self._query.cluster
        first = chunk * self.tokens
        last = cutlass.min(first + self.tokens, wk.shape[0])
        pdl.wait()
        for row in cutlass.range(first + head * parts + part, last, INDEX_HEADS * parts, unroll=1):
            ROW.insert_key(wk[row, None], index_slots[row], norm, bias, index_kv, lane)
        if cutlass.const_expr(self.release):
            bulk.fence_stores()
            cute.arch.sync_warp()
            pdl.release()
