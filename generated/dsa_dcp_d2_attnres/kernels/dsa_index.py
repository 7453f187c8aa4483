"""Generated from pipelines/dsa_dcp_d2_attnres.yaml; do not edit.

Indexer operands of a sparse-attention layer: the key goes into the paged index cache, the query
becomes FP8, and the head weights take every scale.

    key    k = (wk - mean) * rsqrt(var + INDEX_EPS) * index_k_norm + index_k_bias       FP32
           s = power of two at or above max(amax(k), 1e-4) / 448;  codes = E4M3(k / s)
           page[slot // PAGE]: bytes [token * INDEX_DIM, +INDEX_DIM) = codes, token = slot % PAGE
                               FP32 behind all keys of the page, number `token` = s
    query  per (row, head): s as above over the BF16 index_q; index_q8 = E4M3(q / s)
    weight index_w = wv * s * INDEX_DIM^-0.5 * INDEX_HEADS^-0.5, with the s of the query's head

A negative slot inserts no key; the row's query is written all the same.

Grid     one CTA a row. Warps 0..QUERY_WARPS-1: HEAD_LANES lanes a head; last warp: the key.
Wait     index_k_norm and index_k_bias are loaded before it, the rest behind it. Released by the
         warp of the key once that is stored and fenced, as the dependent grid may read it by bulk
         copies.
Rounding once, to E4M3 (nearest even, saturating); weights and scales stay FP32.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, cute

from kpipe.runtime.device import bulk, fp8, memory, pdl, reduce
from kpipe.runtime.device.index_row import IndexRow, group_scale
from kpipe.runtime.host.compile import Symbol, TensorSpec

INDEX_HEADS = 32
INDEX_DIM = 128
PITCH = 8416  # elements from one packed row to the next
WK_COLUMN = 8256  # where wk and wv begin in a packed row
WV_COLUMN = 8384
PAGE = 64  # tokens of a cache page
INDEX_EPS = 1e-06

BF16_BYTES = 2
FP32_BYTES = 4
ROW = IndexRow(INDEX_HEADS, INDEX_DIM, PAGE, INDEX_EPS)
TOKEN_BYTES = ROW.token_bytes
QUERY_VECTOR = memory.vector_width(BF16_BYTES, INDEX_HEADS * INDEX_DIM // reduce.WARP)
HEAD_LANES = INDEX_DIM // QUERY_VECTOR
QUERY_WARPS = INDEX_HEADS * HEAD_LANES // reduce.WARP
THREADS = (QUERY_WARPS + 1) * reduce.WARP
WK_ALIGN = BF16_BYTES * memory.vector_width(BF16_BYTES, PITCH, WK_COLUMN)


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows = Symbol("rows")
    # A page may lie among other layers' bytes; slot * stride passes 2^31 in a large cache.
    page_stride = Symbol("page_stride", multiple=FP32_BYTES, bits=64)
    page_shape, page_strides = (PAGE, TOKEN_BYTES), (TOKEN_BYTES, 1)
    return (
        TensorSpec("index_q", "bf16", (rows, INDEX_HEADS * INDEX_DIM)),
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
class DsaIndex:
    """Quantises the index query and key of every row and inserts the key.

    release: let the dependent grid start behind the keys (not where it reads early what this
             kernel writes).
    pdl:     launch with the attribute that lets this grid start before its predecessor ends.
    """

    release: bool = True
    pdl: bool = True

    @cute.jit
    def __call__(
        self,
        index_q: cute.Tensor,
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
        self.dsa_index(
            index_q=index_q,
            wk=wk,
            wv=wv,
            index_slots=index_slots,
            index_k_norm=index_k_norm,
            index_k_bias=index_k_bias,
            index_kv=index_kv,
            index_q8=index_q8,
            index_w=index_w,
        ).launch(
            grid=[index_q.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def dsa_index(
        self,
        index_q: cute.Tensor,
        wk: cute.Tensor,
        wv: cute.Tensor,
        index_slots: cute.Tensor,
        index_k_norm: cute.Tensor,
        index_k_bias: cute.Tensor,
        index_kv: cute.Tensor,
        index_q8: cute.Tensor,
        index_w: cute.Tensor,
    ):
        row = cute.arch.block_idx()[0]
        warp = cute.arch.warp_idx()
        if warp < QUERY_WARPS:
            pdl.wait()
            self._quantise_query(
                index_q[row, None], wv[row, None], index_q8[row, None, None], index_w[row, None]
            )
        else:
            lane = cute.arch.lane_idx()
            norm = memory.load_float(index_k_norm, lane, ROW.key_vector)
            bias = memory.load_float(index_k_bias, lane, ROW.key_vector)
            pdl.wait()
            ROW.insert_key(wk[row, None], index_slots[row], norm, bias, index_kv, lane)
            if cutlass.const_expr(self.release):
                bulk.fence_stores()
                cute.arch.sync_warp()
                pdl.release()

    @cute.jit
    def _quantise_query(
        self, query: cute.Tensor, wv: cute.Tensor, codes: cute.Tensor, weights: cute.Tensor
    ):
        """Quantises one row's heads, QUERY_VECTOR elements a thread, HEAD_LANES threads a head."""
        part = cute.arch.thread_idx()[0]
        head = part // HEAD_LANES
        head_lane = part % HEAD_LANES
        head_weight = wv[head].to(Float32)
        q = memory.load_float(query, part, QUERY_VECTOR)
        scale = group_scale(q, HEAD_LANES)
        target = memory.vector_at(codes[head, None], head_lane, QUERY_VECTOR)
        fp8.store_e4m3(q * fp8.inverse_of_power_of_two(scale), target)
        if head_lane == 0:
            weights[head] = ROW.weight(head_weight, scale)
