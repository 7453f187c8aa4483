"""What the oracle returns: every named intermediate of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rounding:
    """Which optional points round to BF16; all others of the layer always do."""

    kv_norm: bool = True
    query_b: bool = True
    absorb: bool = True
    index_query: bool = True
    merged: bool = True
    value: bool = True


@dataclass(frozen=True)
class Result:
    """Every intermediate, float64 unless noted; rows that are not `active` hold zeros.

    active bool [rows]. projected: q_a [rows, q_lora], kv_a [rows, latent], gate
    [rows, heads_total * v_dim], wk [rows, index_dim], wv [rows, index_heads].
    q_c [rows, q_lora]; query [rows, heads_total, latent]: the stored values, E4M3 before q_scale
    for fp8_tensor, BF16 for fp8_ds_mla; query_bf16: the same before the cast.
    new_latent [rows, kv_lora]; latent_bytes uint8 [rows, row_bytes]: the inserted cache rows.
    index_q [rows, index_heads * index_dim]; index_q8 [rows, index_heads, index_dim], E4M3 values;
    index_w [rows, index_heads]; index_key [rows, index_dim] before quantisation; index_bytes
    uint8 [rows, index_dim + 4], key bytes then FP32 scale bytes.
    scores: per row [visible]; kth [rows]: the lowest score that belongs to the top-k; gap [rows]:
    kth minus the next score, inf where nothing is left out. selection: per row ascending int64
    global positions, the caller's where given.
    latent [rows, heads_total, kv_lora] and lse_base2 [rows, heads_total] (-inf without keys).
    partials [ranks, rows, heads_total, kv_lora] and partial_lse [ranks, rows, heads_total] where
    contexts are sharded, else None. values and gated [rows, heads_total * v_dim].
    out [rows, hidden], the unrounded sum over all heads; out_partials [ranks, rows, hidden], BF16
    per rank; out_reduced [rows, hidden], their sum in rank order, rounded once.
    """

    top_k: int
    active: torch.Tensor
    projected: dict[str, torch.Tensor]
    q_c: torch.Tensor
    query: torch.Tensor
    query_bf16: torch.Tensor
    new_latent: torch.Tensor
    latent_bytes: torch.Tensor
    index_q: torch.Tensor
    index_q8: torch.Tensor
    index_w: torch.Tensor
    index_key: torch.Tensor
    index_bytes: torch.Tensor
    scores: list[torch.Tensor]
    kth: torch.Tensor
    gap: torch.Tensor
    selection: list[torch.Tensor]
    latent: torch.Tensor
    lse_base2: torch.Tensor
    partials: torch.Tensor | None
    partial_lse: torch.Tensor | None
    values: torch.Tensor
    gated: torch.Tensor
    out: torch.Tensor
    out_partials: torch.Tensor
    out_reduced: torch.Tensor

    def selection_size(self, row: int) -> int:
        """Keys that the row must select: min(top_k, visible)."""
        return min(self.top_k, self.scores[row].numel())
