"""The DSA decode layer over all heads in float64, from the definition, in one pass per row.

Rounded only where the layer declares it: BF16 after the packed projection, after both norms,
after Q_B, after absorb, after the index GEMM, after attention (per head), after the DCP merge and
after W_UV (whichever comes first), after the gate, and per rank after the o-projection; E4M3 in
the query (per-tensor inverse scale), in the index query and key (power-of-two scale), and in the
cache bytes. Every reduction in between is float64, so that a kernel is measured against one
unambiguous value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from .byte_formats import (
    LATENT_FORMATS,
    decode_index,
    decode_latent,
    encode_index,
    encode_latent,
    quantise_index,
)
from .compare import (
    Bound,
    checked_positions,
    declared_bounds,
    relative_error,
    selection_violation,
)
from .geometry import Geometry
from .inputs import Batch, Weights
from .number_formats import decode_e4m3, round_bf16, round_e4m3
from .result import Result, Rounding

__all__ = [
    "Bound",
    "Result",
    "Rounding",
    "declared_bounds",
    "oracle_layer",
    "relative_error",
    "selection_violation",
]

ALL_ROUNDED = Rounding()
_CHUNK = 2048


def _linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows [n, k] float64 times weight [m, k] of any dtype, transposed; unrounded [n, m]."""
    return torch.cat([rows @ part.double().T for part in weight.split(_CHUNK)], dim=1)


def _rounded(value: torch.Tensor, to_bf16: bool) -> torch.Tensor:
    """The value in BF16 where that point is a rounding point, else as it is."""
    return round_bf16(value) if to_bf16 else value


