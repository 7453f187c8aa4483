"""What travels between ranks: bytes counted by hand, journeys laid over a schedule by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from spec_project import make_project, plan_of

from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.ops.contract import Access
from kpipe.codegen.ops.projection import O_PROJ
from kpipe.codegen.ops.value import DCP_VALUE
from kpipe.codegen.plan.cost import timeline, total
from kpipe.codegen.plan.describe import describe_text
from kpipe.codegen.plan.describe_json import describe_json
from kpipe.codegen.plan.flags import sends
from kpipe.codegen.plan.links import AT_ONCE, LINKS, Link, link_of, measured_link
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.plan.wire import alternatives, count, posts
from kpipe.codegen.plan.wire_report import Durations, wire_report

Plans = dict[str, PipelinePlan]
VARIANT = "variants: {dcp_value: dcp_value_projected}"


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    project = make_project(tmp_path_factory.mktemp("project"))
    return {name: plan_of(project, name) for name in ("dsa_tp", "dsa_dcp", "dsa_dcp_d2")}


def step_of(plan: PipelinePlan, rows: int) -> StepPlan:
    return next(s for s in plan.plans if (s.arch, s.q, s.rows) == ("sm_90a", 1, rows))


# Kimi K3.1: 96 heads, latent 512 + 64, top_k 2048, hidden 7168; a rank has 96 / D heads.
# Bytes of a token row to one peer.
def by_hand(ranks: int, *, two_shot: bool) -> dict[str, int]:
    heads = 96 // ranks
    sent = {
        "q_mail": heads * 576,  # its heads, E4M3
        "candidates": 2048 * 8,  # pairs of 32 bits, the tail included
        "partial_mail": heads * 512 * 2,  # the peer's heads, BF16
        "lse_mail": heads * 4,
        "o_mail": 7168 * 2 // (ranks if two_shot else 1),
    }
    return {**sent, "o_gather": 7168 * 2 // ranks} if two_shot else sent


@pytest.mark.parametrize(("name", "ranks"), [("dsa_dcp", 8), ("dsa_dcp_d2", 2)])
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_bytes_are_those_of_the_layouts(plans: Plans, name: str, ranks: int, rows: int) -> None:
    found = posts(plans[name], step_of(plans[name], rows))
    assert {post.mailbox: post.to_peer for post in found} == by_hand(ranks, two_shot=rows > 32)
    assert all(post.peers == ranks - 1 for post in found)
    assert all(post.sent == post.to_peer * (ranks - 1) for post in found)


def test_senders_and_pollers_are_those_of_the_mode(plans: Plans) -> None:
    plan = plans["dsa_dcp"]
    for rows in (1, 64):
        step = step_of(plan, rows)
        names = [launch.name for launch in step.launches]
        pairs = {
            p.mailbox: (names[p.writer], *(names[a] for a in p.pollers)) for p in posts(plan, step)
        }
        assert pairs["q_mail"] == ("mla_query", "query_wait")
        assert pairs["candidates"] == ("topk_local", "topk_merge")
        assert pairs["partial_mail"] == pairs["lse_mail"] == ("dcp_value", "dcp_value")
        assert pairs["o_mail"] == ("o_proj", "o_reduce")
        assert pairs.get("o_gather", ("o_reduce", "o_reduce")) == ("o_reduce", "o_reduce")


def test_a_core_that_pushes_leaves_the_value_nothing_to_send() -> None:
    exchanged = [o for o in DCP_VALUE.operands if o.access is Access.EXCHANGE]
    assert [o.name for o in exchanged] == ["partial_mail", "lse_mail"]
    for pushes in (True, False):
        assert [sends(o, DCP_VALUE, {"pushes": pushes}) for o in exchanged] == [pushes] * 2
    (mail,) = (o for o in O_PROJ.operands if o.access is Access.PUBLISH)
    assert sends(mail, O_PROJ, {"dcp": True}) and not sends(mail, O_PROJ, {"dcp": False})


def test_without_sharded_contexts_nothing_travels(plans: Plans) -> None:
    plan = plans["dsa_tp"]
    assert posts(plan, plan.plans[0]) == () and wire_report(plan) is None
    assert "\nwire" not in describe_text(plan)
    assert json.loads(describe_json(plan))["wire"] is None


def test_other_formats_are_sized_from_what_is_sent(plans: Plans) -> None:
    plan = plans["dsa_dcp"]
    for rows in (1, 64):  # the two ways of the sum say the same of each other
        found = {a.what: a.sent for a in alternatives(plan, posts(plan, step_of(plan, rows)))}
        assert list(found.values()) == [
            7 * 12 * 576 * 2,
            7 * 12 * 512 * 4,
            7 * 12 * 128 * 2,  # W_UV makes 128 of 512
            7 * 7168 * 2,
            2 * 7 * 7168 * 2 // 8,
        ]
        assert next(iter(found)) == "q_mail as bf16"


def test_rows_behind_w_uv_carry_what_was_computed(tmp_path: Path) -> None:
    """What one plan computes of the other format is what the other one sends."""
    edits = (
        ("[dcp, rows_cap, heads, kv_lora], dtype", "[dcp, rows_cap, heads, v_dim], dtype"),
        ("value:      {ops: [dcp_value]}", f"value: {{ops: [dcp_value], {VARIANT}}}"),
    )
    make_project(tmp_path, [("dsa_dcp.yaml", old, new) for old, new in edits])
    shipped = plan_of(make_project(tmp_path / "shipped"), "dsa_dcp")
    sent, other = {}, {}
    for name, plan in (("latents", shipped), ("values", plan_of(tmp_path, "dsa_dcp"))):
        found = posts(plan, step_of(plan, 16))
        sent[name] = {post.mailbox: post.sent for post in found}
        other[name] = {a.what: a.sent for a in alternatives(plan, found)}
    assert sent["values"] == {**sent["latents"], "partial_mail": 7 * 12 * 128 * 2}
    behind = "partial_mail by dcp_value_projected: behind W_UV of all heads, bf16"
    ahead = "partial_mail by dcp_value: ahead of W_UV of own heads, bf16"
    assert other["latents"][behind] == sent["values"]["partial_mail"]
    assert other["values"][ahead] == sent["latents"]["partial_mail"]
    assert ahead not in other["latents"] and behind not in other["values"]


def test_launches_beside_collectives(plans: Plans) -> None:
    plan = plans["dsa_dcp"]
    for rows, launches, streams in ((1, 11, 1), (4, 12, 1), (16, 13, 2), (64, 13, 2)):
        found = count(plan, step_of(plan, rows))
        assert (found.launches, found.streams) == (launches, streams)
        assert found.waiting == ("query_wait", "o_reduce")
        assert len(found.collectives) == 5  # query, candidates, rows, LSE, output
        assert found.collective_form == launches - 2 + 5


def test_a_journey_is_latency_and_bytes(plans: Plans) -> None:
    assert Link("x", 100.0, 2.0).journey(300_000) == pytest.approx(2.0 + 3.0)
    assert AT_ONCE.journey(10**9) == 0.0
    assert link_of("sm_90a") is LINKS["sm_90a"] and link_of("sm_77").source == "assumed"


SENDERS = {
    "query_wait": ("mla_query", "q_mail"),
    "topk_merge": ("topk_local", "candidates"),
    "o_reduce": ("o_proj", "o_mail"),
}


def test_words_delay_who_polls_for_them(plans: Plans) -> None:
    """One stream, measured durations: each launch begins behind the last and behind its words."""
    plan, link = plans["dsa_dcp"], Link("x", 50.0, 3.0)
    for rows in (1, 4):
        step = step_of(plan, rows)
        times = {launch.name: 1.0 + launch.index % 3 for launch in step.launches}
        size = {name: 7 * rows * sent for name, sent in by_hand(8, two_shot=False).items()}
        over = {name: 3.0 + bytes_sent / 50e3 for name, bytes_sent in size.items()}
        merged = 3.0 + (size["partial_mail"] + size["lse_mail"]) / 50e3  # one latency for both
        ends: dict[str, float] = {}
        clock = 0.0
        for name, us in times.items():
            sender, box = SENDERS.get(name, ("", ""))
            arrived = ends[sender] + over[box] if sender else 0.0
            clock = max(clock, arrived) + us + (merged if name == "dcp_value" else 0.0)
            ends[name] = clock
        found = timeline(plan, step, times, link)
        assert {one.name: one.end for one in found} == pytest.approx(ends)
        there = timeline(plan, step, times, AT_ONCE)
        assert total(there) == pytest.approx(sum(times.values()))


def test_two_shots_exchange_inside_the_sum(plans: Plans) -> None:
    plan, link = plans["dsa_dcp"], Link("x", 50.0, 3.0)
    step = step_of(plan, 64)
    times = {launch.name: 2.0 for launch in step.launches}
    last = timeline(plan, step, times, link)[-1]
    assert last.name == "o_reduce"
    assert last.duration == pytest.approx(2.0 + 3.0 + 64 * 7 * 7168 * 2 / 8 / 50e3)


def test_the_report_takes_what_was_measured(plans: Plans) -> None:
    plan = plans["dsa_dcp"]
    step = step_of(plan, 4)
    times = {launch.name: 5.0 for launch in step.launches}
    known = Durations({**times, "layer": 1.0}, "GPU")
    report = wire_report(plan, 4, 1, "sm_90a", AT_ONCE, lambda step: known)
    assert report is not None
    (one,) = report.steps
    assert one.prediction.layer == pytest.approx(5.0 * len(times)) and one.prediction.waiting == 0
    assert (one.prediction.measured, one.prediction.gpu) == (len(times), "GPU")
    assert any(text.startswith("measured durations") for text in report.assumptions)
    assert not any(text.startswith("estimated durations") for text in report.assumptions)
    some = Durations({"o_proj": 5.0}, "GPU")
    mixed = wire_report(plan, 4, 1, "sm_90a", None, lambda step: some)
    assert mixed is not None and "1 of 12 measured on GPU" in describe_text(plan, 4, 1, None, mixed)
    assert sum("durations" in text for text in mixed.assumptions) == 2


def test_text_and_json_say_the_same(plans: Plans) -> None:
    plan = plans["dsa_dcp"]
    report = wire_report(plan)
    assert report is not None and [one.step.rows for one in report.steps] == [1, 4, 16, 64]
    text = describe_text(plan, wire=report)
    data = json.loads(describe_json(plan, wire=report))["wire"]
    assert max(map(len, text.splitlines())) <= 110
    for step in data["steps"]:
        assert f"{step['bytes']:,}" in text
        assert step["bytes"] == step["rows"] * sum(m["bytes_per_row"] for m in step["mailboxes"])
        assert f"{step['predicted_us']:.1f}" in text
    assert all(text_line.split()[0] in text for text_line in data["assumptions"])
    assert "link (assumed)" in text and data["link"]["source"] == "assumed"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "no JSON object"),
        ({"one_way_latency_us": 1.0}, "`peer_store_gb_s` is None, not a number"),
        ({"peer_store_gb_s": True, "one_way_latency_us": 1.0}, "`peer_store_gb_s` is True"),
        ({"peer_store_gb_s": 0, "one_way_latency_us": 1.0}, "nothing that was measured"),
        ({"peer_store_gb_s": 1, "one_way_latency_us": -1.0}, "`one_way_latency_us` is -1.0"),
        ({"peer_store_gb_s": float("nan"), "one_way_latency_us": 1}, "nothing that was measured"),
    ],
)
def test_a_measured_link_is_complete(data: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measured_link(data, "sm_90a", "measured")


def test_a_measured_link_takes_the_place_of_the_assumed_one(tmp_path: Path) -> None:
    found = measured_link({"peer_store_gb_s": 320, "one_way_latency_us": 1, "x": 2}, "sm_90a", "m")
    assert found == Link("NVLink 4", 320.0, 1.0, "m")


def test_undeclared_rows_are_no_report(plans: Plans) -> None:
    with pytest.raises(SpecError, match="the spec does not declare it"):
        describe_text(plans["dsa_dcp"], 5000)
