"""Tuning a layer whose ranks exchange words: rank 0 alone, on the reference backend."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tune_recorded import STEADY, planned, record

from kpipe.codegen.cli import main
from kpipe.codegen.plan.api import plan_pipeline
from kpipe.codegen.tune import plan as tune_plan
from kpipe.codegen.tune.model import Tuning
from kpipe.runtime import tune_bench
from kpipe.runtime.bench_peers import NOTE
from kpipe.runtime.comm.mailbox import MailboxTimeout
from kpipe.runtime.tune import WRONG, measure
from kpipe.runtime.tune_bench import DeviceBench, header, host_machine
from kpipe.runtime.tune_plan import Plan, Step, read_plan
from kpipe.runtime.tune_results import Results

PIPELINES = Path(__file__).parents[2] / "pipelines"
LAYERS, RANKS, TOP_K, CONTEXT = 3, 2, 16, 101
SMALL = f"""\
extends: dsa_dcp.yaml
name: small
geometry: small
parallel: {{tp: {RANKS}, dcp: {RANKS}}}
"""
ALONE = f"rank 0 of {RANKS} is timed alone"


def project(folder: Path) -> Path:
    """The shipped pipelines in a project of their own, and a small one beside them."""
    shutil.copytree(PIPELINES, folder / "pipelines")
    (folder / "kpipe.toml").touch()
    (folder / "pipelines" / "small.yaml").write_text(SMALL)
    return folder / "pipelines"


def written(tuning: Tuning, folder: Path) -> Plan:
    for name, text in {**tuning.files, "plan.json": json.dumps(tuning.as_json())}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read_plan(folder)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """Modes of the spec at few rows, whose sum is one-shot; two tiles at 64 rows, four a request,
    where it is two-shot."""
    spec = project(tmp_path_factory.mktemp("project")) / "small.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_plan, "found_modes", lambda *given: [])
        modes = planned(spec, rows=(2,), queries=(1,), modes=8, tiles=1, context=CONTEXT)
    tiles = planned(spec, rows=(64,), queries=(4,), modes=1, tiles=2, context=CONTEXT)
    two = tuple(step for step in tiles.steps if step.op in ("o_proj", "topk_local"))
    return {
        "modes": written(modes, tmp_path_factory.mktemp("modes")),
        "tiles": written(replace(tiles, steps=two), tmp_path_factory.mktemp("tiles")),
    }


class Clock:
    """Captures by running, and replays what it has captured; writes down the order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def capture(self, runs: Sequence[Callable[[], object]], before: Any) -> list[Callable]:
        before()
        for run in runs:
            run()
        return list(runs)

    def replay_us(self, graph: list[Callable], runs: int, before: Any) -> float:
        before()
        self.log.append("replay")
        for run in graph:
            run()
        return 10.0

    def graphed(self, run: Callable[[], object]) -> Callable[[], object]:
        def replay() -> None:
            self.log.append("words")
            run()

        return replay


def bench_of(plan: Plan, clock: Clock | None = None) -> DeviceBench:
    clock = clock or Clock()
    machine = replace(
        host_machine(capture=clock.capture, replay_us=clock.replay_us), graphed=clock.graphed
    )
    return DeviceBench(plan, machine, layers=LAYERS)


def present_of(bench: DeviceBench, step: Step) -> list[Any]:
    """The layers of the present choice, which have run once."""
    bench._open_inputs(step)
    layers = bench._bound(bench.layer_class(step, step.candidates[0]))
    bench._run(layers)
    return layers


@pytest.mark.parametrize("which", ["modes", "tiles"])
def test_every_candidate_runs_finds_its_words_and_agrees(
    plans: dict[str, Plan], which: str, tmp_path: Path
) -> None:
    plan, clock = plans[which], Clock()
    head = {"schema": "s", "gpu": "none", "arch": plan.arch, "plan": plan.document}
    results = Results(tmp_path / "r.json", head)
    assert measure(plan, results, bench_of(plan, clock), rounds=1) == ()
    assert results.failed == {}
    for step in plan.steps:
        assert set(results.rounds[step.key][0]) == {one.name for one in step.candidates}
        # One number format throughout, so that modes and tiles are the same function here.
        assert set(results.differences[step.key].values()) == {0.0}
    # Without its words a replay would find nothing: what a layer reads it arms again.
    assert clock.log[-2:] == ["words", "replay"]


def test_without_its_words_a_rank_says_what_is_missing(plans: dict[str, Plan]) -> None:
    plan = plans["modes"]
    layers = present_of(bench_of(plan), plan.steps[0])
    with pytest.raises(MailboxTimeout, match="rank 0: rank 1 has not written"):
        layers[0].run()


