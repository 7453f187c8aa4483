"""Quantisers, rounding points and row-invariant products."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from kpipe.runtime.reference.numerics import (
    Rounds,
    ceil_power_of_two,
    head_product,
    product,
    quantise_groups,
    quantise_index,
    row_sums,
    sigmoid,
    to_e4m3,
)

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Reproducible BF16 normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def test_e4m3_saturates_and_has_one_nan() -> None:
    values = torch.tensor([1e9, -1e9, 465.0, math.inf, -math.inf, -0.0])
    assert to_e4m3(values).float().tolist() == [448.0, -448.0, 448.0, 448.0, -448.0, 0.0]
    negative_nan = torch.tensor([0xFFC00000 - (1 << 32)], dtype=torch.int32).view(torch.float32)
    nans = torch.cat([negative_nan, torch.tensor([math.nan])])
    assert to_e4m3(nans).view(torch.uint8).tolist() == [0x7F, 0x7F]


def test_power_of_two_rounds_up_exactly() -> None:
    values = torch.tensor([1.0, 1.0000001, 0.75, 2.0**-20, 3.0e-5])
    expected = [2.0 ** math.ceil(math.log2(value)) for value in values.tolist()]
    assert ceil_power_of_two(values).tolist() == expected


@pytest.mark.parametrize(("mode", "floor"), [("ue8m0", 1e-4), ("ue8m0_bf16", 1e-10)])
def test_index_quantiser(mode: str, floor: float) -> None:
    value = torch.cat([noise(3, 32).float() * 1.001, torch.zeros(1, 32), torch.full((1, 32), 1e-6)])
    source = value.to(BF16).double() if mode == "ue8m0_bf16" else value.double()
    amax = source.abs().amax(1).clamp(min=floor)
    expected = torch.tensor([2.0 ** math.ceil(math.log2(a / 448)) for a in amax.tolist()])
    found, scale = quantise_index(value, mode)
    assert torch.equal(scale, expected)
    assert torch.equal(found.float(), (source / expected[:, None]).float().to(E4M3).float())
    tie = torch.tensor([[448.0, 17.0 + 2.0**-10]])  # BF16 makes it 17, which goes to 16
    assert quantise_index(tie, mode)[0].float()[0, 1] == (16.0 if mode == "ue8m0_bf16" else 18.0)
    with pytest.raises(ValueError, match="index_quant is 'fp4'; known are ue8m0, ue8m0_bf16"):
        quantise_index(value, "fp4")


def test_group_quantiser_has_a_scale_per_group() -> None:
    value = torch.cat([noise(2, 128).float(), noise(2, 128, seed=1).float() * 90], dim=1)
    found, scale = quantise_groups(value, 128)
    amax = value.reshape(2, 2, 128).abs().amax(2)
    expected = torch.exp2(torch.ceil(torch.log2((amax / 448).clamp(min=1e-4))))
    assert torch.equal(scale, expected)
    restored = found.float() * expected.repeat_interleave(128, 1)
    assert torch.allclose(restored, value, rtol=2**-4, atol=2**-9 * float(expected.max()))


def test_products_and_sums_of_a_row_stand_alone() -> None:
    for inner, outer in [(700, 37), (64, 40), (24, 17)]:
        rows, weight = noise(13, inner), noise(outer, inner, seed=1)
        together = product(rows, weight)
        alone = torch.cat([product(rows[r : r + 1].clone(), weight) for r in range(13)])
        assert torch.equal(together, alone)
        poisoned = rows.clone()
        poisoned[5] = math.nan
        kept = [r for r in range(13) if r != 5]
        assert torch.equal(product(poisoned, weight)[kept], together[kept])
        assert torch.equal(row_sums(rows)[:3], row_sums(rows[:3]))
        exact = (rows.double() @ weight.double().t()).float()
        assert torch.allclose(together, exact, rtol=1e-5, atol=1e-4)


def test_a_head_does_not_depend_on_the_number_of_heads() -> None:
    rows, weight = noise(5, 6, 96), noise(6, 40, 96, seed=1)
    whole = head_product(rows, weight)
    assert torch.equal(whole[:, 2:4], head_product(rows[:, 2:4], weight[2:4]))


def test_words_of_numerics_are_checked() -> None:
    with pytest.raises(
        ValueError, match=re.escape("rounds.absorb is 'fp16'; known are bf16, fp32")
    ):
        Rounds(absorb="fp16")
    with pytest.raises(ValueError, match="sigmoid is 'hard'; known are exact, refined, fast"):
        sigmoid(torch.zeros(1), "hard")
    assert torch.equal(sigmoid(torch.ones(1), "fast"), sigmoid(torch.ones(1)))