def _rms_norm(value: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """value * (mean of squares + eps) ** -0.5 * weight over the last dimension, unrounded."""
    return value * (value.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def _layer_norm(
    value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Affine LayerNorm with the biased variance over the last dimension, unrounded."""
    centred = value - value.mean(-1, keepdim=True)
    scaled = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return scaled * weight.double() + bias.double()


def _project(weights: Weights, batch: Batch, active: torch.Tensor) -> dict[str, torch.Tensor]:
    """The packed projection by name, BF16 values; inactive rows are zero whatever they held."""
    hidden = torch.where(active[:, None], batch.hidden.double(), 0.0)
    names = ("q_a", "kv_a", "gate", "wk", "wv")
    return {name: round_bf16(_linear(hidden, getattr(weights, name))) for name in names}


def _attention_query(
    geometry: Geometry, weights: Weights, q_c: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """Absorbed latent query, then pe, [rows, heads_total, latent], before any E4M3 cast."""
    heads = _linear(q_c, weights.q_b).unflatten(1, (geometry.heads_total, geometry.qk_head))
    heads = _rounded(heads, rounding.query_b)
    nope, pe = heads.split([geometry.nope, geometry.pe], dim=2)
    absorbed = torch.bmm(nope.transpose(0, 1), weights.w_uk.double()).transpose(0, 1)
    return torch.cat([_rounded(absorbed, rounding.absorb), round_bf16(pe)], dim=2)


def _per_request(
    batch: Batch, cached: Sequence[torch.Tensor], new: torch.Tensor
) -> list[torch.Tensor]:
    """Byte rows of every request in position order: the cached ones, then its new rows."""
    sequences = []
    for request, old in enumerate(cached):
        rows = range(request * batch.q, (request + 1) * batch.q)
        inserted = [row for row in rows if batch.position(row) >= 0]
        sequences.append(torch.cat([old, new[inserted]]))
    return sequences


def _encode_cached(
    *parts: Sequence[torch.Tensor], encode: Callable[..., torch.Tensor]
) -> list[torch.Tensor]:
    """Encodes all requests' cached tokens in one call and splits them again."""
    counts = [part.shape[0] for part in parts[0]]
    return list(encode(*(torch.cat(list(part)).double() for part in parts)).split(counts))


def _score_rows(
    batch: Batch,
    index_q8: torch.Tensor,
    index_w: torch.Tensor,
    sequences: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Index scores of the visible keys of every row: k_scale * sum_h w_h * relu(q_h . k)."""
    scores = []
    for request, sequence in enumerate(sequences):
        keys, key_scale = decode_index(sequence)
        for row in range(request * batch.q, (request + 1) * batch.q):
            seen = batch.visible(row)
            dots = (index_q8[row] @ keys[:seen].T).clamp(min=0.0)
            scores.append((index_w[row] @ dots) * key_scale[:seen])
    return scores


def _exact_selection(scores: torch.Tensor, top_k: int) -> tuple[torch.Tensor, float, float]:
    """Top-k positions (ascending, ties to the lower id), k-th score, gap to the next score."""
    order = scores.argsort(descending=True, stable=True)
    kept = order[:top_k]
    if not kept.numel():
        return kept, -math.inf, math.inf
    kth = float(scores[kept[-1]])
    left = order.numel() > top_k
    gap = kth - float(scores[order[top_k]]) if left else math.inf
    return kept.sort().values, kth, gap


def _attend(
    query: torch.Tensor, keys: torch.Tensor, kv_lora: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unrounded softmax(scale * q.k) over keys [n, latent], and its base-2 LSE.

    Without keys: zeros and -inf.
    """
    if keys.shape[0] == 0:
        empty = torch.full((query.shape[0],), -torch.inf, dtype=torch.float64)
        return torch.zeros(query.shape[0], kv_lora, dtype=torch.float64), empty
    logits = scale * (query @ keys.T)
    lse = logits.logsumexp(dim=1)
    return (logits - lse[:, None]).exp() @ keys[:, :kv_lora], lse / math.log(2.0)


def _merge(partials: torch.Tensor, partial_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum over ranks [ranks, ..., kv_lora] by exp2(lse - max), and the joint LSE."""
    top = partial_lse.amax(dim=0)
    shift = torch.where(top.isinf(), 0.0, top)
    weight = torch.exp2(partial_lse - shift)
    total = weight.sum(dim=0)
    share = torch.where(total > 0, weight / total, 0.0)
    return (share[..., None] * partials).sum(dim=0), total.log2() + shift


def _attention(
    geometry: Geometry,
    batch: Batch,
    query: torch.Tensor,
    keys: list[torch.Tensor],
    selection: list[torch.Tensor],
    shards: tuple[int, int],
    rounding: Rounding,
) -> dict[str, torch.Tensor | None]:
    """Attention of every row over its selection, on each of the `shards` = (ranks, interleave)."""
    ranks, interleave = shards
    parts = torch.zeros(ranks, *query.shape[:2], geometry.kv_lora, dtype=torch.float64)
    lse = torch.full((ranks, *query.shape[:2]), -torch.inf, dtype=torch.float64)
    for row, positions in enumerate(selection):
        owner = (positions // interleave) % ranks
        for rank in range(ranks):
            chosen = keys[row // batch.q][positions[owner == rank]]
            part = _attend(query[row], chosen, geometry.kv_lora, geometry.softmax_scale)
            parts[rank, row], lse[rank, row] = part
    parts = round_bf16(parts)
    if shards == (1, 1):
        return {"latent": parts[0], "lse_base2": lse[0], "partials": None, "partial_lse": None}
    merged, joint = _merge(parts, lse)
    merged = _rounded(merged, rounding.merged)
    return {"latent": merged, "lse_base2": joint, "partials": parts, "partial_lse": lse}


def _values(
    weights: Weights, core: dict[str, torch.Tensor | None], rounding: Rounding, sends_values: bool
) -> torch.Tensor:
    """W_UV of every head, [rows, heads_total * v_dim]: of the merged rows, or of each rank's rows
    ahead of the merge (the same for one rank)."""
    up = weights.w_uv.double().transpose(1, 2)

    def of(rows: torch.Tensor) -> torch.Tensor:
        values = torch.bmm(rows.transpose(0, 1), up).transpose(0, 1)
        return _rounded(values, rounding.value)

    if not sends_values or core["partials"] is None:
        return of(core["latent"]).flatten(1)
    sent = torch.stack([of(rows) for rows in core["partials"]])
    merged, _ = _merge(sent, core["partial_lse"])
    return _rounded(merged, rounding.merged).flatten(1)


def _value_stage(
    geometry: Geometry, weights: Weights, values: torch.Tensor, gate: torch.Tensor, tp: int
) -> dict[str, torch.Tensor]:
    """The gate of every head, then the o-projection: exact, per rank, and summed."""
    gated = round_bf16(values * gate.sigmoid())
    width = geometry.heads(tp) * geometry.v_dim
    columns = zip(gated.split(width, 1), weights.o_proj.split(width, 1), strict=True)
    exact = torch.stack([_linear(heads, weight) for heads, weight in columns])
    partials = round_bf16(exact)
    reduced = torch.zeros_like(exact[0])
    for partial in partials:
        reduced = reduced + partial
    return {
        "values": values,
        "gated": gated,
        "out": exact.sum(dim=0),
        "out_partials": partials,
        "out_reduced": round_bf16(reduced),
    }


def _select(
    batch: Batch,
    scores: list[torch.Tensor],
    top_k: int,
    given: Sequence[Iterable[int] | torch.Tensor] | None,
) -> dict[str, object]:
    """The selection to continue with, and the oracle's own k-th score and gap of every row."""
    own = [_exact_selection(row, top_k) for row in scores]
    kth, gap = torch.tensor([[o[1], o[2]] for o in own], dtype=torch.float64).T
    if given is None:
        return {"selection": [o[0] for o in own], "kth": kth, "gap": gap}
    if len(given) != batch.rows:
        raise ValueError(f"selection has {len(given)} rows, the batch has {batch.rows}")
    chosen = [checked_positions(row, batch.visible(r)) for r, row in enumerate(given)]
    return {"selection": chosen, "kth": kth, "gap": gap}


def _query_stage(
    geometry: Geometry,
    weights: Weights,
    q_a: torch.Tensor,
    cache_format: str,
    rounding: Rounding,
) -> dict[str, torch.Tensor]:
    """q_c, the query before its cast, and the query as it is stored."""
    q_c = round_bf16(_rms_norm(q_a, weights.q_norm, geometry.rms_eps))
    query = query_bf16 = _attention_query(geometry, weights, q_c, rounding)
    if cache_format == "fp8_tensor":
        query = round_e4m3(query_bf16 * float(weights.q_scale_inv))
    return {"q_c": q_c, "query": query, "query_bf16": query_bf16}


def _insert_stage(
    geometry: Geometry,
    weights: Weights,
    batch: Batch,
    kv_a: torch.Tensor,
    cache_format: str,
    rounding: Rounding,
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The rows inserted this step, and every request's keys as attention reads them."""
    k_scale_inv = float(weights.k_scale_inv)

    def encode(latent: torch.Tensor, pe: torch.Tensor) -> torch.Tensor:
        return encode_latent(geometry, cache_format, latent, pe, k_scale_inv)

    latent, pe = kv_a.split([geometry.kv_lora, geometry.pe], dim=1)
    normed = _rms_norm(latent, weights.kv_norm, geometry.rms_eps)
    new_latent = _rounded(normed, rounding.kv_norm)
    latent_bytes = encode(new_latent, pe)
    cached = _encode_cached(batch.cached_latent, batch.cached_pe, encode=encode)
    keys = [
        decode_latent(geometry, cache_format, sequence, float(weights.k_scale))
        for sequence in _per_request(batch, cached, latent_bytes)
    ]
    return {"new_latent": new_latent, "latent_bytes": latent_bytes}, keys


def _index_stage(
    geometry: Geometry,
    weights: Weights,
    batch: Batch,
    projected: dict[str, torch.Tensor],
    q_c: torch.Tensor,
    rounding: Rounding,
    index_quant: str,
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Index query, head weights and inserted keys; the scores of every row's visible keys."""

    def encode(key: torch.Tensor) -> torch.Tensor:
        return encode_index(key, index_quant)

    index_q = _rounded(_linear(q_c, weights.index_q_b), rounding.index_query)
    split = index_q.unflatten(1, (geometry.index_heads, geometry.index_dim))
    stored, scale = quantise_index(split, index_quant)
    index_q8 = decode_e4m3(stored)
    index_w = projected["wv"] * scale * geometry.index_scale
    norm = (weights.index_k_norm, weights.index_k_bias, geometry.index_eps)
    index_key = _layer_norm(projected["wk"], *norm)
    index_bytes = encode(index_key)
    cached = _encode_cached(batch.cached_index, encode=encode)
    sequences = _per_request(batch, cached, index_bytes)
    named = {
        "index_q": index_q,
        "index_q8": index_q8,
        "index_w": index_w,
        "index_key": index_key,
        "index_bytes": index_bytes,
    }
    return named, _score_rows(batch, index_q8, index_w, sequences)


def oracle_layer(
    geometry: Geometry,
    weights: Weights,
    batch: Batch,
    *,
    cache_format: str,
    selection: Sequence[Iterable[int] | torch.Tensor] | None = None,
    tp: int = 1,
    interleave: int | None = None,
    rounding: Rounding = ALL_ROUNDED,
    index_quant: str = "ue8m0",
    sends_values: bool = False,
) -> Result:
    """Evaluates one layer for one batch.

    `tp` ranks split the heads; with `interleave` they split the contexts too, in chunks of that
    many positions, and round each rank's row before the merge; with `sends_values` its row behind
    W_UV as well, and values are merged in place of latents. With `selection` (global positions
    per row) attention continues from it; scores, kth and gap stay the oracle's own. Raises
    ValueError for an unknown cache format or quantiser, ranks that do not divide the heads, a
    selection with a repeated or invisible position, or `sends_values` without `interleave`.
    """
    if sends_values and interleave is None:
        raise ValueError("values are sent ahead of a merge, and without `interleave` there is none")
    if cache_format not in LATENT_FORMATS:
        raise ValueError(f"unknown latent cache format {cache_format!r}")
    geometry.heads(tp)
    active = torch.tensor([batch.visible(row) > 0 for row in range(batch.rows)])
    projected = _project(weights, batch, active)
    query = _query_stage(geometry, weights, projected["q_a"], cache_format, rounding)
    inserted, keys = _insert_stage(
        geometry, weights, batch, projected["kv_a"], cache_format, rounding
    )
    index, scores = _index_stage(
        geometry, weights, batch, projected, query["q_c"], rounding, index_quant
    )
    chosen = _select(batch, scores, geometry.top_k, selection)

    scaled = query["query"] * (float(weights.q_scale) if cache_format == "fp8_tensor" else 1.0)
    shards = (1, 1) if interleave is None else (tp, interleave)
    core = _attention(geometry, batch, scaled, keys, chosen["selection"], shards, rounding)
    values = _values(weights, core, rounding, sends_values)
    value = _value_stage(geometry, weights, values, projected["gate"], tp)
    return Result(
        top_k=geometry.top_k,
        active=active,
        projected=projected,
        scores=scores,
        **chosen,
        **query,
        **inserted,
        **index,
        **core,
        **value,
    )
