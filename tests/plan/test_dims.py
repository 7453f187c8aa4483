"""Dimensions: the geometry's expressions with the spec's parallelism filled in."""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_project import edit, findings_of, make_project, plan_edited, plan_of

GEOMETRY = "geometry/kimi_k31.yaml"


@pytest.mark.parametrize(
    ("name", "tp", "dcp", "heads", "pitch"),
    [
        ("dsa_tp", 8, 1, 12, 3808),
        ("dsa_dcp", 8, 8, 12, 3808),
        ("dsa_dcp_d2", 2, 2, 48, 8416),
    ],
)
def test_shipped(name: str, tp: int, dcp: int, heads: int, pitch: int, tmp_path: Path) -> None:
    """pitch = 1536 (q_a) + 576 (kv_a) + heads * 128 (gate) + 128 (wk) + 32 (wv)."""
    make_project(tmp_path)
    dims = plan_of(tmp_path, name).dims
    assert (dims["tp"], dims["dcp"], dims["heads"], dims["pitch"]) == (tp, dcp, heads, pitch)
    assert (dims["latent"], dims["qk_head"]) == (576, 192)


def test_tp_16_of_the_same_model(tmp_path: Path) -> None:
    dims = plan_edited(tmp_path, "dsa_tp", ("{tp: 8}", "{tp: 16}")).dims
    assert (dims["heads"], dims["pitch"]) == (6, 3040)


def test_the_softmax_scale_is_the_inverse_root_of_the_query_head(tmp_path: Path) -> None:
    make_project(tmp_path)
    assert plan_of(tmp_path).scalars["softmax_scale"] == pytest.approx(192**-0.5, rel=1e-15)
    edit(tmp_path, GEOMETRY, "softmax_dim: qk_head", "softmax_dim: qk_head, softmax_mscale: 1.5")
    assert plan_of(tmp_path).scalars["softmax_scale"] == pytest.approx(192**-0.5 * 2.25)


def test_dimensions_may_stand_in_any_order(tmp_path: Path) -> None:
    make_project(tmp_path)
    before = dict(plan_of(tmp_path).dims)
    edit(tmp_path, GEOMETRY, "  heads: heads_total / tp         # one rank's share\n", "")
    edit(tmp_path, GEOMETRY, "dims:\n", "dims:\n  heads: heads_total / tp\n")
    assert dict(plan_of(tmp_path).dims) == before


def test_padding_of_the_packed_row(tmp_path: Path) -> None:
    old = "columns: {q_a: q_lora"
    plan = plan_edited(tmp_path, "dsa_tp", (old, f"pad_to: 64\n    {old}"))
    projected = next(b for b in plan.buffers if b.name == "projected")
    assert plan.dims["pitch"] == 3840
    assert projected.shape == ("rows", 3840)
    assert projected.columns[-1] == ("wv", 3776, 32)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("heads: heads_total / tp", "heads: heads_total / 7", "dimension `heads`: heads_total / 7"),
        ("  pe: 64\n", "  pe: nope - v_dim\n", "dimension `pe`: nope - v_dim: 0 is not positive"),
        ("  pe: 64\n", "  pe: pe\n", "dimension goes in a circle: pe -> pe"),
        ("  pe: 64\n", "  pe: 64 * 4611686018427387904\n", "dimension `pe`: 64 * 461168601842738"),
        ("  pe: 64\n", "  pe: 1 / 0\n", "dimension `pe`: 1 / 0: division by zero"),
    ],
)
def test_refusals(old: str, new: str, message: str, tmp_path: Path) -> None:
    make_project(tmp_path, [(GEOMETRY, old, new)])
    found = findings_of(str(tmp_path / "pipelines" / "dsa_tp.yaml"))
    assert [f.message.startswith(message) for f in found] == [True]
    assert found[0].code == "KP111"
