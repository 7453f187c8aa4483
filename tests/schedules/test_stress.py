"""Stressed schedules: a timed machine, which knows no rule, finds what the checker states."""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest
from fake_gpu import FakeMachine
from timed import wrong_values

from kpipe.codegen.proof.program import Access, Kernel, Launch, Program, Segment
from kpipe.codegen.proof.schedule_form import decode, encode
from kpipe.runtime import stress as stress_run
from kpipe.runtime.schedules import trial_file

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def stress() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stress_bench", BENCH / "stress.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["stress_bench"] = module  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(stress: ModuleType) -> dict:
    """Wrong words of every schedule's trials, by rule, file, side, mode and verdict."""
    words = defaultdict(list)
    for trial in stress.trials()[0]:
        delays = {(position, early): us for position, early, us in trial.delays}
        verdict = "" if trial.side == "fixed" else trial.verdict
        key = (trial.rule, trial.file, trial.side, trial.mode, verdict)
        words[key].append(wrong_values(trial.schedule, delays, dict(trial.holds)))
    return words


def test_no_repaired_schedule_goes_wrong(found: dict) -> None:
    repaired = {key: words for key, words in found.items() if key[2] == "fixed"}
    assert len(repaired) > 100
    assert {key: words for key, words in repaired.items() if any(words)} == {}


def test_every_racy_schedule_goes_wrong(found: dict) -> None:
    racy = {key: words for key, words in found.items() if key[4] in ("racy", "dirty")}
    assert len({key[0] for key in racy}) >= 15
    assert [key for key, words in racy.items() if not any(words)] == []


def test_what_is_left_out_says_why(stress: ModuleType) -> None:
    trials, left_out = stress.trials()
    assert len({trial.id for trial in trials}) == len(trials)
    said = set(left_out.values())
    assert "`xq` is reached through the async proxy" in said
    assert any("a copy cannot be delayed" in why for why in said)


def results(stress: ModuleType, wrong) -> list[dict]:  # noqa: ANN001
    return [
        {"id": one.id, "repetitions": 40, "wrong": 40 * wrong(one)} for one in stress.trials()[0]
    ]


def judged(stress: ModuleType, tmp_path: Path, wrong) -> int:  # noqa: ANN001
    path = tmp_path / "stressed.json"
    head = {"schema": "kpipe.stressed/1", "gpu": "g", "arch": "a", "driver": "d", "versions": {}}
    path.write_text(json.dumps({**head, "results": results(stress, wrong)}))
    return stress.judge_file(path, tmp_path / "judged.json")


def test_judging(stress: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    racy = lambda one: one.side == "racy" and one.verdict == "racy"  # noqa: E731
    assert judged(stress, tmp_path, racy) == 0
    shown = capsys.readouterr().out
    assert "| capture_fork | 5 of 5 |" in shown and ", 0 broken repairs" in shown
    assert "racy and never wrong: KP605_must_be_zero/1, eager: 0 of 80" in shown
    data = json.loads((tmp_path / "judged.json").read_text())
    assert data["rules"]["relay"]["racy_wrong"] == data["rules"]["relay"]["racy"] > 0
    assert data["repaired_and_wrong"] == []
    one_fixed = lambda one: racy(one) or one.id.startswith("relay/1/fixed/eager")  # noqa: E731
    assert judged(stress, tmp_path, one_fixed) == 1
    assert "repaired and wrong: relay/1, eager: 80 of 80" in capsys.readouterr().out
    few = lambda one: racy(one) and one.rule in ("relay", "self_event")  # noqa: E731
    assert judged(stress, tmp_path, few) == 1


def test_a_trial_that_was_refused_is_told_and_not_counted(
    stress: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    racy = lambda one: one.side == "racy" and one.verdict == "racy"  # noqa: E731
    given = [one for one in results(stress, racy) if not one["id"].startswith("relay/1/fixed")]
    lost = [one.id for one in stress.trials()[0] if one.id.startswith("relay/1/fixed")]
    path = tmp_path / "stressed.json"
    head = {"schema": "kpipe.stressed/1", "gpu": "g", "arch": "a", "driver": "d", "versions": {}}
    refused = [{"id": one, "error": "cuX: no (1)"} for one in lost]
    path.write_text(json.dumps({**head, "results": given, "refused": refused}))
    assert stress.judge_file(path, None) == 1
    shown = capsys.readouterr().out
    assert f"refused: {lost[0]}: cuX: no (1)" in shown and ", 0 broken repairs" in shown


def test_results_of_another_plan_are_refused(stress: ModuleType) -> None:
    given = results(stress, lambda one: False)
    with pytest.raises(ValueError, match="the results lack .*: run today's plan"):
        stress.judge(given[1:])


def test_the_form_keeps_what_the_checker_looks_at() -> None:
    box = ((0, 4),)
    kernel = Kernel("k", (Access("x", True, True, box), Access("y", False)), True, True, "early")
    program = Program((Segment((Launch(1, kernel),), True, 1),))
    assert decode(json.loads(json.dumps(encode(program, touches=True)))) == program
    square = Kernel("k", (Access("x", True, box=((0, 4), (0, 4))),))
    with pytest.raises(ValueError, match="the region of `x` has 2 axes"):
        encode(Program((Segment((Launch(0, square),)),)), touches=True)
    with pytest.raises(ValueError, match="schema 'other' is not kpipe.schedule/1"):
        decode({"schema": "other"})


def test_the_plan_runs_and_only_dirt_shows_in_order(
    stress: ModuleType, machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan, run and judge together: where all happens in order, only what no order repairs."""
    wanted = [one for one in stress.trials()[0] if one.file == "1"]
    monkeypatch.setattr(stress, "trials", lambda: (wanted, {}))
    plan, out = tmp_path / "plan.json", tmp_path / "stressed.json"
    assert stress.plan(plan) == 0
    words = ["--plan", str(plan), "--out", str(out), "--repetitions", "2"]
    options = trial_file.parser("stress", "", plan=True).parse_args(words)
    assert trial_file.main(options, stress_run._stress) == 0
    tallies, broken, _ = stress.judge(json.loads(out.read_text())["results"])
    assert {rule for rule, one in tallies.items() if one.racy_wrong} == {"KP605_must_be_zero"}
    assert broken == [] and stress.judge_file(out, None) == 1  # one rule is not five
