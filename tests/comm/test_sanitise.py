"""No sanitised value forms a sentinel; everything else keeps its bits."""

from __future__ import annotations

import pytest
import torch

from kpipe.runtime.comm.sanitise import (
    ALL_ONES,
    EMPTY_LSE,
    NEG_ZERO_PAIR,
    can_produce,
    canonicalise_nan,
    clear_negative_zero,
    every_pattern,
    sanitise_lse,
    sanitise_scores,
    sanitiser_for,
)

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
PAIRS = [
    (torch.bfloat16, NEG_ZERO_PAIR),
    (torch.float16, NEG_ZERO_PAIR),
    (torch.float32, NEG_ZERO_PAIR),
    (torch.bfloat16, ALL_ONES),
    (torch.float16, ALL_ONES),
    (torch.float8_e4m3fn, ALL_ONES),
    (torch.float32, ALL_ONES),
]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(BITS[values.dtype.itemsize])


def words(*patterns: int) -> torch.Tensor:
    signed = [p - (1 << 32) if p >= 1 << 31 else p for p in patterns]
    return torch.tensor(signed, dtype=torch.int32)


@pytest.mark.parametrize(("dtype", "sentinel"), PAIRS)
def test_sanitised_values_never_form_the_sentinel(dtype: torch.dtype, sentinel: int) -> None:
    assert not can_produce(dtype, sentinel)


@pytest.mark.parametrize(("dtype", "sentinel"), PAIRS)
def test_raw_values_do_form_the_sentinel(dtype: torch.dtype, sentinel: int) -> None:
    assert can_produce(dtype, sentinel, lambda values: values)


def test_the_wrong_sanitiser_is_noticed() -> None:
    assert can_produce(torch.bfloat16, ALL_ONES, clear_negative_zero)
    assert can_produce(torch.bfloat16, NEG_ZERO_PAIR, canonicalise_nan)
    assert can_produce(torch.float8_e4m3fn, 0x7F7F7F7F, canonicalise_nan)
    # One clean half is enough to keep a word from occurring.
    assert not can_produce(torch.bfloat16, 0x3F808000, clear_negative_zero)
    assert can_produce(torch.bfloat16, 0x3F808001, clear_negative_zero)


def test_an_undeclared_pair_has_no_sanitiser() -> None:
    assert can_produce(torch.int32, 0xFFFFFFFF)
    with pytest.raises(
        ValueError, match="^no sanitiser keeps torch.int32 from producing 0xFFFFFFFF$"
    ):
        sanitiser_for(torch.int32, ALL_ONES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_negative_zero_halves_change(dtype: torch.dtype) -> None:
    before = every_pattern(dtype)
    changed = bits(before) != bits(clear_negative_zero(before))
    assert changed.nonzero().flatten().tolist() == [0x8000]
    assert bits(clear_negative_zero(before))[0x8000] == 0


@pytest.mark.parametrize(
    ("dtype", "nan", "others"),
    [(torch.bfloat16, 0x7FC0, 253), (torch.float16, 0x7E00, 2045), (torch.float8_e4m3fn, 0x7F, 1)],
)
def test_only_nans_change(dtype: torch.dtype, nan: int, others: int) -> None:
    before = every_pattern(dtype)
    after = canonicalise_nan(before)
    is_nan = before.to(torch.float32).isnan()
    assert (bits(after)[is_nan] == nan).all()
    assert torch.equal(bits(after)[~is_nan], bits(before)[~is_nan])
    assert (bits(after) != bits(before)).sum() == others


@pytest.mark.parametrize(("dtype", "sentinel"), [p for p in PAIRS if p[0].itemsize < 4])
def test_sanitisers_of_narrow_types_are_projections(dtype: torch.dtype, sentinel: int) -> None:
    sanitise = sanitiser_for(dtype, sentinel)
    once = sanitise(every_pattern(dtype))
    assert torch.equal(bits(sanitise(once)), bits(once))


@pytest.mark.parametrize("sanitise", [clear_negative_zero, canonicalise_nan, sanitise_lse])
def test_sanitisers_of_fp32_are_projections(sanitise) -> None:
    # Every sign and exponent with three mantissas: each class of value at both its ends.
    high = torch.arange(-256, 256, dtype=torch.int32)[:, None] << 23
    values = (high + words(0, 1, 0x7FFFFF)).view(torch.float32).flatten()
    once = sanitise(values)
    assert torch.equal(bits(sanitise(once)), bits(once))


def test_adversarial_bf16_rows_arrive() -> None:
    rows = torch.tensor(
        [
            [0x8000] * 4,  # -0
            [0x8001] * 4,  # the smallest negative subnormal
            [0x8000, 0x3F80, 0x8000, 0x3F80],  # -0 and 1 in turn
            [0x0000] * 4,
            [0x7FC1, 0xFFC1, 0x7F81, 0xFFFF],  # NaNs with payloads
            [0x0000, 0x8000, 0x0000, 0x8000],  # the sentinel itself
        ]
    )
    sent = clear_negative_zero(rows.to(torch.int16).view(torch.bfloat16))
    expected = torch.where(rows == 0x8000, 0, rows).to(torch.int16)
    assert torch.equal(bits(sent), expected)
    assert not (sent.view(torch.int32) == words(NEG_ZERO_PAIR)).any()


def test_the_smallest_negative_fp32_keeps_its_bits() -> None:
    values = words(0x80000000, 0x80000001, 0, 0x7FC00001).view(torch.float32)
    assert (
        bits(clear_negative_zero(values)).tolist() == words(0, 0x80000001, 0, 0x7FC00001).tolist()
    )


def test_lse_outside_the_usable_range_is_empty() -> None:
    inf, nan = float("inf"), float("nan")
    lse = torch.tensor([nan, inf, -inf, EMPTY_LSE, -EMPTY_LSE, -3.3e38, 3.3e38])
    assert (sanitise_lse(lse) == torch.tensor(EMPTY_LSE)).all()
    kept = torch.tensor([0.0, -0.0, 1.5, -2.9e38, 2.9e38])
    assert torch.equal(bits(sanitise_lse(kept)), bits(kept))


def test_nan_scores_rank_last() -> None:
    scores = words(0xFFFFFFFF, 0x7FC00000, 0x80000000, 0x3F800000, 0xFF800000)
    after = bits(sanitise_scores(scores.view(torch.float32)))
    expected = words(0xFF800000, 0xFF800000, 0x80000000, 0x3F800000, 0xFF800000)
    assert torch.equal(after, expected)


def test_columns_of_a_wider_row_can_be_sanitised() -> None:
    row = torch.tensor([[0x8000, 1, 0xFFFF], [2, 0x8000, 0x8000]]).to(torch.int16)
    middle = row.view(torch.bfloat16)[:, 1:]
    assert bits(clear_negative_zero(middle)).tolist() == [[1, -1], [0, 0]]
    assert bits(canonicalise_nan(middle)).tolist() == [[1, 0x7FC0], [-0x8000, -0x8000]]


def test_wide_types_are_not_enumerated() -> None:
    with pytest.raises(ValueError, match=r"^torch.float32 has 2\^32 patterns$"):
        every_pattern(torch.float32)
