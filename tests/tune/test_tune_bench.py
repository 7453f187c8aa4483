"""A planned folder on the reference backend: its candidates run, and are told apart by results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tune_recorded import planned, project

from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.recording import recorded
from kpipe.runtime.tune import measure
from kpipe.runtime.tune_bench import DeviceBench, difference, host_machine
from kpipe.runtime.tune_plan import Plan, read_plan
from kpipe.runtime.tune_results import Results

LAYERS = 2


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    spec = project(tmp_path_factory.mktemp("project"))
    tuning = planned(spec, rows=(2,), queries=(1,), modes=3, tiles=3)
    folder = tmp_path_factory.mktemp("plan")
    document = json.dumps(tuning.as_json())
    for name, text in {**tuning.files, "plan.json": document}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read_plan(folder)


def bench_of(plan: Plan) -> DeviceBench:
    """A bench on the CPU, for which a chain takes 10 us and one more for every run in it."""

    def capture(runs: Sequence[Callable[[], object]], before: object) -> int:
        assert before is None
        for run in runs:
            run()
        return len(runs)

    machine = host_machine(capture=capture, replay_us=lambda graph, runs, before: 10.0 + graph)
    return DeviceBench(plan, machine, layers=LAYERS)


def test_every_candidate_of_a_plan_runs_and_agrees(plan: Plan, tmp_path: Path) -> None:
    header = {"schema": "s", "gpu": "none", "arch": plan.arch, "plan": plan.document}
    results = Results(tmp_path / "r.json", header)
    assert measure(plan, results, bench_of(plan), rounds=2) == ()
    assert results.failed == {}
    for step in plan.steps:
        assert set(results.rounds[step.key][1]) == {one.name for one in step.candidates}
        # One number format throughout, so that modes and tiles are the same function here.
        assert set(results.differences[step.key].values()) == {0.0}
        assert set(results.rounds[step.key][0].values()) == {10.0 + LAYERS}


def test_a_tile_is_timed_in_the_whole_layer(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    step = next(step for step in plan.steps if step.op == "o_proj")
    bench, entered = bench_of(plan), []
    monkeypatch.setattr(Layer, "_enter", lambda self, op: entered.append(op.name))
    assert not isinstance(bench.open(step, [step.present])[step.present], str)
    whole = [call.op for call in recorded(bench.base(), step.method)]
    # Run with all keys and with as many as are selected, then captured.
    assert entered == whole * 3 * LAYERS


def test_only_the_tile_of_its_op_changes(plan: Plan) -> None:
    step = next(step for step in plan.steps if step.op == "o_proj")
    bench = bench_of(plan)
    layer = bench.layer_class(step, step.candidates[1])
    tile = next(op for op in layer.OPS if op.name == "o_proj").tactic("sm_90a", step.rows)
    assert dict(tile) == dict(step.candidates[1].tactic)
    others = {op.name: op.tactics for op in layer.OPS if op.name != "o_proj"}
    assert others == {op.name: op.tactics for op in bench.base.OPS if op.name != "o_proj"}


def test_a_candidate_that_cannot_be_made_is_a_text(plan: Plan) -> None:
    step = next(step for step in plan.steps if not step.op)
    bench = bench_of(plan)
    real = bench.layer_class

    def broken(step, candidate):  # noqa: ANN001, ANN202
        if candidate.name == step.candidates[1].name:
            raise LayerError("no room")
        return real(step, candidate)

    bench.layer_class = broken  # type: ignore[method-assign]
    ready = bench.open(step, [one.name for one in step.candidates])
    assert ready[step.candidates[1].name] == "LayerError: no room"
    assert not isinstance(ready[step.present], str)


def test_lengths_are_as_they_were_when_time_is_taken(plan: Plan) -> None:
    step, bench = plan.steps[0], bench_of(plan)
    bench.open(step, [step.present])
    assert all(one.step.lengths.tolist() == [256, 256] for one in bench._inputs)


def test_output_that_is_not_finite_is_a_failure(plan: Plan, monkeypatch) -> None:  # noqa: ANN001
    step, bench = plan.steps[0], bench_of(plan)
    monkeypatch.setattr(bench, "_run", lambda layers: [torch.tensor([1.0, torch.inf])])
    ready = bench.open(step, [one.name for one in step.candidates])
    assert ready == {step.present: "LayerError: its output is not finite"}


def test_nothing_is_tried_behind_a_lost_device(plan: Plan) -> None:
    step = next(step for step in plan.steps if len(step.candidates) > 2)
    bench = bench_of(plan)
    real, lost = bench.layer_class, []

    def crashing(step, candidate):  # noqa: ANN001, ANN202
        if candidate.name != step.present:
            lost.append(candidate.name)
            raise RuntimeError("illegal address")
        return real(step, candidate)

    bench.layer_class = crashing  # type: ignore[method-assign]
    bench.alive = lambda: not lost  # type: ignore[method-assign]
    ready = bench.open(step, [one.name for one in step.candidates])
    assert list(ready) == [one.name for one in step.candidates[:2]]


def test_difference_is_relative_and_sees_nan() -> None:
    one, other = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert difference([one, other], [one, one]) == pytest.approx(0.1)
    assert difference([one, one * torch.nan], [one, one]) != difference([one], [one])
    assert difference([one * torch.nan, one], [one, one]) != 0.0
