"""The oracle's number and byte formats: hand-written values, and torch's where it has them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kpipe.runtime.oracle.byte_formats import (
    LATENT_FORMATS,
    decode_index,
    decode_latent,
    encode_index,
    encode_latent,
    quantise_index,
    row_bytes,
    unused_row,
)
from kpipe.runtime.oracle.geometry import KIMI_K31, SMALL
from kpipe.runtime.oracle.number_formats import (
    E4M3_VALUES,
    decode_e4m3,
    encode_e4m3,
    power_of_two_at_least,
    round_bf16,
    round_e4m3,
)

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def test_e4m3_table_is_torchs_for_all_bytes() -> None:
    expected = ALL_BYTES.view(torch.float8_e4m3fn).double()
    torch.testing.assert_close(decode_e4m3(ALL_BYTES), expected, rtol=0, atol=0, equal_nan=True)


def test_e4m3_encoding_inverts_the_table_and_rounds_like_torch() -> None:
    canonical = torch.where(ALL_BYTES == 0xFF, 0x7F, ALL_BYTES)
    assert torch.equal(encode_e4m3(E4M3_VALUES), canonical)
    finite = E4M3_VALUES[:0x7F]
    ties = (finite[1:] + finite[:-1]) / 2
    probes = torch.cat([ties, -ties, ties * (1 + 1e-6), ties * (1 - 1e-6), finite]).float()
    expected = probes.to(torch.float8_e4m3fn)
    assert torch.equal(encode_e4m3(probes), expected.view(torch.uint8))
    assert torch.equal(round_e4m3(probes), expected.double())


def test_e4m3_saturates_and_keeps_nan_off_the_byte_ff() -> None:
    values = torch.tensor([449.0, 1e30, math.inf, -math.inf, math.nan, -1e-9])
    assert encode_e4m3(values).tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x80]


def test_bf16_rounding_is_torchs_from_fp32_but_single_from_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    expected = values.bfloat16().double()
    got = round_bf16(values.double())
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    above_tie = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert round_bf16(above_tie).item() == 1 + 2.0**-7  # through FP32 this would be a tie: 1.0


def test_ue8m0_covers_every_exponent_as_the_bit_trick_does() -> None:
    codes = torch.arange(1, 254, dtype=torch.int32)
    exact = (codes << 23).view(torch.float32)
    assert torch.equal(exact.double(), codes.to(torch.uint8).view(torch.float8_e8m0fnu).double())
    for bump in (0, 1, 0x400000, 0x7FFFFF):
        bits = (codes << 23) + bump
        rounded = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        got = power_of_two_at_least(bits.view(torch.float32))
        assert torch.equal(got, rounded.double())


def test_index_bytes_by_hand() -> None:
    geometry = replace(SMALL, index_dim=4)
    key = torch.tensor([[448.0, -224.0, 1.0, 0.0], [0.0, 0.0, 0.0, 2.0**-12]])
    rows = encode_index(key)
    # amax 448 -> scale 1 (FP32 0x3F800000); amax 2^-12 / 448 = 2^-20.8 -> scale 2^-20
    assert rows[0].tolist() == [0x7E, 0xF6, 0x38, 0x00, 0x00, 0x00, 0x80, 0x3F]
    assert rows[1].tolist() == [0x00, 0x00, 0x00, 0x78, 0x00, 0x00, 0x80, 0x35]
    values, scale = decode_index(rows)
    assert row_bytes(geometry, "index_fp8") == 8
    assert values[0].tolist() == [448.0, -224.0, 1.0, 0.0] and scale.tolist() == [1.0, 2.0**-20]


def test_index_quantisers_differ_in_floor_and_rounding() -> None:
    tiny = torch.full((1, 4), 1e-7)
    assert quantise_index(tiny, "ue8m0")[1].item() == 2.0**-22  # 1e-4 / 448
    assert quantise_index(tiny, "ue8m0_bf16")[1].item() == 2.0**-32  # 1e-7 / 448
    with pytest.raises(ValueError, match="unknown index quantiser 'fp4'"):
        quantise_index(tiny, "fp4")


def test_fp8_tensor_bytes_by_hand() -> None:
    geometry = replace(SMALL, kv_lora=2, pe=2)
    latent, pe = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 1000.0]])
    rows = encode_latent(geometry, "fp8_tensor", latent, pe, k_scale_inv=2.0)
    assert rows.tolist() == [[0x40, 0xC8, 0x38, 0x7E]]
    assert decode_latent(geometry, "fp8_tensor", rows, 0.5).tolist() == [[1.0, -2.0, 0.5, 224.0]]


def test_fp8_ds_mla_bytes_by_hand() -> None:
    geometry = replace(SMALL, kv_lora=256, pe=2)
    latent = torch.zeros(1, 256)
    latent[0, 0], latent[0, 1], latent[0, 128] = 896.0, -1.0, 1.0
    rows = encode_latent(geometry, "fp8_ds_mla", latent, torch.tensor([[1.0, -2.5]]), 7.0)
    assert rows.shape == (1, 256 + 8 + 4)
    # group 0: scale 2, values 448 and -0.5; group 1: 1/448 -> scale 2^-8, value 256
    assert rows[0, [0, 1, 2, 128]].tolist() == [0x7E, 0xB0, 0x00, 0x78]
    assert rows[0, 256:264].tolist() == [0, 0, 0, 0x40, 0, 0, 0x80, 0x3B]
    assert rows[0, 264:].tolist() == [0x80, 0x3F, 0x20, 0xC0]
    expected = torch.cat([latent.double(), torch.tensor([[1.0, -2.5]]).double()], dim=1)
    assert torch.equal(decode_latent(geometry, "fp8_ds_mla", rows, 9.0), expected)


def test_row_bytes_of_the_model_and_refusals() -> None:
    formats = ("fp8_tensor", "fp8_ds_mla", "index_fp8")
    assert [row_bytes(KIMI_K31, name) for name in formats] == [576, 656, 132]
    with pytest.raises(ValueError, match="unknown cache format 'int4'"):
        row_bytes(SMALL, "int4")
    with pytest.raises(ValueError, match="kv_lora in groups of 128, got 96"):
        row_bytes(replace(SMALL, kv_lora=96), "fp8_ds_mla")


@pytest.mark.parametrize("name", LATENT_FORMATS)
def test_unused_rows_decode_to_nan_everywhere(name: str) -> None:
    assert decode_latent(SMALL, name, unused_row(SMALL, name)[None], 1.0).isnan().all()
    values, scale = decode_index(unused_row(SMALL, "index_fp8")[None])
    assert values.isnan().all() and scale.isnan().all()
