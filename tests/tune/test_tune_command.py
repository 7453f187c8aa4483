"""`kpipe tune SPEC`: the three steps in a row, with a stand-in for the machine's GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tune_recorded import STEADY, project, record

import kpipe.codegen.commands.common as common
import kpipe.codegen.commands.tune as command
from kpipe.codegen.cli import main
from kpipe.codegen.plan.api import plan_pipeline


def test_all_three_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = project(tmp_path)
    monkeypatch.chdir(tmp_path)
    ran: list[tuple[str, list[str]]] = []

    def measured(module: str, arguments: list[str]) -> int:
        ran.append((module, list(arguments)))
        plan = json.loads(Path(arguments[0], "plan.json").read_text())
        record(Path(arguments[2]), plan, {"mode q1 rows 8": ("serial", STEADY * 0.8)})
        return 0

    monkeypatch.setattr(command, "run_runtime", measured)
    words = ["tune", "base.yaml", "--rows", "8", "--q", "1", "--tiles", "1", "--minutes", "2"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.stderr
    assert ran == [("tune", ["tuning", "--out", "tuning/results.json", "--minutes", "2.0"])]
    assert "-> serial for 8" in result.stdout
    modes = {(s.arch, s.q, s.rows): s.mode for s in plan_pipeline(str(spec)).plans}
    assert modes["sm_90a", 1, 8] == "serial" and modes["sm_100a", 1, 8] == "fork"


def test_measurement_that_is_not_complete_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = project(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = spec.read_text()
    monkeypatch.setattr(command, "run_runtime", lambda module, arguments: 1)
    result = CliRunner().invoke(main, ["tune", "base.yaml", "--rows", "8", "--tiles", "1"])
    assert result.exit_code == 1 and spec.read_text() == text


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["generated/x", "--rows", "4"], "bench"),
        (["new.json", "--against", "old.json"], "bench_against"),
        (["new.json", "--against=old.json"], "bench_against"),
    ],
)
def test_a_comparison_does_not_load_torch(
    words: list[str], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr(common, "run_runtime", lambda *given: ran.append(given) or 0)
    assert CliRunner().invoke(main, ["bench", *words]).exit_code == 0
    assert ran == [(module, tuple(words))]
