"""Numerics shared by the reference operations: rounding points, quantisers, norms, products.

A result of one row never depends on the other rows nor on how many there are, bit for bit: a
product runs in blocks of a fixed number of rows (libraries pick another summation order for
another shape), sums of a row run alone, and transcendental functions go through float64
(vectorised and scalar float32 paths may differ in the last bit).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
ROW_BLOCK = 8
SIGMOIDS = ("exact", "refined", "fast")

_INDEX_FLOOR = {"ue8m0": 1e-4, "ue8m0_bf16": 1e-10}
_DS_MLA_FLOOR = 1e-4


@dataclass(frozen=True)
class Rounds:
    """Where an intermediate is rounded to BF16 ("bf16") or stays as accumulated ("fp32").

    `kv_norm`: normed latent ahead of the cache's quantiser.  `query_b`: output of Q_B.  `absorb`:
    query times W_UK.  `merged`: merged rows of the ranks.  `value`: output of W_UV (of
    the merged rows or, where rows travel behind it, of each rank's).
    Raises ValueError for another word.
    """

    kv_norm: str = "bf16"
    query_b: str = "bf16"
    absorb: str = "bf16"
    merged: str = "bf16"
    value: str = "bf16"

    def __post_init__(self) -> None:
        for point in fields(self):
            if getattr(self, point.name) not in ("bf16", "fp32"):
                raise ValueError(
                    f"rounds.{point.name} is {getattr(self, point.name)!r}; known are bf16, fp32"
                )


def rounded(value: Tensor, point: str = "bf16") -> Tensor:
    """FP32 `value`, rounded to BF16 and back where `point` is "bf16"."""
    return value.bfloat16().float() if point == "bf16" else value


def to_e4m3(value: Tensor) -> Tensor:
    """E4M3, round to nearest even, saturating at +-448; every NaN becomes 0x7F, never 0xFF."""
    clamped = value.float().clamp(-E4M3_MAX, E4M3_MAX)
    return torch.where(torch.isnan(clamped), torch.nan, clamped).to(E4M3)


def ceil_power_of_two(value: Tensor) -> Tensor:
    """Least power of two >= a positive normal FP32 value, exactly (works on the exponent bits)."""
    bits = value.float().contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def quantise_index(value: Tensor, index_quant: str = "ue8m0") -> tuple[Tensor, Tensor]:
    """Indexer quantiser: E4M3 values like `value` and FP32 scales without its last dimension.

    scale = max(amax, floor) / 448 rounded up to a power of two, value = x / scale.  "ue8m0" has
    floor 1e-4; "ue8m0_bf16" rounds x to BF16 first and has floor 1e-10.  A NaN in a row makes its
    values NaN.  Raises ValueError for another word.
    """
    if index_quant not in _INDEX_FLOOR:
        raise ValueError(f"index_quant is {index_quant!r}; known are {', '.join(_INDEX_FLOOR)}")
    value = rounded(value.float(), "bf16" if index_quant == "ue8m0_bf16" else "fp32")
    largest = _largest(value).clamp(min=_INDEX_FLOOR[index_quant])
    scale = ceil_power_of_two(largest / E4M3_MAX)
    return to_e4m3(value / scale.unsqueeze(-1)), scale


def quantise_groups(value: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """fp8_ds_mla quantiser: E4M3 [rows, n] and FP32 power-of-two scales [rows, n / group].

    scale = max(amax / 448, 1e-4) rounded up to a power of two, value = x / scale.
    """
    groups = value.float().unflatten(-1, (-1, group))
    scale = ceil_power_of_two((_largest(groups) / E4M3_MAX).clamp(min=_DS_MLA_FLOOR))
    return to_e4m3(groups / scale.unsqueeze(-1)).flatten(-2), scale


def _largest(value: Tensor) -> Tensor:
    """Largest magnitude of the last dimension; NaN counts as 0, so that scales stay finite."""
    largest = torch.nan_to_num(value.abs(), nan=0.0, posinf=torch.finfo(torch.float32).max)
    return largest.amax(-1)


def row_sums(value: Tensor) -> Tensor:
    """FP32 sum of every row of [rows, n], each on its own."""
    return torch.stack([row.sum() for row in value.float().contiguous()])


def rms_norm(value: Tensor, weight: Tensor, eps: float) -> Tensor:
    """FP32 (x * rsqrt(mean(x^2) + eps)) * weight of [rows, n]; the caller rounds."""
    value = value.float()
    scale = torch.rsqrt(row_sums(value * value) / value.shape[1] + eps)
    return (value * scale.unsqueeze(1)) * weight.float()


def layer_norm(value: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """FP32 LayerNorm with weight and bias of [rows, n]; the caller rounds."""
    value = value.float()
    centred = value - (row_sums(value) / value.shape[1]).unsqueeze(1)
    scale = torch.rsqrt(row_sums(centred * centred) / value.shape[1] + eps)
    return centred * scale.unsqueeze(1) * weight.float() + bias.float()


def product(value: Tensor, weight: Tensor) -> Tensor:
    """FP32 `value @ weight^T`: [rows, k] x [n, k] -> [rows, n], row by row reproducible."""
    # Fresh copies start on an allocation boundary: the summation order may follow alignment.
    columns = weight.float().contiguous().t()
    out = value.new_empty((value.shape[0], weight.shape[0]), dtype=torch.float32)
    for start in range(0, value.shape[0], ROW_BLOCK):
        rows = value[start : start + ROW_BLOCK].float()
        block = rows.new_zeros((ROW_BLOCK, value.shape[1]))
        block[: rows.shape[0]] = rows
        out[start : start + ROW_BLOCK] = torch.mm(block, columns)[: rows.shape[0]]
    return out


def head_product(value: Tensor, weight: Tensor) -> Tensor:
    """FP32 per-head product: [rows, heads, k] x [heads, n, k] -> [rows, heads, n].

    A head's result does not depend on how many heads there are.
    """
    heads = [product(value[:, head], weight[head]) for head in range(weight.shape[0])]
    return torch.stack(heads, dim=1)


def sigmoid(value: Tensor, mode: str = "exact") -> Tensor:
    """FP32 sigmoid; the three kernel modes approximate the same function.

    Raises ValueError for another mode.
    """
    if mode not in SIGMOIDS:
        raise ValueError(f"sigmoid is {mode!r}; known are {', '.join(SIGMOIDS)}")
    return torch.sigmoid(value.double()).float()
