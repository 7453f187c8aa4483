"""Tiles that nobody writes down: as measured, as far as the geometry has room for them."""

from __future__ import annotations

import pytest

from kpipe.codegen.ops.registry import CONTRACTS


@pytest.mark.parametrize(("index_dim", "tile_n"), [(128, 64), (64, 64), (96, 48), (32, 32)])
def test_a_tile_is_a_part_of_a_head(index_dim: int, tile_n: int) -> None:
    """CTAs of a cluster share a head, so it is parted by a power of two."""
    found = CONTRACTS["index_front"].tactic(8, {"index_dim": index_dim})
    assert dict(found) == {"tile_n": tile_n, "tokens": 8, "held": 8}


def test_fields_that_nothing_caps_are_as_measured() -> None:
    small = {"index_dim": 8, "hidden": 8, "v_dim": 8}
    assert dict(CONTRACTS["o_proj"].tactic(8, small))["tile_n"] == 64
    assert CONTRACTS["query_norm"].tactic(8, small) == ()


def test_parts_are_of_fields_of_the_tile() -> None:
    for contract in CONTRACTS.values():
        assert {name for name, _ in contract.tile_parts} <= set(contract.tile)
