"""The race benchmark: every racy file shows exactly its races, every fixed file none."""

from __future__ import annotations

from collections import Counter
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from racebench_loader import FOLDER, Bench, load, pairs, program_lines

from kpipe.codegen.proof.edges import edges
from kpipe.codegen.proof.memory_rules import memory_rule
from kpipe.codegen.proof.races import compare_all, racy_pairs
from kpipe.codegen.proof.synthesis import races_of
from kpipe.codegen.proof.zeros import dirty

RULES = (
    "KP301_raw_cross_stream",
    "KP302_war_cross_stream",
    "KP303_waw_cross_stream",
    "KP304_next_step",
    "KP401_missing_wait",
    "KP402_late_wait",
    "KP403_silent_middle",
    "KP404_early_write",
    "KP405_trigger_without_visibility",
    "KP601_shared_storage",
    "KP602_allocator_lifetime",
    "KP603_one_workspace",
    "KP605_must_be_zero",
    "KP606_given_back_under_a_graph",
    "capture_fork",
    "capture_join",
    "relay",
    "self_event",
    "held_exit",
    "graph_boundary",
    "KP307_proxy",
    "waits_per_role",
    "trigger_of_some",
)
KINDS = {
    "KP301": "RAW",
    "KP302": "WAR",
    "KP303": "WAW",
    "KP307": "PROXY",
    "KP401": "RAW",
    "KP402": "RAW",
}
PAIRS = [pytest.param(racy, fixed, id=name) for name, racy, fixed in pairs()]
FILES = sorted(FOLDER.glob("*/*.yaml"))


def found(bench: Bench, mode: str) -> list[tuple[str, str, str, str, str]]:
    program = bench.programs[mode]
    races = [bench.say(mode, race) for race in races_of(program)]
    return races + [bench.say_dirty(mode, pair) for pair in dirty(program)]


def test_every_rule_has_three_pairs() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == set(RULES)
    counts = Counter(racy.parent.name for _, racy, _ in pairs())
    assert all(counts[rule] >= 3 for rule in RULES), counts
    assert set(FILES) == {path for _, *both in pairs() for path in both}


@pytest.mark.parametrize(("racy", "fixed"), PAIRS)
def test_racy_shows_exactly_its_races(racy: Path, fixed: Path) -> None:
    bench = load(racy)
    assert any(bench.races.values())
    for mode in bench.programs:
        said = found(bench, mode)
        assert set(said) == bench.races[mode] and len(said) == len(bench.races[mode]), mode


@pytest.mark.parametrize(("racy", "fixed"), PAIRS)
def test_fixed_shows_none(racy: Path, fixed: Path) -> None:
    bench = load(fixed)
    assert not any(bench.races.values())
    assert list(bench.programs) == list(load(racy).programs)
    for mode, program in bench.programs.items():
        assert found(bench, mode) == [], mode
        bad = [wait for wait in edges(program).unbound if wait.captured]
        assert not bad, "the repair is no valid capture"


@pytest.mark.parametrize(("racy", "fixed"), PAIRS)
def test_a_pair_differs_by_one_line(racy: Path, fixed: Path) -> None:
    before, after = program_lines(racy), program_lines(fixed)
    assert before[0].startswith("# ") and fixed.read_text().count("races:") == 0
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    edits = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    assert len(edits) == 1, edits
    _, i1, i2, j1, j2 = edits[0]
    assert max(i2 - i1, j2 - j1) == 1


@pytest.mark.parametrize(("racy", "fixed"), PAIRS)
def test_the_quadratic_check_agrees(racy: Path, fixed: Path) -> None:
    for path in (racy, fixed):
        for program in load(path).programs.values():
            assert racy_pairs(program) == compare_all(program)


@pytest.mark.parametrize("code", sorted(KINDS))
def test_the_kinds_are_those_of_the_rule(code: str) -> None:
    for racy in FOLDER.glob(f"{code}_*/*_racy.yaml"):
        stated = {race[3] for races in load(racy).races.values() for race in races}
        assert KINDS[code] in stated
        # Counters are read and written by both: there the other kinds come along.
        assert stated == {KINDS[code]} or code == "KP303"


def test_verdicts_that_rest_on_a_reading() -> None:
    for rule, verdict in (("held_exit", "assumed:m3"), ("KP401_missing_wait", "racy")):
        for racy in (FOLDER / rule).glob("*_racy.yaml"):
            assert {race[4] for races in load(racy).races.values() for race in races} == {verdict}
    everything = {race[4] for f in FILES for races in load(f).races.values() for race in races}
    assert everything == {"racy", "assumed:m1", "assumed:m3", "assumed:fence", "dirty"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_memory_that_is_given_back_has_rules_of_its_own(path: Path) -> None:
    rule = path.parent.name.partition("_")[0]
    told = {
        memory_rule(program, race)
        for program in load(path).programs.values()
        for race in races_of(program)
    }
    expected = {rule} if rule in ("KP602", "KP606") else {""}
    assert told == (expected if any(load(path).races.values()) and told else set())


GOOD = "kernels:\n  A: {writes: [x]}\n  B: {reads: [x]}\norder:\n  - main: A\n  - side: B\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kernels:", "kernel:\n  A: {}\nkernels:", "unknown key 'kernel'; known: kernels, modes"),
        ("{writes: [x]}", "{writes: [x], pld: true}", "unknown key 'pld'; known: copy, fenced"),
        (
            "{writes: [x]}",
            "{trigger: late}",
            "trigger is 'late', not never, early, after",
        ),
        ("{writes: [x]}", "{copy: true, pdl: true}", "unknown key 'pdl'; known: copy, reads"),
        (
            "{writes: [x]}",
            "{waits: true, roles: {load: {writes: [x]}}}",
            "A has roles, and they say who waits",
        ),
        ("{writes: [x]}", "{roles: {a: {reads_early: [x]}}}", "unknown key 'reads_early'"),
        ("{writes: [x]}", "{writes: [x 0-4]}", "'x 0-4' does not read as"),
        ("side: B", "side: C", "'C' is no kernel of the file"),
        ("side: B", "side: A", "'A' is launched twice"),
        ("  - side: B\n", "", "never launched: B"),
        ("main: A", "event: main to side", "'main to side' does not read as"),
        ("kernels:", "modes: graph\nkernels:", "modes is 'graph', not both or eager"),
        ("order:\n", "order:\n  - segment: graph\n", "'graph' does not read as"),
        (
            "order:\n",
            "steps: 2\norder:\n  - segment: captured on main\n",
            "segments leave no room for steps, slots or modes",
        ),
        ("order:", "races:\n  mixed: []\norder:", "unknown key 'mixed'; known: both, captured"),
    ],
)
def test_what_is_no_benchmark_file(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "1_racy.yaml"
    path.write_text(GOOD)
    assert list(load(path).programs) == ["eager", "captured"]
    assert GOOD.count(old) == 1
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ValueError) as raised:
        load(path)
    assert message in str(raised.value)
