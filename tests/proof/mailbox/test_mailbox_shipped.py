"""The shipped modes of dsa_dcp lose, tear and mistake nothing, whatever the skew."""

from __future__ import annotations

from pathlib import Path

import pytest
from mailbox_protocols import MODES, ROWS, shipped
from spec_project import plan_edited

from kpipe.codegen.proof.mailbox.explorer import bounds_to_check, explore
from kpipe.codegen.proof.mailbox.protocol import Act, Merge, Op, Split, protocol_of
from kpipe.codegen.proof.mailbox.unrolled import Bounds


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("reduce", ROWS)
@pytest.mark.parametrize("mode", MODES)
def test_shipped_modes_are_proved(mode: str, reduce: str, ranks: int) -> None:
    protocol = shipped(mode, reduce)
    assert {box.parities for box in protocol.boxes} == {2}
    for bounds in bounds_to_check(protocol, ranks):
        verdict = explore(protocol, bounds)
        assert verdict.proved, verdict.what
        assert (verdict.counterexample, verdict.kind, verdict.rule) == (None, "", "")
        assert 300 < verdict.states < 200_000


def test_bounds_reuse_every_parity_and_cross_an_odd_step() -> None:
    assert bounds_to_check(shipped("fork"), 3) == (Bounds(3, 4, 1), Bounds(3, 3, 2))


def test_what_a_proof_says() -> None:
    verdict = explore(shipped("fork"), Bounds(2, 3, 2))
    assert verdict.what == (
        "safe for 2 ranks, 3 layers in 2 steps (from parity 0 in each step), whatever the skew"
    )


def _acts(op: Op) -> list[tuple[str, str]]:
    return [(use.act.value, use.box) for use in op.uses]


def test_protocol_of_the_forked_mode() -> None:
    protocol = shipped("fork")
    assert [item if not isinstance(item, Op) else item.name for item in protocol.items] == [
        Split("side"), "topk_local", "topk_merge", "mla_query", "query_wait", Merge("side"),
        "sparse_decode", "dcp_value", "o_proj", "o_reduce",
    ]  # fmt: skip
    ops = {op.name: op for op in protocol.ops}
    assert (ops["mla_query"].stream, ops["topk_local"].stream) == ("side", "main")
    assert _acts(ops["mla_query"]) == [("publish", "q_mail")]
    assert _acts(ops["sparse_decode"]) == [("read", "q_mail")]
    assert _acts(ops["topk_merge"]) == [("poll", "candidates"), ("rearm", "candidates")]
    assert _acts(ops["dcp_value"]) == [
        ("rearm", "q_mail"),
        ("publish", "partial_mail"), ("poll", "partial_mail"), ("rearm", "partial_mail"),
        ("publish", "lse_mail"), ("poll", "lse_mail"), ("rearm", "lse_mail"),
    ]  # fmt: skip
    assert "o_gather" not in {box.name for box in protocol.boxes}


def test_the_only_poller_polls_after_it_has_published() -> None:
    query = next(op for op in shipped("serial").ops if op.name == "mla_query")
    assert _acts(query) == [("publish", "q_mail"), ("poll", "q_mail")]
    assert query.uses[1].after == (0,)


def test_two_shot_publishes_what_it_has_summed() -> None:
    reduce = next(op for op in shipped("wait", "two_shot").ops if op.name == "o_reduce")
    assert [use.act for use in reduce.uses] == [
        Act.POLL, Act.REARM, Act.PUBLISH, Act.POLL, Act.REARM,
    ]  # fmt: skip
    assert reduce.uses[2].after == (0,)
    assert [use.box for use in reduce.uses] == ["o_mail"] * 2 + ["o_gather"] * 3


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (Bounds(1, 4), "1 ranks; 2 to 4 are explored"),
        (Bounds(5, 4), "5 ranks; 2 to 4 are explored"),
        (Bounds(2, 3), "3 layers in 1 steps; 4 layers are needed to reuse 2 parities"),
        (Bounds(2, 0, 9), "0 layers in 9 steps; 4 layers are needed to reuse 2 parities"),
    ],
)
def test_bounds_that_show_nothing_are_refused(bounds: Bounds, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        explore(shipped("fork"), bounds)


def test_parities_of_an_unknown_mailbox() -> None:
    with pytest.raises(ValueError, match="no mailbox 'mail' in the protocol"):
        shipped("fork").with_parities("mail", 1)


@pytest.mark.parametrize("rows", [1, 32, 64])
def test_rows_behind_w_uv_travel_by_the_same_protocol(tmp_path: Path, rows: int) -> None:
    """Its own op re-arms, publishes and polls as dcp_value does, and is explored alike."""
    variant = "value: {ops: [dcp_value], variants: {dcp_value: dcp_value_projected}}"
    pipeline = plan_edited(
        tmp_path,
        "dsa_dcp",
        ("[dcp, rows_cap, heads, kv_lora], dtype", "[dcp, rows_cap, heads, v_dim], dtype"),
        ("value:      {ops: [dcp_value]}", variant),
    )
    step = next(p for p in pipeline.plans if (p.arch, p.q, p.rows) == ("sm_90a", 1, rows))
    protocol = protocol_of(step, pipeline)
    ops = {op.name: op for op in protocol.ops}
    value = next(op for op in shipped("fork").ops if op.name == "dcp_value")
    assert ops["dcp_value_projected"].uses == value.uses
    for bounds in bounds_to_check(protocol, 3):
        assert explore(protocol, bounds).proved
    single = explore(protocol.with_parities("partial_mail", 1), Bounds(2, 4, 1))
    assert (
        single.proved
        == explore(shipped("fork").with_parities("partial_mail", 1), Bounds(2, 4, 1)).proved
    )


def test_a_core_that_pushes_leaves_only_the_merge_to_the_value_op(tmp_path: Path) -> None:
    pipeline = plan_edited(
        tmp_path,
        "dsa_dcp",
        ('sm_90a: {"1-64": sparse_decode}', 'sm_90a: {"1-64": sparse_push}'),
    )
    plan = next(plan for plan in pipeline.plans if plan.arch == "sm_90a")
    protocol = protocol_of(plan, pipeline)
    ops = {op.name: _acts(op) for op in protocol.ops}
    pushed = [("publish", "partial_mail"), ("publish", "lse_mail")]
    assert ops["sparse_push"] == [("read", "q_mail"), *pushed]
    assert not set(pushed) & set(ops["dcp_value"])
    assert explore(protocol, Bounds(2, 4, 1)).proved
