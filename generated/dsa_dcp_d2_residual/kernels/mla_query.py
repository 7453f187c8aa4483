"""Generated from pipelines/dsa_dcp_d2_residual.yaml; do not edit.

Attention query of this rank's heads, and the insert of the new latents.

    q_c   = BF16((q_a * rsqrt(sum(q_a * q_a) / Q_LORA + RMS_EPS)) * q_norm)
    full  = BF16(q_c . q_b^T)                      NOPE | PE of every head, FP32 accumulation
    query = E4M3(BF16(full[:NOPE] . w_uk) * q_scale_inv) | E4M3(full[NOPE:] * q_scale_inv)
    cache = E4M3(BF16(RMSNorm(kv_a)) * k_scale_inv) | E4M3(pe * k_scale_inv)

A negative slot inserts nothing; the row's query is written all the same.
The query goes into this rank's heads of every rank's mailbox, put together to words first: a word
that has come has come whole. No sentinel is sent, as no conversion makes its bytes.

Grid     a cluster a head and `tokens` rows. Its CTAs share the rows of Q_B and the columns of
         W_UK; every one of them norms all rows. Last warp: the cache, one row a CTA.
Loads    Q_B straight into the fragments of the tensor cores, as much as registers hold; the rest
         of it, W_UK and the rows through shared memory; nope values from CTA to CTA.
Wait     weights are requested before it, the rest behind it. The last warp releases, once it has
         stored its rows and fenced them for bulk copies.
Polls    only with `polls`, by the cluster of the last head and rows, when it has sent its own: any
         number of others may follow it as long as two clusters fit on the GPU at once.
Rounding to BF16: q_c, Q_B, W_UK, the normed latent; to E4M3 (nearest even, saturating): the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float32, Uint8, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import barrier, bulk, cluster, copy_async, inbox, memory, mma, pdl, reduce
from kpipe.runtime.device.head_mail import HeadMail
from kpipe.runtime.device.head_query import HeadQuery
from kpipe.runtime.device.latent_cache import LatentRow
from kpipe.runtime.device.rms import RmsNorm
from kpipe.runtime.device.row_tiles import RowTiles
from kpipe.runtime.host.compile import Symbol, TensorSpec

RANKS = 2
HEADS = 48
Q_LORA = 1536
KV_LORA = 512
NOPE = 128
PE = 64
PITCH = 8416  # elements from one packed row to the next
Q_A_COLUMN = 0  # where q_a and kv_a begin in a packed row
KV_A_COLUMN = 1536
PAGE = 64  # tokens of a cache page
TOKEN_BYTES = 576
RMS_EPS = 1e-06

BF16_BYTES = 2
LATENT = KV_LORA + PE
HEAD_THREADS = HeadQuery(Q_LORA, NOPE, PE, KV_LORA).threads  # of a CTA that work on the query
Q_VECTOR = memory.vector_width(BF16_BYTES, Q_LORA // reduce.WARP, PITCH, Q_A_COLUMN)
NORM = RmsNorm(Q_LORA, RMS_EPS, Q_VECTOR)
CACHE_ROW = LatentRow(KV_LORA, PE, RMS_EPS)
THREADS = HEAD_THREADS + reduce.WARP
MAIL = HeadMail(RANKS * HEADS, LATENT, Uint8, HEAD_THREADS)
WORD_OF_PE = 1  # pe columns of a CTA begin and end on words
FRAGMENT_OF_LATENTS = 4
SHARED_BYTES = 227 * 1024  # of a CTA at most
BARRIER_BYTES = 256  # and gaps, rounded up
QUERY_BARRIER = 1
BARRIERS = 4  # W_UK, the nope values, staged rows of Q_B and q_norm have arrived
Q_A_ALIGN = BF16_BYTES * memory.vector_width(BF16_BYTES, PITCH, Q_A_COLUMN)
KV_A_ALIGN = BF16_BYTES * memory.vector_width(BF16_BYTES, PITCH, KV_A_COLUMN)
PAGE_ALIGN = memory.vector_width(1, TOKEN_BYTES)


def operands(
    writes_q_c: bool = False, polls: bool = False, half: str = "whole"
) -> tuple[TensorSpec | None, ...]:
    """Tensors of a launch, in the order of the arguments; None where a flag leaves one out."""
    waits = polls and half != "publish"
    rows = Symbol("rows")
    # A page may lie among other layers' bytes; slot * stride passes 2^31 in a large cache.
    page_stride = Symbol("page_stride", multiple=PAGE_ALIGN, bits=64)
    page_shape, page_strides = (PAGE, TOKEN_BYTES), (TOKEN_BYTES, 1)
    return (
        TensorSpec("q_a", "bf16", (rows, Q_LORA), (PITCH, 1), align=Q_A_ALIGN),
        TensorSpec("kv_a", "bf16", (rows, LATENT), (PITCH, 1), align=KV_A_ALIGN),
        TensorSpec("slots", "i64", (rows,), align=8),
        TensorSpec("q_norm", "bf16", (Q_LORA,)),
        TensorSpec("kv_norm", "bf16", (KV_LORA,)),
        TensorSpec("q_b", "bf16", (HEADS * (NOPE + PE), Q_LORA)),
        TensorSpec("w_uk", "bf16", (HEADS, NOPE, KV_LORA)),
        TensorSpec("q_scale_inv", "fp32", (1,), align=4),
        TensorSpec("k_scale_inv", "fp32", (1,), align=4),
        TensorSpec("latent_kv", "u8", (None, *page_shape), (page_stride, *page_strides)),
        TensorSpec("q_mail_peers", "i64", (RANKS,)) if half != "collect" else None,
        TensorSpec("q_c", "bf16", (rows, Q_LORA)) if writes_q_c else None,
        TensorSpec("q_mail", "u8", (rows, RANKS * HEADS, LATENT)) if waits else None,
        TensorSpec("fault", "i64", (1,), align=8) if waits else None,
    )


@dataclass(frozen=True)
class MlaQuery:
    """Query rows of all heads, cache rows of all slots >= 0, and q_c where somebody reads it.

    release:    let the dependent grid start behind the inserted rows (not where it reads early what
                this kernel writes).
    pdl:        launch with the attribute that lets this grid start before its predecessor ends.
    writes_q_c: also store the normed rows.
    tokens:     rows of a cluster, a multiple of 16.
    parts:      CTAs of a head at most; fewer leave room for another grid beside this one.
    dcp:        publishes; this file has one form only.
    polls:      also wait for every rank's heads.
    half:       whole, or apart what it sends (publish) and what it waits for (collect).
    """

    release: bool = True
    pdl: bool = True
    writes_q_c: bool = False
    tokens: int = 64
    parts: int = 8
    dcp: bool = True
    polls: bool = False
    half: str = "whole"

    def __post_init__(self) -> None:
        if self.tokens < mma.TILE_M or self.tokens % mma.TILE_M:
            raise ValueError(f"tokens {self.tokens} is not a multiple of {mma.TILE_M}")
        if self.parts < 1:
            raise ValueError(f"parts {self.parts}: a head needs a CTA")
        needed = self._head.shared_bytes(self.tokens, self._tiles.stages) + BARRIER_BYTES
        needed += mma.TILE_M * MAIL.row_bytes
        if needed > SHARED_BYTES:
            raise ValueError(
                f"tokens {self.tokens} and parts {self.parts} need {needed} bytes of shared "
                f"memory, {SHARED_BYTES} are there"
            )
        if self.half not in ("whole", "publish", "collect"):
            raise ValueError(f"half is {self.half!r}; choose whole, publish or collect")

    def resident_ctas(self, rows: int) -> int:
        """CTAs that have to run at once where it polls: one cluster waits, another one sends."""
        return 2 * self._head.cluster

    @cute.jit
    def __call__(
        self,
        q_a: cute.Tensor,
        kv_a: cute.Tensor,
        slots: cute.Tensor,
        q_norm: cute.Tensor,
        kv_norm: cute.Tensor,
        q_b: cute.Tensor,
        w_uk: cute.Tensor,
        q_scale_inv: cute.Tensor,
        k_scale_inv: cute.Tensor,
        latent_kv: cute.Tensor,
        q_mail_peers: cute.Tensor | None,
        q_c: cute.Tensor | None,
        q_mail: cute.Tensor | None,
        fault: cute.Tensor | None,
        stream,
    ):
        if cutlass.const_expr(self.half == "collect"):
            self.collect(q_mail, fault).launch(
                grid=[self._head.cluster, 1, 1],
                block=[HEAD_THREADS, 1, 1],
                stream=stream,
                use_pdl=self.pdl,
            )
            return
        self.mla_query(
            q_a=q_a,
            kv_a=kv_a,
            slots=slots,
            q_norm=q_norm,
            kv_norm=kv_norm,
            q_b=q_b,
            w_uk=w_uk,
            q_scale_inv=q_scale_inv,
            k_scale_inv=k_scale_inv,
            latent_kv=latent_kv,
            q_mail_peers=q_mail_peers,
            q_c=q_c,
            q_mail=q_mail,
            fault=fault,
        ).launch(
            grid=[self._head.cluster, HEADS, cute.ceil_div(kv_a.shape[0], self.tokens)],
            block=[THREADS, 1, 1],
            cluster=[self._head.cluster, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def mla_query(
        self,
        q_a: cute.Tensor,
        kv_a: cute.Tensor,
        slots: cute.Tensor,
        q_norm: cute.Tensor,
        kv_norm: cute.Tensor,
        q_b: cute.Tensor,
        w_uk: cute.Tensor,
        q_scale_inv: cute.Tensor,
        k_scale_inv: cute.Tensor,
        latent_kv: cute.Tensor,
        q_mail_peers: cute.Tensor | None,
        q_c: cute.Tensor | None,
        q_mail: cute.Tensor | None,
        fault: cute.Tensor | None,
    ):
        _, head, _ = cute.arch.block_idx()
        if cute.arch.thread_idx()[0] < HEAD_THREADS:
            weights = w_uk[head, None, None]
            self._query(q_a, q_norm, q_c, q_b, weights, q_scale_inv[0], q_mail_peers)
            if cutlass.const_expr(self.polls and self.half == "whole"):
                self._collect_last(q_mail, fault)
        else:
            self._insert(kv_a, slots, kv_norm, k_scale_inv, latent_kv)

    @cute.kernel
    def collect(self, q_mail: cute.Tensor, fault: cute.Tensor):
        pdl.wait()
        self._collect(q_mail, fault)

    @cute.jit
    def _collect_last(self, q_mail: cute.Tensor, fault: cute.Tensor):
        """In the cluster of the last head and rows, behind what it has sent."""
        _, head, chunk = cute.arch.block_idx()
        if head == HEADS - 1 and chunk == cute.arch.grid_dim()[2] - 1:
            self._collect(q_mail, fault)

    def _collect(self, q_mail: cute.Tensor, fault: cute.Tensor):
        """Waits for all heads of all rows, by the threads of one cluster's worth of CTAs."""
        first = cute.arch.block_idx()[0] * HEAD_THREADS + cute.arch.thread_idx()[0]
        MAIL.receive(q_mail, first, self._head.cluster * HEAD_THREADS, "mla_query", fault)

    @property
    def _head(self) -> HeadQuery:
        return HeadQuery(Q_LORA, NOPE, PE, KV_LORA, self.parts)

    @property
    def _tiles(self) -> RowTiles:
        return RowTiles(NORM, self._head.product, self.tokens)

    def _meet(self):
        """Barrier of the warps that work on the query."""
        cute.arch.barrier(barrier_id=QUERY_BARRIER, number_of_threads=HEAD_THREADS)

    @cute.jit
    def _query(
        self,
        q_a: cute.Tensor,
        q_norm: cute.Tensor,
        q_c: cute.Tensor | None,
        q_b: cute.Tensor,
        w_uk: cute.Tensor,
        scale: Float32,
        peers: cute.Tensor,
    ):
        """This CTA's share of the query of a head, and of q_c."""
        part, head, chunk = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        division = self._head
        product = division.product
        shared = SmemAllocator()
        align = memory.VECTOR_BYTES
        rows_here = shared.allocate_tensor(BFloat16, self._tiles.layout(), align)
        partial = shared.allocate_tensor(Float32, product.partial_layout(), align)
        nope = shared.allocate_tensor(BFloat16, division.nope_layout(self.tokens), align)
        w_uk_share = shared.allocate_tensor(BFloat16, division.w_uk_layout(), align)
        mail = MAIL.allocate(shared)
        pe_begin = cutlass.max(part * product.outputs - NOPE, 0) + KV_LORA
        pe_end = cutlass.max((part + 1) * product.outputs - NOPE, 0) + KV_LORA
        latents = part * division.latents, (part + 1) * division.latents
        barriers = barrier.allocate(shared, BARRIERS)
        w_uk_here, nope_here, staged_here = (barriers + place for place in range(3))
        staged = None
        if cutlass.const_expr(product.staged > 0):
            staged = shared.allocate_tensor(BFloat16, product.staged_layout(), align)
        norm_weight = shared.allocate_tensor(BFloat16, cute.make_layout(Q_LORA), align)
        norm_here = barriers + 3
        source = q_a

        first = chunk * self.tokens
        rows = cutlass.min(source.shape[0] - first, self.tokens)
        if warp == 0:
            if lane == 0:
                inbox.open_inbox(nope_here, division.inbox_bytes(rows))
                inbox.open_inbox(w_uk_here, division.w_uk_bytes)
                inbox.open_inbox(norm_here, Q_LORA * BF16_BYTES)
                bulk.copy_run(q_norm, norm_weight, norm_here)
                if cutlass.const_expr(product.staged > 0):
                    inbox.open_inbox(staged_here, product.staged_bytes)
            cute.arch.sync_warp()
            division.request_w_uk(w_uk, part, w_uk_share, w_uk_here, lane)
        output = (head * division.cluster + part) * product.outputs
        if cutlass.const_expr(product.staged > 0):
            product.request_staged(q_b, output, staged, staged_here, warp, lane)
        weights = product.load_weights(q_b, output, warp, lane)
        cluster.start()
        pdl.wait()

        self._tiles.request(source, self._tiles.stage(rows_here, 0), first, warp, lane)
        count = cute.ceil_div(rows, mma.TILE_M)
        for tile in cutlass.range(count, unroll=1):
            tile_row = first + tile * mma.TILE_M
            stage = self._tiles.stage(rows_here, tile)
            copy_async.wait()
            barrier.wait(norm_here, 0)
            self._tiles.normalise(stage, norm_weight, source.shape[0] - tile_row, warp, lane)
            if cutlass.const_expr(self.writes_q_c):
                owner = head * division.cluster + part
                self._tiles.copy(stage, q_c, tile_row, owner, HEADS * division.cluster, warp, lane)
            self._meet()
            if tile + 1 < count:
                next_stage = self._tiles.stage(rows_here, tile + 1)
                self._tiles.request(source, next_stage, tile_row + mma.TILE_M, warp, lane)
            if cutlass.const_expr(product.staged > 0):
                barrier.wait(staged_here, 0)
            product.store_products(stage, weights, partial, warp, lane, staged)
            self._meet()
            nope_tile = cute.local_tile(nope, (mma.TILE_M, NOPE), (tile, 0))
            left = source.shape[0] - tile_row
            rows_left = MAIL.rows(mail, left)
            division.share(partial, nope_tile, nope_here, rows_left, 0, part, thread, scale)
            self._meet()
            pe = pe_begin, pe_end
            MAIL.send(mail, left, tile_row, head, pe, WORD_OF_PE, peers, thread)

        barrier.wait(w_uk_here, 0)
        columns = division.load_w_uk(w_uk_share, warp, lane)
        inbox.receive(nope_here)
        for tile in cutlass.range(count, unroll=1):
            tile_row = first + tile * mma.TILE_M
            nope_tile = cute.local_tile(nope, (mma.TILE_M, NOPE), (tile, 0))
            left = source.shape[0] - tile_row
            division.absorb(nope_tile, columns, MAIL.rows(mail, left), 0, part, warp, lane, scale)
            self._meet()
            MAIL.send(mail, left, tile_row, head, latents, FRAGMENT_OF_LATENTS, peers, thread)
            self._meet()

    @cute.jit
    def _insert(
        self,
        kv_a: cute.Tensor,
        slots: cute.Tensor,
        kv_norm: cute.Tensor,
        k_scale_inv: cute.Tensor,
        latent_kv: cute.Tensor,
    ):
        """Inserts the rows of this CTA, by one warp; it takes part in no barrier of the query."""
        part, head, chunk = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        norm_weight = CACHE_ROW.load(kv_norm, lane)
        scale = k_scale_inv[0]
        cluster.start()
        first = chunk * self.tokens
        last = cutlass.min(first + self.tokens, kv_a.shape[0])
        pdl.wait()
        parts = self._head.cluster
        for row in cutlass.range(first + head * parts + part, last, HEADS * parts, unroll=1):
            x = CACHE_ROW.load(kv_a[row, None], lane)
            pe = cute.domain_offset((KV_LORA,), kv_a[row, None])
            slot = slots[row]
            latent = CACHE_ROW.normalised(x, norm_weight)  # while the slot is on its way
            if slot >= 0:
                token = latent_kv[slot // PAGE, slot % PAGE, None]
                CACHE_ROW.store_fp8_tensor(latent, pe, scale, token, lane)
        if cutlass.const_expr(self.release):
            # Behind the rows: the core reads them by bulk copies.
            bulk.fence_stores()
            cute.arch.sync_warp()
            pdl.release()
