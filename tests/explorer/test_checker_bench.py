"""The comparison of a checker with the explorer notices wrong checkers and counts them."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from explorer.chains import captured, eager, middle, reader, writer
from explorer.machine import racy_pairs
from kpipe.codegen.proof.program import Program

FILE = Path(__file__).resolve().parents[2] / "bench" / "checker.py"
FREE = frozenset()


def explorer_itself(program: Program, assumptions: frozenset[str] = FREE) -> frozenset:
    """A checker without any error."""
    return racy_pairs(program, 1, assumptions)


def accepts_all(program: Program, assumptions: frozenset[str] = FREE) -> frozenset:
    """A checker that never finds a race."""
    return frozenset()


def trusts_m1(program: Program, assumptions: frozenset[str] = FREE) -> frozenset:
    """A checker that always grants m1."""
    return racy_pairs(program, 1, assumptions | {"m1"})


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The bench as a module; what it puts on the path is taken away again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("checker_bench", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "checker_bench", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SHARES", 1000)
    monkeypatch.setattr(module, "two_kernel_programs", lambda share: iter(()))
    return module


def provide(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    """Put a module of the proof in place for one test."""
    module = ModuleType(f"kpipe.codegen.proof.{name}")
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def run(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, checker: Callable, *words: str
) -> int | str | None:
    """Exit status of the bench with this checker."""
    provide(monkeypatch, "races", racy_pairs=checker)
    fixed = ["checker.py", "--schedules", "60", "--processes", "1"]
    monkeypatch.setattr(sys, "argv", [*fixed, *words])
    with pytest.raises(SystemExit) as stopped:
        bench.main()
    return stopped.value.code


@pytest.mark.parametrize(
    ("checker", "status"), [(explorer_itself, 0), (accepts_all, 1), (trusts_m1, 1)]
)
def test_exit_status(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    checker: Callable,
    status: int,
) -> None:
    out = tmp_path / "raw.json"
    assert run(bench, monkeypatch, checker, "--out", str(out)) == status
    raw = json.loads(out.read_text())
    assert raw["schema"] == "kpipe.bench.checker/1"
    mixed = raw["results"]["mixed"]
    assert mixed["schedules"] == 60 and 0 < mixed["safe"] < mixed["conflict"]
    assert (mixed["boundary"] > 10) and mixed["boundary_refused"] == 0
    assert bool(raw["disagreements"]["mixed"]) == bool(status)
    assert ("disagreement\nreading doc" in capsys.readouterr().out) == bool(status)


def test_wrong_rules_are_counted_and_survivors_named(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"accepts all": accepts_all, "no mutant": explorer_itself}
    provide(monkeypatch, "mutants", MUTANTS=wrong)
    assert run(bench, monkeypatch, explorer_itself, "--mutants") == 1
    text = capsys.readouterr().out
    assert "1 of 2 killed" in text and "survived: no mutant" in text
    assert "survived: accepts all" not in text


def test_missing_mutants_are_reported(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kpipe.codegen.proof.mutants", None)
    monkeypatch.setattr(bench, "MODES", ())
    assert run(bench, monkeypatch, explorer_itself, "--mutants") == 0
    assert "kpipe.codegen.proof.mutants does not exist" in capsys.readouterr().err


def test_one_schedule_is_counted_in_each_column(bench: ModuleType) -> None:
    silent = eager(writer(), middle(), reader(waits=True))
    tally = bench.Tally()
    bench.compare(tally, silent, trusts_m1)
    counts = tally.counts
    assert (counts["safe"], counts["clean"], counts["accepted"], counts["policy"]) == (0, 1, 1, 0)
    assert (counts["accepted_pairs"], counts["refused_pairs"], counts["m1_differs"]) == (1, 0, 0)
    assert counts["m3_differs"] == 1
    bench.compare(tally, silent, explorer_itself)
    assert (counts["conflict"], counts["accepted"], counts["policy"]) == (2, 1, 1)
    ordered = eager(writer(), reader(waits=True))
    bench.compare(tally, ordered, lambda program, assumptions: frozenset({(0, 0, 1, 0)}))
    assert (counts["safe"], counts["refused"], counts["refused_pairs"]) == (1, 1, 1)


def test_accesses_may_be_named_or_numbered(bench: ModuleType) -> None:
    program = captured(writer(), reader())
    first, second = (launch.node.accesses[0] for launch in program.launches)
    by_name = frozenset({(0, first, 1, second)})
    assert bench.named(program, racy_pairs(program)) == by_name
    assert bench.named(program, by_name) == by_name


def test_boundary_stops_at_the_first_racy_weakening(bench: ModuleType) -> None:
    tally = bench.Tally()
    bench.boundary(tally, eager(writer(), reader(waits=True)), explorer_itself, random.Random(0))
    assert tally.counts["boundary"] == 1 and tally.counts["boundary_refused"] == 0
    assert tally.counts["weakened_differs"] == 0
    bench.boundary(tally, eager(writer(), reader(waits=True)), accepts_all, random.Random(0))
    assert tally.counts["weakened_differs"] == 1
