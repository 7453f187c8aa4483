"""The comparison of a checker with the explorer notices wrong checkers and counts them."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from explorer.chains import (
    READ_X,
    WRITE_X,
    captured,
    eager,
    edge,
    middle,
    reader,
    touching,
    writer,
)
from explorer.machine import racy_pairs
from kpipe.codegen.proof.program import Copy, Kernel, Program

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
    values = raw["abstraction_loss"]["mixed"]["values"]
    assert values["safe"] == mixed["safe"] + values["refused"] and values["percent"] < 10
    assert sum(values["classes"].values()) == values["refused"]
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


def loss(bench: ModuleType, program: Program, checker: Callable = racy_pairs) -> dict[str, int]:
    """What one schedule adds to the abstraction loss, over many draws of the triggers."""
    counts: Counter[str] = Counter()
    for seed in range(40):
        racy = bool(racy_pairs(program))
        draw = random.Random(seed)
        bench.abstraction.measure(counts, program, racy, checker(program), draw)
    return {key: n for key, n in counts.items() if n}


def test_every_loss_has_its_class(bench: ModuleType) -> None:
    forked = (Copy("F"), edge(0, 1), writer(), (1, writer("never")), edge(1, 0))
    dead = loss(bench, eager(*forked, writer("never"), reader(pdl=False)))
    assert dead == {"loss values": 40, "loss both": 40} | {
        f"loss {truth}: dead write": 40 for truth in ("values", "both")
    }
    reading = touching(writer(), READ_X)
    found = loss(bench, eager(reading, writer("never", pdl=True)))
    assert found["loss latest: read consumed before the trigger"] == found["loss latest"] == 40
    assert 5 < found["loss consumed"] == found["loss both"] < 35
    assert found["loss consumed"] == found["loss consumed: read consumed before the trigger"]
    assert found["loss both"] == found["loss both: read consumed before the trigger"]
    assert "loss values" not in found and "loss fenced" not in found
    storing = replace(writer(), fenced=True)
    found = loss(bench, eager(storing, reader()))
    assert set(found) == {"loss fenced", "loss fenced: store published by a fenced trigger"}
    assert loss(bench, eager(writer(), reader())) == {}  # not fenced


def test_a_write_that_its_own_kernel_alone_reads(bench: ModuleType) -> None:
    """In place behind an implicit trigger: read before the child starts, visible after."""
    own = Kernel("K", (*WRITE_X, *READ_X))
    program = eager(own, writer("never", pdl=True), writer("never"))
    assert loss(bench, program)["loss values: write that its own kernel alone reads"] == 40


def test_what_nobody_refuses_or_nobody_orders_is_no_loss(bench: ModuleType) -> None:
    assert loss(bench, eager(writer(), reader())) == {}
    assert loss(bench, eager(writer(), reader(waits=True))) == {}
    refused = loss(bench, eager(writer(), reader(waits=True)), lambda program: {(0, 0, 1, 0)})
    assert refused == {}  # an error of the checker, counted elsewhere
    assert loss(bench, eager(touching(writer(), READ_X), writer(pdl=True)), accepts_all) == {}


def test_a_loss_without_a_cause_is_unexplained(bench: ModuleType) -> None:
    """The checker names a pair that has nothing to do with why the schedule is safe."""
    abstraction = bench.abstraction
    forked = (Copy("F"), edge(0, 1), writer(), (1, writer("never")), edge(1, 0))
    program = eager(*forked, writer("never"), reader(pdl=False))
    found = loss(bench, program, lambda program: frozenset({(3, 0, 4, 0)}))
    assert found["loss values: unexplained"] == 40
    found = loss(bench, program, lambda program: frozenset({(2, 0, 3, 0)}))
    assert found["loss values: unexplained"] == 40  # the later store is read
    assert abstraction.misses({"eager": Counter(found)}) == [
        "abstraction loss, eager: 80 unexplained"
    ]


def test_gates_of_the_abstraction_loss(bench: ModuleType) -> None:
    abstraction = bench.abstraction

    def missed(safe: int, truth: str, refused: int) -> list[str]:
        return abstraction.misses({"captured": Counter({"safe": safe, f"loss {truth}": refused})})

    assert missed(980, "values", 20) == []  # too few to decide
    assert missed(4900, "values", 99) == []
    assert missed(4900, "values", 100) == ["abstraction loss, captured, values: 2.00 %"]
    text = "abstraction loss, captured, reads consumed before the trigger: 2.00 %"
    assert missed(4900, "consumed", 100) == [text]
    assert [missed(4900, truth, 400) for truth in ("both", "latest", "fenced")] == [[], [], []]


def test_upper_bound_is_exact(bench: ModuleType) -> None:
    """None of n is at most the n-th root; 3 of 10 stands in tables of the binomial."""
    bound = bench.abstraction.upper_bound
    assert bound(0, 50) == pytest.approx(1 - 0.05 ** (1 / 50))
    assert bound(3, 10) == pytest.approx(0.6066, abs=1e-4)
    assert bound(9, 10) == pytest.approx(0.95 ** (1 / 10))


def test_a_loss_beyond_its_gate_fails_the_run(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.abstraction, "ENOUGH", 10)
    monkeypatch.setattr(bench.abstraction, "LIMIT", 0.0)
    assert run(bench, monkeypatch, explorer_itself) == 1
    text = capsys.readouterr().out
    assert "abstraction loss, refused but safe" in text
    assert "missed: abstraction loss, mixed, values: " in text


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