@pytest.mark.parametrize("which", ["modes", "tiles"])
def test_the_rank_attends_to_its_share_of_the_selected_keys(
    plans: dict[str, Plan], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as one of `RANKS` ranks has on average, in every layer; with fewer keys than are
    selected all of its own."""
    plan = plans[which]
    bench, step = bench_of(plan), plan.steps[0]
    layers = present_of(bench, step)
    for most in (CONTEXT, TOP_K):
        for one in layers:
            one.step.lengths.clamp_(max=most)
        bench._peers.words(layers)()
        for one in layers:
            one.run()
            valid = one.layer.buffers["valid"][: step.rows]
            for row, found in enumerate(valid.tolist()):
                keys = most - step.q + 1 + row % step.q
                if keys <= TOP_K:
                    assert found == -(-keys // RANKS)
                else:  # equal scores are more often zero than anything else
                    assert abs(found - TOP_K // RANKS) <= 1


def test_words_are_made_by_the_present_choice_alone(plans: dict[str, Plan]) -> None:
    """Once for all keys and once for as many as are selected, in whatever number of steps."""
    plan = plans["tiles"]
    bench, made = bench_of(plan), []
    real = bench._peers._made

    def making(layers: Sequence[Any], rows: int) -> Any:
        made.append((rows, int(layers[0].step.lengths[0])))
        return real(layers, rows)

    bench._peers._made = making  # type: ignore[method-assign]
    for step in plan.steps[:2]:
        bench.open(step, [one.name for one in step.candidates])
    assert made == [(64, CONTEXT), (64, TOP_K)]
    bench._place = (0, 0)  # other rows come: nothing that was made is of use
    bench.open(plan.steps[0], [plan.steps[0].present])
    assert len(made) == 4


@pytest.mark.parametrize("which", ["modes", "tiles"])
@pytest.mark.parametrize(
    ("broken", "returned"), [("sparse_decode", "partial"), ("dcp_value", "gated")]
)
def test_what_a_candidate_does_wrong_is_not_drowned_by_its_peers(
    plans: dict[str, Plan], which: str, broken: str, returned: str
) -> None:
    plan = plans[which]
    bench, step = bench_of(plan), plan.steps[0]
    real = bench.layer_class

    def spoiled(op: Any) -> Any:
        """A tenth too large is what the op returns by that name."""

        def reference(*operands: Any, **named: Any) -> None:
            op.reference(*operands, **named)
            given = dict(zip(signature(op.reference).parameters, operands, strict=False))
            (given | named)[returned].mul_(1.1)

        return replace(op, reference=reference) if op.name == broken else op

    def layer_class(step: Step, candidate: Any) -> Any:
        found = real(step, candidate)
        if candidate.name == step.present:
            return found
        return type(found.__name__, (found,), {"OPS": tuple(map(spoiled, found.OPS))})

    bench.layer_class = layer_class  # type: ignore[method-assign]
    found = bench.open(step, [one.name for one in step.candidates])
    assert found[step.candidates[1].name].difference > WRONG


def test_the_plan_and_the_results_say_what_is_not_in_the_times(
    plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans["tiles"]
    (note,) = plan.document["notes"]
    assert ALONE in note and "NVLink" in note
    monkeypatch.setattr(tune_bench.torch.cuda, "get_device_name", lambda: "GPU X")
    assert header(plan, "s")["metric"].endswith(f"; rank 0 of {RANKS} alone, {NOTE}")


def test_the_command_says_it_and_apply_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = project(tmp_path) / "dsa_dcp.yaml"
    monkeypatch.chdir(tmp_path)
    words = ["plan", "pipelines/dsa_dcp.yaml", "--rows", "4,64", "--q", "1", "--modes", "1"]
    result = CliRunner().invoke(main, ["tune", *words, "--out", "p"])
    assert result.exit_code == 0, result.stderr
    assert "rank 0 of 8 is timed alone" in result.stdout and "NVLink" in result.stdout
    plan = json.loads(Path("p/plan.json").read_text())
    faster = {
        "o_proj q1 rows 4": ("tile_n 56, tokens 8", STEADY * 0.9),
        "mla_query q1 rows 64": ("tokens 32", STEADY * 0.9),
    }
    record(tmp_path / "results.json", plan, faster)
    applying = ["tune", "apply", "pipelines/dsa_dcp.yaml", "results.json"]
    result = CliRunner().invoke(main, applying)
    assert result.exit_code == 0, result.stderr
    tiles = {
        (step.arch, step.rows): {x.op: dict(x.tactic) for x in step.launches}
        for step in plan_pipeline(str(spec)).plans
        if step.q == 1
    }
    assert tiles["sm_90a", 4]["o_proj"] == {"tile_n": 56, "tokens": 8}
    assert tiles["sm_90a", 64]["mla_query"] == {"tokens": 32}
    assert tiles["sm_100a", 4]["o_proj"] == {"tile_n": 64, "tokens": 8}
    assert "# tuned: sm_90a by whole layers of one rank; NVIDIA X1" in spec.read_text()
    assert CliRunner().invoke(main, applying).stderr.endswith("nothing to change\n")


def test_a_mode_that_wins_is_written_into_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = project(tmp_path) / "dsa_dcp.yaml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune_plan, "found_modes", lambda *given: [])
    tuning = planned(spec, rows=(4,), queries=(1,), modes=8, tiles=1)
    (step,) = tuning.steps
    assert step.present == "wait" and "fork" in [one.name for one in step.candidates]
    wins = {step.key: ("fork", STEADY * 0.9)}
    record(tmp_path / "results.json", tuning.as_json(), wins)
    result = CliRunner().invoke(main, ["tune", "apply", str(spec), "results.json"])
    assert result.exit_code == 0, result.stderr
    modes = {(s.arch, s.q, s.rows): s.mode for s in plan_pipeline(str(spec)).plans}
    assert modes["sm_90a", 1, 4] == "fork" and modes["sm_100a", 1, 4] == "wait"
