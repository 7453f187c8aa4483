"""An exchange of three rings holds a third of the allocation, rounded down to its alignment."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpipe.runtime.comm.capacity import (
    ExchangeTooSmall,
    check_rows,
    ring_bytes,
    rows_that_fit,
    total_bytes_for,
)

EXCHANGE = {"total_bytes": 2097152, "rings": 3, "align": 2048}
ROW_BYTES = 7168 * 2


def test_one_ring_is_a_third_of_the_allocation() -> None:
    assert ring_bytes(**EXCHANGE) == 698368
    assert rows_that_fit(**EXCHANGE, row_bytes=ROW_BYTES) == 48
    # What a gate that looks at the whole allocation would admit.
    assert EXCHANGE["total_bytes"] // ROW_BYTES == 146


@pytest.mark.parametrize("rows", [1, 14, 48])
def test_rows_that_fit_pass(rows: int) -> None:
    check_rows(rows, **EXCHANGE, row_bytes=ROW_BYTES)


@pytest.mark.parametrize("rows", [49, 56, 146, 147])
def test_rows_beyond_a_ring_are_refused(rows: int) -> None:
    with pytest.raises(ExchangeTooSmall, match=f"^{rows} rows need {rows * ROW_BYTES} bytes"):
        check_rows(rows, **EXCHANGE, row_bytes=ROW_BYTES)


def test_the_refusal_states_both_sizes() -> None:
    text = "56 rows need 802816 bytes per ring, have 698368 (2097152 / 3, aligned)"
    with pytest.raises(ExchangeTooSmall, match=f"^{re.escape(text)}$"):
        check_rows(56, **EXCHANGE, row_bytes=ROW_BYTES)


def test_gate_and_kernel_agree_for_every_row_count() -> None:
    for rows in range(1, 201):
        last_byte_of_ring = rows * ROW_BYTES
        fits_in_memory = last_byte_of_ring <= ring_bytes(**EXCHANGE)
        assert (rows <= rows_that_fit(**EXCHANGE, row_bytes=ROW_BYTES)) == fits_in_memory


@given(
    rows=st.integers(0, 500),
    rings=st.integers(1, 4),
    align=st.sampled_from([1, 16, 2048]),
    row_bytes=st.integers(1, 20000),
)
def test_the_allocator_asks_for_enough_and_not_a_step_more(
    rows: int, rings: int, align: int, row_bytes: int
) -> None:
    total = total_bytes_for(rows, rings, align, row_bytes)
    assert rows_that_fit(total, rings, align, row_bytes) >= rows
    if rows:
        assert rows_that_fit(total - rings * align, rings, align, row_bytes) < rows
