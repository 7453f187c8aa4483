"""A schedule in time against an account of its own: longest ways, and launches made longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kpipe.codegen.plan.cost import layer_time
from kpipe.codegen.plan.links import AT_ONCE
from kpipe.codegen.plan.model import Fork, Launch, Method, PipelinePlan, StepPlan
from kpipe.codegen.review.timed_schedule import TimedSchedule, timed_schedule
from kpipe.codegen.review.timings import Measured


@pytest.fixture(autouse=True)
def words_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What words take is tests/plan/test_wire.py's."""
    monkeypatch.setattr("kpipe.codegen.plan.cost.link_of", lambda arch: AT_ONCE)


def methods_of(plans: dict[str, PipelinePlan]) -> list[tuple[PipelinePlan, Method]]:
    return [(plan, method) for plan in plans.values() for method in plan.methods]


def times_of(step: StepPlan) -> dict[str, float]:
    """Durations without a pattern, of every launch."""
    return {launch.name: 2.0 + (7 * launch.index) % 11 for launch in step.launches}


def schedule_of(plan: PipelinePlan, step: StepPlan, times: dict[str, float]) -> TimedSchedule:
    return timed_schedule(plan, step, "_m", Measured("GPU", 32768, times, None))


def longest_ways(step: StepPlan, times: dict[str, float]) -> dict[str, float]:
    """When each launch starts if nothing but streams, forks and joins holds it back."""
    clocks: dict[str, float] = {}
    starts = {}
    for item in step.items:
        if isinstance(item, Launch):
            starts[item.name] = clocks.get(item.stream, 0.0)
            clocks[item.stream] = starts[item.name] + times[item.name]
            continue
        ends = (item.origin, item.stream) if isinstance(item, Fork) else (item.stream, item.target)
        clocks[ends[1]] = max(clocks.get(end, 0.0) for end in ends)
    return starts


def test_measured_launches_start_when_streams_and_events_let_them(
    plans: dict[str, PipelinePlan],
) -> None:
    for plan, method in methods_of(plans):
        times = times_of(method.plan)
        schedule = schedule_of(plan, method.plan, times)
        expected = longest_ways(method.plan, times)
        assert {bar.name: bar.start for bar in schedule.bars} == pytest.approx(expected)
        assert {bar.name: bar.duration for bar in schedule.bars} == pytest.approx(times)


def test_estimates_are_those_that_rank_repairs(plans: dict[str, PipelinePlan]) -> None:
    for plan, method in methods_of(plans):
        schedule = timed_schedule(plan, method.plan, method.name)
        assert schedule.total == layer_time(plan, method.plan)
        assert schedule.label == "estimated" and schedule.basis.startswith("Estimated, not run")


def test_a_launch_may_be_late_by_its_slack_and_by_no_more(plans: dict[str, PipelinePlan]) -> None:
    for plan, method in methods_of(plans):
        times = times_of(method.plan)
        schedule = schedule_of(plan, method.plan, times)
        for bar in schedule.bars:
            within = {**times, bar.name: times[bar.name] + 0.999 * bar.slack}
            beyond = {**times, bar.name: times[bar.name] + bar.slack + 0.5}
            assert schedule_of(plan, method.plan, within).total == pytest.approx(schedule.total)
            late = schedule_of(plan, method.plan, beyond).total
            assert late == pytest.approx(schedule.total + 0.5), bar.name


def test_the_critical_path_fills_the_layer(plans: dict[str, PipelinePlan]) -> None:
    for plan, method in methods_of(plans):
        schedule = schedule_of(plan, method.plan, times_of(method.plan))
        assert sum(bar.duration for bar in schedule.path) == pytest.approx(schedule.total)
        assert all(bar.slack == pytest.approx(0.0, abs=1e-9) for bar in schedule.path)
        hot = [link for link in schedule.links if link.critical]
        assert len(hot) == len(schedule.path) - 1


def test_a_side_stream_that_takes_long_becomes_critical(plans: dict[str, PipelinePlan]) -> None:
    plan = plans["dsa_tp"]
    step = next(m.plan for m in plan.methods if m.name == "_front")
    slow = {**times_of(step), "mla_query": 500.0}
    path = [bar.name for bar in schedule_of(plan, step, slow).path]
    assert path == ["packed_gemm", "mla_query", "sparse_decode", "mla_value", "o_proj"]


def test_marks_are_the_decided_overlap(plans: dict[str, PipelinePlan]) -> None:
    for plan, method in methods_of(plans):
        schedule = timed_schedule(plan, method.plan, method.name)
        before: dict[str, Launch] = {}
        for bar, launch in zip(schedule.bars, method.plan.launches, strict=True):
            first = before.get(launch.stream)
            before[launch.stream] = launch
            assert bool(bar.plain) == (not launch.pdl.attribute)
            held = launch.pdl.release_reason.startswith("held")
            assert bool(bar.held) == held
            if bar.held:
                note = schedule.notes[bar.held - 1]
                assert note == f"{launch.name} {launch.pdl.release_reason}"
            words = ("after_weights", "after_wait", "after_loads", "release is the library's")
            released = first is not None and first.pdl.release_reason in words
            assert bar.early == (launch.pdl.attribute and released)


def test_links_are_streams_forks_and_joins(plans: dict[str, PipelinePlan]) -> None:
    plan = plans["dsa_tp"]
    step = next(m.plan for m in plan.methods if m.name == "_front")
    schedule = timed_schedule(plan, step, "_front")
    names = [bar.name for bar in schedule.bars]
    links = {(names[link.first], names[link.second]): link.kind for link in schedule.links}
    assert links.pop(("packed_gemm", "mla_query")) == "fork"
    assert links.pop(("mla_query", "sparse_decode")) == "join"
    assert set(links.values()) == {"stream"} and len(links) == 6


def test_what_is_not_measured_is_named_and_estimated(plans: dict[str, PipelinePlan]) -> None:
    plan = plans["dsa_tp"]
    step = next(m.plan for m in plan.methods if m.name == "_front")
    times = times_of(step)
    del times["topk_select"], times["o_proj"]
    schedule = schedule_of(plan, step, times)
    assert schedule.label == "6 of 8 launches measured on GPU"
    assert "Not measured, so estimated (topk_select, o_proj)" in schedule.basis
    assert [bar.name for bar in schedule.bars if not bar.measured] == ["topk_select", "o_proj"]
    none = schedule_of(plan, step, {})
    assert none.label == "estimated" and none.total == layer_time(plan, step)


def test_an_unmeasured_launch_has_the_gap_and_a_measured_one_contains_it(
    plans: dict[str, PipelinePlan],
) -> None:
    plan = plans["dsa_tp"]
    step = next(m.plan for m in plan.methods if m.name == "_front")
    only = tuple(launch for launch in step.launches if launch.stream == "main")[:3]
    step = replace(step, items=only)
    first, second, third = schedule_of(plan, step, {only[0].name: 5.0, only[2].name: 7.0}).bars
    assert (first.start, first.end) == (0.0, 5.0)
    assert second.start == pytest.approx(5.6)  # launched by PDL
    assert (third.start, third.duration) == pytest.approx((second.end, 7.0))
