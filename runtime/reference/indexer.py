"""Indexer: quantised index query and key, head weights, scores of the visible keys."""

from __future__ import annotations

import torch
from torch import Tensor

from kpipe.runtime.formats import PagedCache
from kpipe.runtime.sharding import Shard

from .numerics import layer_norm, product, quantise_index, rms_norm
from .rows import UNSHARDED, local_counts


def dsa_index(
    index_q: Tensor,
    wk: Tensor,
    wv: Tensor,
    index_slots: Tensor,
    index_kv: PagedCache,
    index_q8: Tensor,
    index_w: Tensor,
    *,
    index_k_norm: Tensor,
    index_k_bias: Tensor,
    index_eps: float,
    index_heads: int,
    index_dim: int,
    index_quant: str = "ue8m0",
) -> None:
    """Operands of the scores: key into the cache, E4M3 query, head weights with all scales.

    index_q [rows, index_heads * index_dim] BF16, wk [rows, index_dim] BF16,
    wv [rows, index_heads] BF16, index_slots [rows] i64 (negative: skip), norm weight and bias
    FP32 [index_dim]; writes index_q8 [rows, index_heads, index_dim] E4M3 and index_w
    [rows, index_heads] FP32 = wv * query scale * index_dim^-0.5 * index_heads^-0.5.
    The factors are positive, so the ReLU of the score commutes with them.
    """
    key = layer_norm(wk, index_k_norm, index_k_bias, index_eps)
    values, scale = quantise_index(key, index_quant)
    index_kv.insert(index_slots, key=values, scale=scale.unsqueeze(1))
    heads = index_q.reshape(index_q.shape[0], index_heads, index_dim)
    values, scale = quantise_index(heads, index_quant)
    index_q8.copy_(values)
    index_w.copy_((wv.float() * scale) * (index_dim**-0.5 * index_heads**-0.5))


def index_front(
    wk: Tensor,
    wv: Tensor,
    index_slots: Tensor,
    index_kv: PagedCache,
    index_q8: Tensor,
    index_w: Tensor,
    *,
    q_a: Tensor | None = None,
    q_c: Tensor | None = None,
    q_norm: Tensor,
    index_q_b: Tensor,
    index_k_norm: Tensor,
    index_k_bias: Tensor,
    rms_eps: float,
    index_eps: float,
    index_heads: int,
    index_dim: int,
    index_quant: str = "ue8m0",
    normalized: bool = False,
) -> None:
    """query_norm, index_gemm and dsa_index, with the index query kept in FP32 between them.

    With `normalized` reads q_c [rows, q_lora] BF16, otherwise q_a, which it normalises to the
    same bits.  index_q_b [index_heads * index_dim, q_lora]; the rest as in dsa_index.
    """
    normed = q_c if normalized else rms_norm(q_a, q_norm, rms_eps).bfloat16()
    dsa_index(
        product(normed, index_q_b),
        wk,
        wv,
        index_slots,
        index_kv,
        index_q8,
        index_w,
        index_k_norm=index_k_norm,
        index_k_bias=index_k_bias,
        index_eps=index_eps,
        index_heads=index_heads,
        index_dim=index_dim,
        index_quant=index_quant,
    )


def index_scores(
    index_q8: Tensor,
    index_w: Tensor,
    index_kv: PagedCache,
    index_table: Tensor,
    lengths: Tensor,
    scores: Tensor,
    *,
    shard: Shard = UNSHARDED,
) -> None:
    """score_j = k_scale_j * sum_h w_h * relu(q_h . k_j) of the keys visible on this rank, FP32.

    index_q8 [rows, index_heads, index_dim] E4M3, index_w [rows, index_heads] FP32, index_table
    [requests, index_pages] i32 over local positions, lengths [requests] i32 (global), scores
    [rows, context] FP32.  Columns past the row's visible length keep what they hold.  A key's
    score depends on nothing but query and key, bit for bit, wherever the key is stored.
    Raises ValueError where a row sees more keys than scores has columns.
    """
    counts = local_counts(lengths, scores.shape[0], shard).tolist()
    if max(counts) > scores.shape[1]:
        raise ValueError(f"a row sees {max(counts)} keys, scores has {scores.shape[1]} columns")
    queries = scores.shape[0] // lengths.numel()
    for request in range(lengths.numel()):
        rows = slice(request * queries, (request + 1) * queries)
        longest = max(counts[rows])
        if longest == 0:
            continue
        positions = torch.arange(longest, device=scores.device)
        keys = index_kv.gather(index_kv.physical_rows(index_table[request], positions))
        values = _scored(index_q8[rows], index_w[rows], keys["key"], keys["scale"].flatten())
        for row, count in enumerate(counts[rows]):
            scores[rows.start + row, :count] = values[row, :count]


def _scored(query: Tensor, weight: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    """FP32 scores [queries, keys].

    Products of E4M3 values and their sums over index_dim are exact in float64, so one rounding to
    FP32 gives a dot product that no summation order can change.  Heads add up in ascending order.
    """
    queries, heads, dim = query.shape
    dots = query.reshape(-1, dim).double() @ key.double().t()
    positive = torch.relu(dots.float()).reshape(queries, heads, -1)
    total = weight[:, 0, None] * positive[:, 0]
    for head in range(1, heads):
        total = total + weight[:, head, None] * positive[:, head]
    return total * scale
