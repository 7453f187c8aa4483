"""Tiles that the contracts offer for timing are tiles that the shipped kernels accept."""

from __future__ import annotations

import importlib
from itertools import product
from pathlib import Path

import pytest

from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.runtime.generated_folder import load_layer

GENERATED = Path(__file__).parents[2] / "generated"


@pytest.mark.parametrize("folder", ["dsa_tp", "dsa_tp1", "dsa_dcp"])
def test_kernels_accept_what_is_offered(folder: str) -> None:
    layer = load_layer(GENERATED / folder)
    checked, refused = 0, set()
    for op in layer.OPS:
        values = dict(CONTRACTS[op.name].tile_values)
        if not values or not op.kernel:
            continue
        module, _, name = op.kernel.partition(":")
        kernel = getattr(importlib.import_module(f"{layer.PACKAGE}.kernels.{module}"), name)
        for chosen in product(*values.values()):
            tile = dict(zip(values, chosen, strict=True))
            try:
                kernel(**tile)
                checked += 1
            except ValueError as error:  # the tuner leaves such a tile out
                assert "bytes of shared memory" in str(error)
                refused.add((op.name, *tile.values()))
    assert checked > 20
    # Clusters of two with many rows: of 64 weight rows a CTA has to stage too many.
    assert {(op, tile_n) for op, tile_n, *_ in refused} == {("index_front", 64)}
    assert ("index_front", 64, 8, 8) not in refused


def test_measured_defaults_are_among_what_is_offered() -> None:
    for contract in CONTRACTS.values():
        values = dict(contract.tile_values)
        for _, tactic in contract.tactics if values else ():
            for field, value in tactic:
                assert value in values[field], (contract.name, field)
