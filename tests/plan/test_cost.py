"""The predicted time of a layer: bytes by hand, edges one at a time, shared bandwidth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from spec_project import make_project, plan_edited, plan_of

from kpipe.codegen.plan.cost import (
    BANDWIDTH,
    FLOOR,
    GAP_FULL,
    GAP_PDL,
    critical_path,
    layer_time,
    moved,
    timeline,
)
from kpipe.codegen.plan.model import Fork, Join, Launch, PipelinePlan, StepPlan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> PipelinePlan:
    return plan_of(make_project(tmp_path_factory.mktemp("project")), "dsa_tp")


def step_of(plan: PipelinePlan, mode: str) -> StepPlan:
    return next(step for step in plan.plans if step.mode == mode and step.arch == "sm_90a")


def launch_of(step: StepPlan, op: str) -> Launch:
    return next(launch for launch in step.launches if launch.op == op)


def test_bytes_of_a_gemm_are_weights_input_and_output(plan: PipelinePlan) -> None:
    step = step_of(plan, "fork")
    pitch, hidden, rows = plan.dims["pitch"], plan.dims["hidden"], step.rows
    expected = 2 * (pitch * hidden + rows * hidden + rows * pitch)  # all BF16
    assert moved(plan, step, launch_of(step, "packed_gemm")) == expected


def test_a_gemm_apart_moves_its_own_columns(tmp_path: Path) -> None:
    edit = (
        'sm_90a:  {q1: {"1-4": front, "5-32": fork',
        'sm_90a:  {q1: {"1-4": front, "5-32": apart_fork',
    )
    plan = plan_edited(tmp_path, "dsa_tp", edit)
    step = step_of(plan, "apart_fork")
    hidden, rows, gate = plan.dims["hidden"], step.rows, plan.dims["heads"] * plan.dims["v_dim"]
    columns = {"packed_gemm": plan.dims["pitch"] - gate, "gate_gemm": gate}
    for op, own in columns.items():
        expected = 2 * (own * hidden + rows * hidden + rows * own)
        assert moved(plan, step, launch_of(step, op)) == expected


def test_a_core_reads_the_selected_rows_of_the_cache(plan: PipelinePlan) -> None:
    step = step_of(plan, "fork")
    core = launch_of(step, "sparse_decode")
    more = replace(step, rows=2 * step.rows)
    row = next(c.row_bytes for c in plan.caches if c.name == "latent_kv")
    extra = moved(plan, more, core) - moved(plan, step, core)
    dims = plan.dims
    heads, latent = dims["heads"], dims["latent"]
    per_row = 2048 * row + 2048 * 4 + 4 + heads * latent + 2 * heads * dims["kv_lora"]
    assert extra == step.rows * per_row


def chain(plan: PipelinePlan, *, attribute: bool, streams: tuple[str, ...] = ()) -> StepPlan:
    """Launches of one small op, one behind the other or on their own streams."""
    step = step_of(plan, "fork")
    small = launch_of(step, "query_norm")
    pdl = replace(small.pdl, attribute=attribute)
    names = streams or ("main", "main", "main")
    launches = [replace(small, index=i, stream=s, pdl=pdl) for i, s in enumerate(names)]
    return replace(step, items=tuple(launches))


def test_a_chain_costs_floors_and_gaps(plan: PipelinePlan) -> None:
    for attribute, gap in ((False, GAP_FULL), (True, GAP_PDL)):
        found = timeline(plan, chain(plan, attribute=attribute))
        starts = [FLOOR * i + gap * i for i in range(3)]
        assert [timed.start for timed in found] == pytest.approx(starts)
        assert [timed.duration for timed in found] == pytest.approx([FLOOR] * 3)


def test_a_fork_starts_behind_its_origin_and_a_join_waits(plan: PipelinePlan) -> None:
    step = chain(plan, attribute=True, streams=("main", "side", "main", "main"))
    first, side, beside, last = step.items
    span = first.span
    items = (first, Fork("side", "main", span), side, beside, Join("side", "main", span), last)
    found = timeline(plan, replace(step, items=items))
    assert found[1].start == pytest.approx(FLOOR + GAP_FULL)
    assert found[2].start == pytest.approx(FLOOR + GAP_PDL)
    assert found[3].start == pytest.approx(max(found[1].end + GAP_FULL, found[2].end + GAP_PDL))
    late = replace(step, items=(*items[:4], last))  # without the join
    assert timeline(plan, late)[3].start == pytest.approx(found[2].end + GAP_PDL)


def test_launches_side_by_side_share_the_bandwidth(plan: PipelinePlan) -> None:
    step = step_of(plan, "fork")
    big = launch_of(step, "packed_gemm")
    size = moved(plan, step, big)
    two = tuple(replace(big, index=i, stream=s) for i, s in enumerate(("main", "side")))
    (alone,) = timeline(plan, replace(step, items=two[:1]))
    both = timeline(plan, replace(step, items=two))
    assert alone.duration == pytest.approx(size / BANDWIDTH)
    assert [timed.duration for timed in both] == pytest.approx([2 * size / BANDWIDTH] * 2)


def test_the_critical_path_goes_through_what_is_waited_for(plan: PipelinePlan) -> None:
    step = chain(plan, attribute=True, streams=("main", "side", "main", "main"))
    launches = zip(step.items, ("first", "side", "beside", "last"), strict=True)
    first, side, beside, last = (replace(item, name=name) for item, name in launches)
    span = first.span
    items = (first, Fork("side", "main", span), side, beside, Join("side", "main", span), last)
    joined = critical_path(plan, replace(step, items=items))
    assert joined == ("first", "side", "last")  # it starts later than `beside`, and is joined fully
    alone = critical_path(plan, replace(step, items=(*items[:4], last)))
    assert alone == ("first", "beside", "last")
    assert critical_path(plan, replace(step, items=())) == ()


def test_the_layer_is_as_long_as_its_last_end_and_not_below_its_bytes(plan: PipelinePlan) -> None:
    for step in plan.plans:
        found = timeline(plan, step)
        assert [timed.name for timed in found] == [launch.name for launch in step.launches]
        time = layer_time(plan, step)
        assert time == max(timed.end for timed in found)
        assert time >= sum(timed.bytes for timed in found) / BANDWIDTH - 1e-6


def test_no_launch_starts_ahead_of_its_stream(tmp_path: Path, plan: PipelinePlan) -> None:
    for step in plan.plans:
        ends: dict[str, float] = {}
        for timed in timeline(plan, step):
            assert timed.start >= ends.get(timed.stream, 0.0)
            ends[timed.stream] = timed.end
