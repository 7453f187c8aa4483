"""What runs between two layers also hands on the residual stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_project import plan_edited

from kpipe.codegen.proof.lower import between_layers

OPTIONS = 'options: {reduce: {"1-32": one_shot, "33-64": two_shot}'
FORMS = {
    "": (set(), {"hidden"}),
    ", residual: add_prefix": (set(), {"hidden", "prefix"}),
    ", residual: add_prefix, attn_res: mix_blocks": (
        {"new_prefix"},
        {"hidden", "prefix", "saved"},
    ),
}


@pytest.mark.parametrize("options", FORMS)
def test_it_reads_what_a_layer_leaves_and_writes_what_the_next_takes(
    tmp_path: Path, options: str
) -> None:
    plan = plan_edited(tmp_path, "dsa_dcp", (OPTIONS, OPTIONS + options))
    accesses = between_layers(plan).accesses
    reads = {access.buffer for access in accesses if not access.write}
    beside, written = FORMS[options]
    assert reads == {"out"} | beside
    assert {access.buffer for access in accesses if access.write} == written
    declared = {tensor.name: tensor.written for tensor in plan.step}
    assert all(declared[name] for name in reads) and not any(declared[name] for name in written)
