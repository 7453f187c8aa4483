"""Programmatic dependent launch: the conservative rules, one by one and over shipped plans."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from spec_project import PIPELINES, make_project, plan_edited, plan_of

from kpipe.codegen.ops.contract import Release
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.plan.flags import active, polled_operands
from kpipe.codegen.plan.model import Launch, Pdl, PipelinePlan
from kpipe.codegen.plan.pdl import Neighbour, derive_pdl


def at(name: str, flags: Mapping[str, bool] | None = None, weaken: str = "") -> Neighbour:
    return Neighbour(name, CONTRACTS[name], flags or {}, weaken)


def derive(launch: Neighbour, before: str = "packed_gemm", behind: str = "o_proj", **more) -> Pdl:
    settings = {"heads_stream": False, "between_layers": "waits", "spin_overlap": False, **more}
    return derive_pdl(
        launch, at(before) if before else None, at(behind) if behind else None, **settings
    )


def test_an_ordinary_launch_overlaps_and_releases() -> None:
    assert derive(at("query_norm")) == Pdl(True, True, "pdl", "after_wait")
    assert derive(at("mla_value")) == Pdl(True, True, "pdl", "after_loads")


@pytest.mark.parametrize(
    ("name", "flags", "reads"),
    [
        ("prims_ts", {"dcp": False}, "`selected`, `query`"),
        ("prims_ts", {"dcp": True}, "`selected`, `q_mail`"),
        ("trtllm_gen", {"dcp": False}, "`valid`"),
    ],
)
def test_early_readers_are_plain_and_nobody_releases_ahead_of_them(
    name: str, flags: dict[str, bool], reads: str
) -> None:
    reader = at(name, flags)
    found = derive(reader)
    assert not found.attribute
    assert found.attribute_reason == f"plain: reads {reads} before its wait"
    assert found.release_reason == "release is the library's"
    ahead = derive_pdl(
        at("topk_select"),
        at("index_scores"),
        reader,
        heads_stream=False,
        between_layers="waits",
        spin_overlap=False,
    )
    assert ahead == Pdl(True, False, "pdl", f"held: {name} reads {reads} before its wait")


def test_ops_that_never_wait_are_plain_and_held_off() -> None:
    assert derive(at("value_bmm")).attribute_reason == "plain: it never waits"
    ahead = derive(at("sparse_decode"), behind="value_bmm")
    assert (ahead.release, ahead.release_reason) == (False, "held: value_bmm never waits")


def test_pollers_are_plain_and_held_unless_the_spec_allows_the_overlap() -> None:
    poller = at("mla_query", {"dcp": True, "polls": True})
    assert derive(poller) == Pdl(False, False, "plain: polls `q_mail`", "held: polls `q_mail`")
    assert derive(poller, spin_overlap=True) == Pdl(True, True, "pdl", "after_wait")
    publisher = at("mla_query", {"dcp": True, "polls": False})
    assert derive(publisher) == Pdl(True, True, "pdl", "after_wait")


def test_the_first_of_a_forked_stream_is_plain() -> None:
    found = derive(at("mla_query"), before="", heads_stream=True)
    assert (found.attribute, found.attribute_reason) == (False, "plain: first of a forked stream")


@pytest.mark.parametrize("between", ["silent", "full"])
def test_the_first_of_a_layer_is_plain_unless_its_predecessor_waits(between: str) -> None:
    found = derive(at("packed_gemm"), before="", between_layers=between)
    assert found.attribute_reason == f"plain: between_layers is {between}"
    assert derive(at("packed_gemm"), before="").attribute
    assert derive(at("packed_gemm"), between_layers=between).attribute


def test_the_spec_may_weaken_and_never_strengthen() -> None:
    off = derive(at("query_norm", weaken="off"))
    assert off == Pdl(False, False, "plain: the spec says so", "held: the spec says so")
    hold = derive(at("query_norm", weaken="hold"))
    assert hold == Pdl(True, False, "pdl", "held: the spec says so")


def test_weakening_reaches_exactly_its_launch(tmp_path: Path) -> None:
    old = "  o_proj: {ops: [o_proj]}"
    plain = plan_edited(tmp_path / "a", "dsa_tp")
    held = plan_edited(tmp_path / "b", "dsa_tp", (old, old[:-1] + ", pdl: {o_proj: hold}}"))
    for before, after in zip(launches(plain), launches(held), strict=True):
        if before.op == "o_proj":
            assert (after.pdl.attribute, after.pdl.release) == (True, False)
        else:
            assert before.pdl == after.pdl


def test_a_silent_neighbourhood_makes_only_the_first_launch_plain(tmp_path: Path) -> None:
    plain = plan_edited(tmp_path, "dsa_tp", ("between_layers: waits", "between_layers: silent"))
    for step in plain.plans:
        reasons = [launch.pdl.attribute_reason for launch in step.launches]
        assert reasons[0] == "plain: between_layers is silent"
        assert "plain: between_layers is silent" not in reasons[1:]


def launches(plan: PipelinePlan) -> list[Launch]:
    return [launch for step in plan.plans for launch in step.launches]


@pytest.mark.parametrize("name", PIPELINES)
def test_shipped_plans_keep_the_rules(name: str, tmp_path: Path) -> None:
    """The rules again, on the streams of every shipped step and without the planner's code."""
    make_project(tmp_path)
    for step in plan_of(tmp_path, name).plans:
        for stream in step.streams:
            chain = [launch for launch in step.launches if launch.stream == stream]
            for position, launch in enumerate(chain):
                flags = dict(launch.flags)
                early = [o for o in launch.contract.early_reads if launch.binding(o)]
                polls = polled_operands(launch.contract, flags)
                if early or polls or not launch.contract.waits:
                    assert not launch.pdl.attribute
                if stream != "main" and position == 0:
                    assert not launch.pdl.attribute
                if polls or launch.contract.release in (Release.NEVER, Release.LIBRARY):
                    assert not launch.pdl.release
                if position and (early or not launch.contract.waits):
                    assert not chain[position - 1].pdl.release
                assert all(active(o, flags) for o in map(launch.contract.operand, early) if o)
