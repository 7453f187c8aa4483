"""The GPU fuzz without a GPU: text form, rows, and the judge on a machine with known answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from explorer.chains import captured, eager, edge, reader, writer
from explorer.enqueue import enqueue
from kpipe.codegen.proof.mutants import MUTANTS
from kpipe.codegen.proof.program import Copy, Kernel, Launch, Program, Record, Segment, Wait

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "fuzz"
NAMES = ("schedules", "simulate", "judge", "run_gpu")


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the fuzz; neither they nor their folder stay importable."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    modules = {name: __import__(name) for name in NAMES}
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name)
    return SimpleNamespace(**modules)


def simulated(fuzz: SimpleNamespace, count: int) -> list[tuple[str, bytes]]:
    """Schedules, and the orders that the simulated machine breaks."""
    machine = fuzz.simulate.Simulator()
    programs = enumerate(fuzz.schedules.generate(3, count))
    return [(fuzz.schedules.encode(p), machine.run(p, 6, number)) for number, p in programs]


def test_a_line_keeps_all_but_accesses_and_names(fuzz: SimpleNamespace) -> None:
    nodes = (
        Kernel("n0", (), True, True, "after_wait", True),
        Copy("n1"),
        Kernel("n2", (), trigger="early"),
    )
    eager_part = (Launch(0, nodes[0]), Record(0, 3), Wait(2, 3), Launch(2, nodes[1]))
    program = Program((Segment(eager_part), Segment((Launch(1, nodes[2]),), True, 1)))
    line = fuzz.schedules.encode(program)
    assert line == "E K0pwlf R0.3 W2.3 M2 G1 K1e"
    assert fuzz.schedules.decode(line) == program
    assert fuzz.schedules.rows(program) == [
        (0, 0, 0, 1 | 2 | 8 | 16),
        (3, 0, 0, 0),
        (4, 2, 0, 0),
        (2, 2, 1, 0),
        (5, 1, 0, 0),
        (0, 1, 2, 4),
        (6, 1, 0, 0),
    ]


def test_random_programs_survive_their_text(fuzz: SimpleNamespace) -> None:
    for program in fuzz.schedules.generate(0, 100):
        again = fuzz.schedules.decode(fuzz.schedules.encode(program))
        assert fuzz.schedules.rows(again) == fuzz.schedules.rows(program)
        for mine, other in zip(enqueue(again), enqueue(program), strict=True):
            assert (mine.flushed, mine.parents) == (other.flushed, other.parents)


@pytest.mark.parametrize("word", ["K", "R0", "W0.", "M0.1", "X1", "K0q"])
def test_unknown_words_are_refused(fuzz: SimpleNamespace, word: str) -> None:
    with pytest.raises(ValueError, match=f"schedule .* has an unknown word '{word}'"):
        fuzz.schedules.decode(f"E {word}")
    with pytest.raises(ValueError, match="unknown word 'K0'"):
        fuzz.schedules.decode("K0")


def test_events_of_captures_are_told_apart(fuzz: SimpleNamespace) -> None:
    program = fuzz.schedules.decode("E R0.1 W1.1 G0 R0.1 W1.1 K1 R1.2 W0.2")
    events = [row[2] for row in fuzz.schedules.rows(program) if row[0] in (3, 4)]
    assert events == [0, 0, 16, 16, 17, 17]


def test_result_bytes_and_bits_have_the_order_of_the_gpu_side(fuzz: SimpleNamespace) -> None:
    assert fuzz.schedules.pairs(4) == [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
    places = [fuzz.schedules.bit(source, target) for source in "TXE" for target in "SW"]
    assert places == [1, 2, 4, 8, 16, 32]


def test_what_can_be_seen(fuzz: SimpleNamespace) -> None:
    program = fuzz.schedules.decode("E K0 K0pw M0 M0 K0w")
    seen = {
        (first, second): fuzz.schedules.observable(program, first, second)
        for first, second in fuzz.schedules.pairs(5)
    }
    at_start = fuzz.schedules.bit("E", "S")
    assert seen[0, 1] == 0b111111
    assert seen[0, 2] == seen[1, 2] == 0  # a memset
    assert seen[0, 3] == seen[2, 3] == at_start  # a memcpy
    assert seen[0, 4] == 0b010101  # the wait of a plain launch is its start
    assert seen[2, 4] == seen[3, 4] == at_start


def test_the_judge_finds_the_right_rules_unbroken_and_every_refuted_mutant_broken(
    fuzz: SimpleNamespace,
) -> None:
    judgement = fuzz.judge.Judgement()
    for line, broken in simulated(fuzz, 150):
        judgement.add(line, broken)
    assert fuzz.judge.failures(judgement) == [] and judgement.examples == []
    assert judgement.total("m1") > 0 and judgement.total("m3") > 0
    for mode in fuzz.judge.MODES:
        assert judgement.seen[mode] > 0.8 * judgement.open[mode] > 100
    sound = [name for name, rule in MUTANTS.items() if not rule.unsound]
    assert not any(judgement.total(name) or judgement.extra[name, "mixed"] for name in sound)


def test_a_broken_claim_is_a_failure_with_its_reasons(fuzz: SimpleNamespace) -> None:
    line = fuzz.schedules.encode(eager(writer(), *[edge(0, 1)], (1, reader())))
    judgement = fuzz.judge.Judgement()
    judgement.add(line, bytes([fuzz.schedules.bit("E", "S")]))
    assert "1 claims broken in mode eager" in fuzz.judge.failures(judgement)
    assert judgement.examples[0].startswith(f"{line}\nE#0 before S#1\n")
    assert "no claim of trigger_publishes was broken" in fuzz.judge.failures(judgement)


def test_results_must_fit_their_schedule(fuzz: SimpleNamespace) -> None:
    line = fuzz.schedules.encode(captured(writer(), reader()))
    judgement = fuzz.judge.Judgement()
    with pytest.raises(ValueError, match="2 results for 1 pairs"):
        judgement.add(line, bytes(2))
    with pytest.raises(ValueError, match="was broken that nobody can see"):
        judgement.add(line, bytes([0b1000000]))
    with pytest.raises(ValueError, match="not a file of run_gpu.py: schema None"):
        fuzz.judge.judge({})


def test_dry_run_and_judge_from_the_shell(tmp_path: Path) -> None:
    raw, judged = tmp_path / "fuzz.json", tmp_path / "judged.json"
    command = [str(FOLDER / "run_gpu.py"), "--dry-run", "--schedules", "120", "--out", str(raw)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    run = json.loads(raw.read_text())
    assert run["complete"] and run["device"] == "simulated"
    assert run["schedules"] == {"captured": 120, "eager": 120, "mixed": 120}
    command = [str(FOLDER / "judge.py"), str(raw), "--out", str(judged)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    result = json.loads(judged.read_text())
    assert result["failures"] == [] and "results" not in result["run"]
    assert result["rules"]["the documents"]["eager"]["broken"] == 0
    assert result["rules"]["trigger_publishes"]["captured"]["broken"] > 0
