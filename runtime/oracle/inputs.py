"""Seeded inputs of a DSA layer: global weights, their rank slices, and a batch of requests."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

import torch

from .geometry import Geometry

Q_SCALE = 0.021
K_SCALE = 0.013


@dataclass(frozen=True)
class Weights:
    """One layer's weights over all heads, BF16 unless noted, rows = outputs.

    q_a [q_lora, hidden], kv_a [latent, hidden], gate [heads_total * v_dim, hidden],
    wk [index_dim, hidden], wv [index_heads, hidden], q_norm [q_lora], kv_norm [kv_lora],
    q_b [heads_total * qk_head, q_lora] (per head nope rows, then pe rows),
    w_uk [heads_total, nope, kv_lora], w_uv [heads_total, v_dim, kv_lora],
    index_q_b [index_heads * index_dim, q_lora], index_k_norm and index_k_bias [index_dim] FP32,
    o_proj [hidden, heads_total * v_dim], q_scale and k_scale FP32 [1].
    """

    q_a: torch.Tensor
    kv_a: torch.Tensor
    gate: torch.Tensor
    wk: torch.Tensor
    wv: torch.Tensor
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    q_b: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    index_q_b: torch.Tensor
    index_k_norm: torch.Tensor
    index_k_bias: torch.Tensor
    o_proj: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor

    @property
    def q_scale_inv(self) -> torch.Tensor:
        """FP32 [1], the rounded reciprocal that a kernel multiplies by."""
        return self.q_scale.reciprocal()

    @property
    def k_scale_inv(self) -> torch.Tensor:
        """FP32 [1], the rounded reciprocal that a kernel multiplies by."""
        return self.k_scale.reciprocal()


@dataclass(frozen=True)
class RankWeights:
    """What one of `ranks` tensor-parallel ranks holds: its heads, and everything shared.

    packed [pitch, hidden] with the columns of `Geometry.columns(ranks)`, o_proj
    [hidden, heads * v_dim]; per-head tensors keep the layout of `Weights`; scales FP32 [1].
    """

    packed: torch.Tensor
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    q_b: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    index_q_b: torch.Tensor
    index_k_norm: torch.Tensor
    index_k_bias: torch.Tensor
    o_proj: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    q_scale_inv: torch.Tensor
    k_scale_inv: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """Requests of one step: `q` query rows each, already counted in `lengths`.

    Row r belongs to request r // q, stands at global position lengths - q + r % q and sees the
    keys up to and including its own. A row at a negative position is inactive.
    hidden [rows, hidden] BF16. Cached tensors hold positions [0, max(length - q, 0)) of every
    request: latent [n, kv_lora] and pe [n, pe] BF16, index keys [n, index_dim] BF16.
    """

    q: int
    lengths: tuple[int, ...]
    hidden: torch.Tensor
    cached_latent: tuple[torch.Tensor, ...]
    cached_pe: tuple[torch.Tensor, ...]
    cached_index: tuple[torch.Tensor, ...]

    @property
    def requests(self) -> int:
        """Number of requests, padded ones included."""
        return len(self.lengths)

    @property
    def rows(self) -> int:
        """Number of query rows."""
        return self.q * self.requests

    def position(self, row: int) -> int:
        """Global position of the token that the row inserts; negative for an inactive row."""
        return self.lengths[row // self.q] - self.q + row % self.q

    def visible(self, row: int) -> int:
        """Number of keys that the row sees, over all ranks."""
        return max(self.position(row) + 1, 0)

    def lengths_tensor(self) -> torch.Tensor:
        """int32 [requests], new rows included."""
        return torch.tensor(self.lengths, dtype=torch.int32)


def _normal(generator: torch.Generator, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
    """FP32 normal values of the seeded generator."""
    return torch.empty(shape).normal_(mean, std, generator=generator)


def make_weights(geometry: Geometry, seed: int = 0) -> Weights:
    """Random weights, scaled so that every intermediate has a variance near one."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return _normal(generator, *shape, std=shape[-1] ** -0.5).bfloat16()

    heads = geometry.heads_total
    w_uk = _normal(generator, heads, geometry.nope, geometry.kv_lora, std=geometry.nope**-0.5)
    return Weights(
        q_a=matrix(geometry.q_lora, geometry.hidden),
        kv_a=matrix(geometry.latent, geometry.hidden),
        gate=matrix(heads * geometry.v_dim, geometry.hidden),
        wk=matrix(geometry.index_dim, geometry.hidden),
        wv=matrix(geometry.index_heads, geometry.hidden),
        q_norm=_normal(generator, geometry.q_lora, std=0.1, mean=1.0).bfloat16(),
        kv_norm=_normal(generator, geometry.kv_lora, std=0.1, mean=1.0).bfloat16(),
        q_b=matrix(heads * geometry.qk_head, geometry.q_lora),
        w_uk=w_uk.bfloat16(),
        w_uv=matrix(heads, geometry.v_dim, geometry.kv_lora),
        index_q_b=matrix(geometry.index_heads * geometry.index_dim, geometry.q_lora),
        index_k_norm=_normal(generator, geometry.index_dim, std=0.1, mean=1.0),
        index_k_bias=_normal(generator, geometry.index_dim, std=0.1),
        o_proj=matrix(geometry.hidden, heads * geometry.v_dim),
        q_scale=torch.tensor([Q_SCALE]),
        k_scale=torch.tensor([K_SCALE]),
    )


