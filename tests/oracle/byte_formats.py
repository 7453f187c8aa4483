"""Bytes of one cached token in each cache format, and back to the values that a reader sees.

fp8_tensor  kv_lora E4M3, then pe E4M3, all multiplied by k_scale_inv before the cast.
fp8_ds_mla  kv_lora E4M3, one FP32 power-of-two scale per 128 values, then pe BF16 unscaled.
index_fp8   index_dim E4M3 and one FP32 power-of-two scale; a page holds all its keys first, then
            all its scales, so a token's bytes are not contiguous there.
"""

from __future__ import annotations

import torch

from .geometry import Geometry
from .number_formats import (
    E4M3_MAX,
    E4M3_NAN,
    decode_e4m3,
    encode_e4m3,
    power_of_two_at_least,
    round_bf16,
    ue8m0_scale,
)

LATENT_FORMATS = ("fp8_tensor", "fp8_ds_mla")
GROUP = 128
_INDEX_FLOORS = {"ue8m0": 1e-4, "ue8m0_bf16": 1e-10}


def row_bytes(geometry: Geometry, cache_format: str) -> int:
    """Bytes per token. Raises ValueError for an unknown format or a kv_lora without groups."""
    if cache_format == "fp8_tensor":
        return geometry.latent
    if cache_format == "fp8_ds_mla":
        if geometry.kv_lora % GROUP:
            raise ValueError(
                f"fp8_ds_mla needs kv_lora in groups of {GROUP}, got {geometry.kv_lora}"
            )
        return geometry.kv_lora + 4 * (geometry.kv_lora // GROUP) + 2 * geometry.pe
    if cache_format == "index_fp8":
        return geometry.index_dim + 4
    raise ValueError(f"unknown cache format {cache_format!r}")


def unused_row(geometry: Geometry, cache_format: str) -> torch.Tensor:
    """Bytes of a token that nobody wrote: every field decodes to NaN. uint8 [row_bytes]."""
    row = torch.full((row_bytes(geometry, cache_format),), 0xFF, dtype=torch.uint8)
    fp8 = {"fp8_tensor": geometry.latent, "fp8_ds_mla": geometry.kv_lora}
    row[: fp8.get(cache_format, geometry.index_dim)] = E4M3_NAN
    return row


def _bytes_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Little-endian bytes of the last dimension in a dtype that holds the values exactly."""
    return values.to(dtype).contiguous().view(torch.uint8)


def encode_latent(
    geometry: Geometry,
    cache_format: str,
    latent: torch.Tensor,
    pe: torch.Tensor,
    k_scale_inv: float,
) -> torch.Tensor:
    """Cache rows, uint8 [n, row_bytes], of latent [n, kv_lora] and pe [n, pe] (float64 values).

    k_scale_inv is used by fp8_tensor only. Raises ValueError as `row_bytes` does.
    """
    row_bytes(geometry, cache_format)
    if cache_format == "fp8_tensor":
        return encode_e4m3(torch.cat([latent, pe], dim=-1).double() * k_scale_inv)
    groups = latent.double().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(dim=-1)
    scale = power_of_two_at_least((amax / E4M3_MAX).clamp(min=1e-4))
    values = encode_e4m3(groups / scale[..., None]).flatten(-2)
    tail = (_bytes_of(scale, torch.float32), _bytes_of(round_bf16(pe), torch.bfloat16))
    return torch.cat([values, *tail], dim=-1)


def decode_latent(
    geometry: Geometry, cache_format: str, rows: torch.Tensor, k_scale: float
) -> torch.Tensor:
    """Keys that attention sees, float64 [n, latent], from cache rows uint8 [n, row_bytes]."""
    width = row_bytes(geometry, cache_format)
    if cache_format == "fp8_tensor":
        return decode_e4m3(rows) * k_scale
    scales_end = width - 2 * geometry.pe
    values = decode_e4m3(rows[..., : geometry.kv_lora]).unflatten(-1, (-1, GROUP))
    scale = rows[..., geometry.kv_lora : scales_end].contiguous().view(torch.float32).double()
    pe = rows[..., scales_end:].contiguous().view(torch.bfloat16).double()
    return torch.cat([(values * scale[..., None]).flatten(-2), pe], dim=-1)


def quantise_index(
    values: torch.Tensor, index_quant: str = "ue8m0"
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 bytes uint8 [..., index_dim] and power-of-two scale float64 [...] of index vectors.

    "ue8m0" floors amax at 1e-4; "ue8m0_bf16" rounds the input to BF16 first and floors at 1e-10.
    Raises ValueError for any other quantiser.
    """
    if index_quant not in _INDEX_FLOORS:
        raise ValueError(f"unknown index quantiser {index_quant!r}")
    values = round_bf16(values) if index_quant == "ue8m0_bf16" else values.double()
    scale = ue8m0_scale(values, _INDEX_FLOORS[index_quant])
    return encode_e4m3(values / scale[..., None]), scale


def encode_index(values: torch.Tensor, index_quant: str = "ue8m0") -> torch.Tensor:
    """Token-contiguous form of index keys [n, index_dim]: E4M3 bytes, then the FP32 scale."""
    key, scale = quantise_index(values, index_quant)
    return torch.cat([key, _bytes_of(scale[..., None], torch.float32)], dim=-1)


def decode_index(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values float64 [n, index_dim] and scales float64 [n] of token-contiguous rows."""
    scale = rows[..., -4:].contiguous().view(torch.float32).double()
    return decode_e4m3(rows[..., :-4]), scale[..., 0]
