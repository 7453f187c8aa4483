"""Row lengths, block tables and scale checks ahead of a launch."""

from __future__ import annotations

import re

import pytest
import torch

from kpipe.runtime.rows import (
    block_count,
    check_row_lengths,
    check_rows,
    check_segments,
    padded_lengths,
    queries_of,
    row_lengths,
)
from kpipe.runtime.scales import check_latent_scales, check_rank_scales, check_scale
from kpipe.runtime.tables import expand_table, write_expanded, write_token_pages


@pytest.mark.parametrize(
    ("lengths", "queries", "counts"),
    [
        ([10, 4], 3, [8, 9, 10, 2, 3, 4]),
        ([2], 3, [0, 1, 2]),
        ([0], 3, [0, 0, 0]),
        ([10, 7, 12, 0], 2, [9, 10, 6, 7, 11, 12, 0, 0]),
        ([1], 2, [0, 1]),
        ([0] * 32, 4, [0] * 128),
        ([5, 0, 7], 1, [5, 0, 7]),
    ],
)
def test_row_lengths(lengths: list[int], queries: int, counts: list[int]) -> None:
    found = row_lengths(torch.tensor(lengths, dtype=torch.int32), queries)
    assert found.tolist() == counts
    check_row_lengths(found, queries)


def test_negative_row_length_is_named() -> None:
    with pytest.raises(ValueError, match=r"KP-NEG-LEN: request 2, row 1: length -1 is negative"):
        check_row_lengths(torch.tensor([3, 4, 1, 2, 0, -1]), 2)


def test_rows_must_match_tables_and_lengths() -> None:
    table, lengths = torch.zeros((256, 8)), torch.zeros(256)
    check_rows(768, lengths, table, 3, "core")
    text = (
        "KP-ROWS: q has 768 rows, seq_lens has 256, block_table has 256; "
        "stage core is declared single-row"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        check_rows(768, lengths, table, 1, "core")
    with pytest.raises(ValueError, match=r"block_table has 255; .* declared 3 rows per request"):
        check_rows(768, lengths, table[:255], 3, "core")


def test_queries_of_refuses_a_remainder() -> None:
    assert queries_of(12, 3) == 4
    for rows, requests in [(8, 3), (2, 3), (4, 0)]:
        with pytest.raises(ValueError, match=f"{rows} rows are not a multiple of {requests}"):
            queries_of(rows, requests)


def test_draft_padding_adjusts_lengths() -> None:
    real, lengths = torch.tensor([2, 4, 1, 0]), torch.tensor([100, 50, 7, 9])
    padded = padded_lengths(lengths, real, 4)
    assert padded.tolist() == [102, 50, 10, 0]
    rows = row_lengths(padded, 4).reshape(4, 4)
    assert rows[0, :2].tolist() == [99, 100]
    assert rows[1].tolist() == [47, 48, 49, 50]
    assert rows[2, :1].tolist() == [7]
    assert rows[3].tolist() == [0, 0, 0, 0]
    assert padded_lengths(lengths, torch.full((4,), 4), 4).tolist() == lengths.tolist()


def test_too_small_a_maximum_of_rows_is_refused() -> None:
    check_segments([0, 2, 6, 7], 4)
    check_segments([0, 2, 6, 7], 5)
    with pytest.raises(ValueError, match=r"KP-QMAX: max_q_len=3 but segment 1 has 4 rows"):
        check_segments([0, 2, 6, 7], 3)
    with pytest.raises(ValueError, match=r"KP-QMAX: max_q_len=3 but segment 1 has 4 rows"):
        padded_lengths(torch.tensor([10, 10]), torch.tensor([2, 4]), 3)
    with pytest.raises(ValueError, match=r"segment 1 ends at 1, before its start 2"):
        check_segments([0, 2, 1], 3)


def test_block_count() -> None:
    assert block_count(torch.tensor([0, 1, 64, 65, 2049]), 64).tolist() == [0, 1, 1, 2, 33]


def test_table_expands_to_kernel_blocks() -> None:
    table = torch.tensor([[5, 9]], dtype=torch.int32)
    expanded = expand_table(table, 2048, 64)
    assert expanded.tolist() == [[*range(160, 192), *range(288, 320)]]
    assert expanded.dtype == torch.int32
    assert expanded[0, (2049 - 1) // 64] == 288
    for token in (0, 63, 64, 2047, 2048, 4095):
        block = table[0, token // 2048] * 32 + (token % 2048) // 64
        assert expanded[0, token // 64] == block
    assert expand_table(table, 2112, 64).tolist() == [[*range(165, 198), *range(297, 330)]]
    assert torch.equal(expand_table(table, 64, 64), table)


def test_table_keeps_missing_pages_missing() -> None:
    assert expand_table(torch.tensor([[2, -1]]), 128, 64).tolist() == [[4, 5, -1, -1]]


def test_table_refuses_what_does_not_divide_or_fit() -> None:
    table = torch.tensor([[5, 9]], dtype=torch.int32)
    with pytest.raises(ValueError, match="SP-PAGE: page 2100 is not a multiple of kernel_block 64"):
        expand_table(table, 2100, 64)
    with pytest.raises(ValueError, match="SP-PAGE: page 32 is not a multiple of kernel_block 64"):
        expand_table(table, 32, 64)
    with pytest.raises(ValueError, match=r"block 4294967327 does not fit torch.int32"):
        expand_table(torch.tensor([[1 << 27]], dtype=torch.int32), 2048, 64)


def test_tables_are_written_in_place_up_to_their_end() -> None:
    """What the last step left behind the pages of this one is gone."""
    into = torch.full((2, 7), 99, dtype=torch.int32)
    write_expanded(into, torch.tensor([[5, -1], [0, 3]]), 3)
    assert into.tolist() == [[15, 16, 17, -1, -1, -1, 0], [0, 1, 2, 9, 10, 11, 0]]
    into.fill_(99)
    write_expanded(into, torch.tensor([[5, -2], [0, 3]]), 1)
    assert into.tolist() == [[5, -2, 0, 0, 0, 0, 0], [0, 3, 0, 0, 0, 0, 0]]
    tokens = torch.tensor([[8, 9, 10, 11, 40, 41], [99] * 6, [0, 1, 2, 3, 12, 13]])
    into.fill_(99)
    write_token_pages(into, tokens, torch.tensor([2, 0]), 4)
    assert into.tolist() == [[0, 3, 0, 0, 0, 0, 0], [2, 10, 0, 0, 0, 0, 0]]
    write_token_pages(into[:, :1], tokens, torch.tensor([0, 2]), 4)
    assert into[:, 0].tolist() == [2, 0]


@pytest.mark.parametrize("value", [0.0, float("nan"), -1.0, float("inf")])
def test_scales_must_be_usable(value: float) -> None:
    with pytest.raises(ValueError, match=f"SP-SCALE-VALUE: k_scale is {value}"):
        check_scale("k_scale", value)


def test_a_latent_has_one_scale() -> None:
    check_latent_scales(0.5, 0.5)
    text = "SP-MLA-SCALE: MLA latent has one scale; k_scale 0.5 != v_scale 0.25"
    with pytest.raises(ValueError, match=re.escape(text)):
        check_latent_scales(0.5, 0.25)


def test_ranks_share_their_scale() -> None:
    check_rank_scales("k_scale", [0.5, 0.5])
    text = "SP-SCALE-RANK: k_scale is 0.5 on rank 0 and 0.25 on rank 2"
    with pytest.raises(ValueError, match=re.escape(text)):
        check_rank_scales("k_scale", [0.5, 0.5, 0.25])