def rank_weights(geometry: Geometry, weights: Weights, rank: int, ranks: int) -> RankWeights:
    """The rank's slice: heads [rank * h, (rank + 1) * h) of every per-head tensor, contiguous.

    Raises ValueError when the ranks do not divide the heads or the rank is out of range.
    """
    heads = geometry.heads(ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks}")
    first, last = rank * heads, (rank + 1) * heads
    gate = weights.gate[first * geometry.v_dim : last * geometry.v_dim]
    columns = (weights.q_a, weights.kv_a, gate, weights.wk, weights.wv)
    return RankWeights(
        packed=torch.cat(columns).contiguous(),
        q_norm=weights.q_norm,
        kv_norm=weights.kv_norm,
        q_b=weights.q_b[first * geometry.qk_head : last * geometry.qk_head].contiguous(),
        w_uk=weights.w_uk[first:last].contiguous(),
        w_uv=weights.w_uv[first:last].contiguous(),
        index_q_b=weights.index_q_b,
        index_k_norm=weights.index_k_norm,
        index_k_bias=weights.index_k_bias,
        o_proj=weights.o_proj[:, first * geometry.v_dim : last * geometry.v_dim].contiguous(),
        q_scale=weights.q_scale,
        k_scale=weights.k_scale,
        q_scale_inv=weights.q_scale_inv,
        k_scale_inv=weights.k_scale_inv,
    )


def handed_weights(
    geometry: Geometry, weights: Weights, rank: int, ranks: int, wanted: Collection[str]
) -> dict[str, torch.Tensor]:
    """What an engine hands the rank of a layer that declares `wanted`, by name.

    Scales and not their inverses; W_UV of the rank's heads, or of all heads.
    """
    held = rank_weights(geometry, weights, rank, ranks)
    names = [field.name for field in fields(held) if not field.name.endswith("_inv")]
    tensors = {name: getattr(held, name) for name in names}
    if "w_uv_all" in wanted:
        tensors["w_uv_all"] = weights.w_uv
    return {n: t for n, t in tensors.items() if n != "w_uv" or n in wanted}


def make_batch(
    geometry: Geometry,
    lengths: list[int] | tuple[int, ...],
    q: int,
    seed: int = 1,
    poison_inactive: bool = True,
    distinct_keys: int = 0,
) -> Batch:
    """Random hidden states and cached tokens; length 0 is a padded request.

    Hidden states of inactive rows are NaN if `poison_inactive`. With `distinct_keys` the cached
    index keys of a request repeat after that many positions, so that scores tie. Raises ValueError
    for q < 1 or a negative length.
    """
    if q < 1 or any(length < 0 for length in lengths):
        raise ValueError(f"need q >= 1 and lengths >= 0, got q={q}, lengths={list(lengths)}")
    generator = torch.Generator().manual_seed(seed)
    counts = [max(length - q, 0) for length in lengths]

    def cached(width: int) -> tuple[torch.Tensor, ...]:
        return _normal(generator, sum(counts), width, std=1.0).bfloat16().split(counts)

    hidden = _normal(generator, q * len(lengths), geometry.hidden, std=1.0).bfloat16()
    batch = Batch(
        q=q,
        lengths=tuple(lengths),
        hidden=hidden,
        cached_latent=cached(geometry.kv_lora),
        cached_pe=cached(geometry.pe),
        cached_index=cached(geometry.index_dim),
    )
    if distinct_keys:
        for keys in batch.cached_index:
            keys.copy_(keys[torch.arange(len(keys)) % distinct_keys])
    if poison_inactive:
        hidden[[row for row in range(batch.rows) if batch.visible(row) == 0]] = torch.nan
    return batch
