"""The measuring step of `kpipe tune` with stand-ins for the machine: what is run, in which order,
what is kept, and what is not run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kpipe.runtime.tune import Lost, main, measure
from kpipe.runtime.tune_plan import Plan, PlanError, read_plan
from kpipe.runtime.tune_results import Results, ResultsError

NAMES = ("front", "fork", "late")


def candidate(name: str) -> dict[str, Any]:
    return {"name": name, "module": f"mode_{name}", "method": f"_{name}", "predicted_us": 1.0}


def plan_in(folder: Path, rows: Sequence[int] = (1, 4)) -> Plan:
    steps = [
        {
            "key": f"mode q1 rows {count}",
            "op": "",
            "q": 1,
            "rows": count,
            "module": "",
            "method": "",
            "candidates": [candidate(name) for name in NAMES],
        }
        for count in rows
    ]
    document = {
        "schema": "kpipe.tune_plan/1",
        "pipeline": "p",
        "arch": "sm_90a",
        "context": 1,
        "steps": steps,
    }
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(document))
    return read_plan(folder)


def header(plan: Plan) -> dict[str, Any]:
    return {
        "schema": "kpipe.tune_results/1",
        "gpu": "X",
        "arch": "sm_90a",
        "plan": plan.document,
    }


class Stand:
    """A bench whose candidates take as long as they are told; it writes down what was asked."""

    def __init__(self, **wrong: Any) -> None:
        self.wrong = wrong
        self.opened: list[tuple[str, tuple[str, ...]]] = []
        self.timed: list[tuple[str, str]] = []
        self.lost = False

    def open(self, step: Any, names: Sequence[str]) -> dict[str, Any]:
        self.opened.append((step.key, tuple(names)))
        found: dict[str, Any] = {}
        for name in names:
            what = self.wrong.get(name, 0.0)
            found[name] = what if isinstance(what, str) else Timed(self, step.key, name, what)
        return found

    def alive(self) -> bool:
        return not self.lost


class Timed:
    """A candidate of the stand-in; `difference` beyond 100 stands for a crash when it is timed."""

    def __init__(self, bench: Stand, key: str, name: str, difference: float) -> None:
        self.bench, self.key, self.name = bench, key, name
        self.difference = 0.0 if difference > 100 else difference
        self.crashes = difference > 100

    def us(self) -> float:
        self.bench.timed.append((self.key, self.name))
        if self.crashes:
            self.bench.lost = True
            raise RuntimeError("illegal address")
        return float(len(self.bench.timed))


def test_rounds_interleave_candidates_and_begin_with_another_each(tmp_path: Path) -> None:
    plan, bench = plan_in(tmp_path / "plan", (4,)), Stand()
    results = Results(tmp_path / "r.json", header(plan))
    assert measure(plan, results, bench, rounds=3) == ()
    order = [name for _, name in bench.timed]
    assert order == ["front", "fork", "late", "fork", "late", "front", "late", "front", "fork"]
    lines = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert [line.get("round") for line in lines] == [None, None, 0, 1, 2]
    assert lines[3]["us"] == {"front": 6.0, "fork": 4.0, "late": 5.0}  # in the order of the plan


def test_what_is_measured_is_not_measured_again(tmp_path: Path) -> None:
    plan, path = plan_in(tmp_path / "plan"), tmp_path / "r.json"
    first = Stand()
    stops = iter([False, False, False, True, True, True])  # behind the second round of a step
    left = measure(plan, Results(path, header(plan)), first, rounds=3, late=lambda: next(stops))
    assert left == ("mode q1 rows 1", "mode q1 rows 4")
    text = path.read_text()
    second = Stand()
    assert measure(plan, Results(path, header(plan)), second, rounds=3) == ()
    assert path.read_text().startswith(text)
    counts = {key: 0 for key, _ in first.timed + second.timed}
    for key, _ in first.timed + second.timed:
        counts[key] += 1
    assert counts == {"mode q1 rows 1": 9, "mode q1 rows 4": 9}
    third = Stand()
    assert measure(plan, Results(path, header(plan)), third, rounds=3) == () and not third.opened


def test_line_that_a_killed_run_left_is_dropped(tmp_path: Path) -> None:
    plan, path = plan_in(tmp_path / "plan", (4,)), tmp_path / "r.json"
    measure(plan, Results(path, header(plan)), Stand(), rounds=2)
    whole = path.read_text()
    path.write_text(whole[:-20])
    bench = Stand()
    assert measure(plan, Results(path, header(plan)), bench, rounds=2) == ()
    assert len(bench.timed) == 3  # one round
    assert [json.loads(line) for line in path.read_text().splitlines()]


def test_failed_candidate_is_noted_and_left_out(tmp_path: Path) -> None:
    plan, path = plan_in(tmp_path / "plan", (4,)), tmp_path / "r.json"
    bench = Stand(fork="LayerError: no room")
    results = Results(path, header(plan))
    assert measure(plan, results, bench, rounds=2) == ()
    assert results.failed == {"mode q1 rows 4": {"fork": "LayerError: no room"}}
    assert {name for _, name in bench.timed} == {"front", "late"}
    again = Results(path, header(plan))
    assert again.failed == results.failed and again.rounds == results.rounds


def test_other_output_than_the_present_choice_is_a_failure(tmp_path: Path) -> None:
    plan = plan_in(tmp_path / "plan", (4,))
    results = Results(tmp_path / "r.json", header(plan))
    measure(plan, results, Stand(fork=0.2, late=float("nan")), rounds=2)
    assert results.failed["mode q1 rows 4"] == {
        "fork": "its output is 0.2 away from the present choice's, more than 0.05",
        "late": "its output is nan away from the present choice's, more than 0.05",
    }


def test_without_the_present_choice_nothing_is_timed(tmp_path: Path) -> None:
    plan, bench = plan_in(tmp_path / "plan", (4,)), Stand(front="ValueError: x")
    assert measure(plan, Results(tmp_path / "r.json", header(plan)), bench, rounds=2) == ()
    assert bench.timed == []


def test_lost_machine_ends_the_run_and_the_culprit_is_not_tried_again(tmp_path: Path) -> None:
    plan, path = plan_in(tmp_path / "plan", (4,)), tmp_path / "r.json"
    with pytest.raises(Lost, match="mode q1 rows 4: the device stopped answering at `fork`"):
        measure(plan, Results(path, header(plan)), Stand(fork=1000.0), rounds=2)
    results, bench = Results(path, header(plan)), Stand()
    assert measure(plan, results, bench, rounds=2) == ()
    assert results.failed["mode q1 rows 4"] == {"fork": "RuntimeError: illegal address"}
    assert bench.opened == [("mode q1 rows 4", ("front", "late"))]


def test_progress_counts_steps(tmp_path: Path) -> None:
    plan, said = plan_in(tmp_path / "plan"), []
    measure(plan, Results(tmp_path / "r.json", header(plan)), Stand(), rounds=1, say=said.append)
    assert said == ["1/2  mode q1 rows 1: 3 candidates", "2/2  mode q1 rows 4: 3 candidates"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpu": "Y"}, "`gpu` is 'X' there and 'Y' here"),
        ({"plan": {}}, "has results of another plan"),
    ],
)
def test_file_of_another_run_is_refused(changed: dict, said: str, tmp_path: Path) -> None:
    plan, path = plan_in(tmp_path / "plan"), tmp_path / "r.json"
    Results(path, header(plan))
    with pytest.raises(ResultsError, match=said):
        Results(path, {**header(plan), **changed})
    path.write_text("no\n")
    with pytest.raises(ResultsError, match="is no file of results"):
        Results(path, header(plan))


def test_folder_without_a_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--out", "r.json"]) == 2
    assert "plan.json` cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text('{"schema": "x"}')
    with pytest.raises(PlanError, match="`schema` is 'x', not 'kpipe.tune_plan/1'"):
        read_plan(tmp_path)
    (tmp_path / "plan.json").write_text('{"schema": "kpipe.tune_plan/1", "steps": [{}]}')
    with pytest.raises(PlanError, match="lacks something"):
        read_plan(tmp_path)
