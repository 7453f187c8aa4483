"""Programmatic dependent launch: what an op and the spec allow, and what the proof leaves of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from spec_project import PIPELINES, make_project, plan_edited, plan_of
from type_edits import by_tma, plan_with

from kpipe.codegen.ops import contract as words
from kpipe.codegen.ops.contract import Kind
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.plan.flags import active, polled_operands
from kpipe.codegen.plan.model import Launch, Pdl, PipelinePlan
from kpipe.codegen.plan.pdl import Candidate, strongest
from kpipe.codegen.proof.prove import prove


def at(
    name: str, flags: Mapping[str, bool] | None = None, weaken: str = "", spin: bool = False
) -> Pdl:
    return strongest(Candidate(CONTRACTS[name], flags or {}, weaken), spin_overlap=spin)


def test_an_ordinary_launch_overlaps_and_releases() -> None:
    assert at("query_norm") == Pdl(True, True, "pdl", "after_wait")
    assert at("index_gemm") == Pdl(True, True, "pdl", "after_loads")
    assert at("mla_value") == Pdl(True, True, "pdl", "after_weights")
    assert at("packed_gemm") == Pdl(True, True, "pdl", "after_weights")


@pytest.mark.parametrize(
    ("name", "flags", "reads"),
    [
        ("prims_ts", {"dcp": False}, "`selected`, `query`"),
        ("prims_ts", {"dcp": True}, "`selected`, `q_mail`"),
        ("trtllm_gen", {"dcp": False}, "`valid`"),
    ],
)
def test_early_readers_are_plain(name: str, flags: dict[str, bool], reads: str) -> None:
    found = at(name, flags)
    assert not found.attribute
    assert found.attribute_reason == f"plain: reads {reads} before its wait"
    assert found.release_reason == "release is the library's"


@pytest.mark.parametrize("name", ["topk_select", "topk_local"])
def test_inputs_of_the_step_are_read_early_with_the_attribute(name: str) -> None:
    assert "lengths" in CONTRACTS[name].early_reads
    assert at(name).attribute


def test_ops_that_never_wait_are_plain() -> None:
    assert at("value_bmm").attribute_reason == "plain: it never waits"


def test_pollers_are_plain_and_held_unless_the_spec_allows_the_overlap() -> None:
    polls = {"dcp": True, "polls": True}
    assert at("mla_query", polls) == Pdl(
        False, False, "plain: polls `q_mail`", "held: polls `q_mail`"
    )
    assert at("mla_query", polls, spin=True) == Pdl(True, True, "pdl", "after_wait")
    publishes = {"dcp": True, "polls": False}
    assert at("mla_query", publishes) == Pdl(True, True, "pdl", "after_wait")


def test_the_spec_may_weaken_and_never_strengthen() -> None:
    off = at("query_norm", weaken="off")
    assert off == Pdl(False, False, "plain: the spec says so", "held: the spec says so")
    hold = at("query_norm", weaken="hold")
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


def test_behind_a_silent_neighbour_only_one_release_is_held(tmp_path: Path) -> None:
    """What runs between layers may start early and never wait: `gated` must be read by then."""
    plan = plan_edited(tmp_path, "dsa_tp", ("between_layers: waits", "between_layers: silent"))
    for step in plan.plans:
        reasons = {launch.name: launch.pdl.release_reason for launch in step.launches}
        held = {name: reason for name, reason in reasons.items() if "held" in reason}
        held = {name: reason for name, reason in held.items() if "by TMA" not in reason}
        assert list(held) == ["o_proj"]
        assert held["o_proj"].endswith("rewrites `gated` behind a silent launch (row 12)")


def test_a_full_dependency_between_layers_frees_what_reads_by_tma(tmp_path: Path) -> None:
    """`hidden` comes from a kernel that waits, and may have let its reader start early."""
    tma = by_tma("packed_gemm", "hidden")
    waits = prove(plan_with(tmp_path / "a", "dsa_tp", tma)).pipeline
    edit = ("between_layers: waits", "between_layers: full")
    full = prove(plan_with(tmp_path / "b", "dsa_tp", tma, edit)).pipeline
    for before, after in zip(launches(waits), launches(full), strict=True):
        if before.op == "packed_gemm":
            assert (before.pdl.attribute, after.pdl.attribute) == (False, True)
        else:
            assert before.pdl == after.pdl


def launches(plan: PipelinePlan) -> list[Launch]:
    return [launch for step in plan.plans for launch in step.launches]


@pytest.mark.parametrize("name", PIPELINES)
def test_shipped_plans_overlap_all_that_waits_and_nothing_else(name: str, tmp_path: Path) -> None:
    """The rules again, on every shipped step and without the planner's code."""
    make_project(tmp_path)
    for step in plan_of(tmp_path, name).plans:
        by_tma = {
            (b.target, b.kind)
            for x in step.launches
            for b in x.bindings
            if b.path is words.Path.ASYNC
        }
        for launch in step.launches:
            flags = dict(launch.flags)
            early = [
                o
                for o in launch.contract.early_reads
                if (bound := launch.binding(o)) and bound.kind is not Kind.STEP
            ]
            polls = polled_operands(launch.contract, flags)
            from_outside = any(
                b.path is words.Path.ASYNC and b.kind is Kind.STEP for b in launch.bindings
            )
            plain = bool(early or polls or not launch.contract.waits or from_outside)
            assert launch.pdl.attribute == (not plain)
            fixed = launch.contract.release.fixed
            fenced = launch.contract.proxy_fence
            stores = {
                (b.target, b.kind)
                for b in launch.bindings
                if b.access.writes and b.operand not in fenced
            }
            assert launch.pdl.release == (not polls and not fixed and not stores & by_tma)
            assert all(active(o, flags) for o in map(launch.contract.operand, early) if o)
