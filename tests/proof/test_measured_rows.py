"""The measured chains as programs: what the documents promise, eagerly and captured."""

from __future__ import annotations

import json

import pytest
from proof_chains import MAIN, SIDE, event, on, pdl, plain, program, reads, writes

from kpipe.codegen.proof.program import Copy, Program, Segment
from kpipe.codegen.proof.races import check, unfenced
from kpipe.codegen.proof.reasons import TEXTS
from kpipe.codegen.proof.tables import FOLDER, read_table

A = plain("A", writes("x"), "early")
HELD = plain("A", writes("x"))
B = pdl("B")
C = pdl("C", reads("x"))
C_WAITS = pdl("C", reads("x"), waits=True)
C_PLAIN = plain("C", reads("x"))
MEMSET = Copy("memset")
LATE = pdl("B", waits=True, trigger="after_wait")
EARLY = pdl("B", waits=True, trigger="early")
SHORT = plain("Z", trigger="early")
ROOT = plain("root", trigger="early")
PDL_A = pdl("A", writes("x"), trigger="early")
PDL_Z = pdl("Z", writes("z"), trigger="early")
Z = plain("Z", writes("z"), "early")
C_OF_Z = pdl("C", reads("z"))

FORK = event(0, MAIN, SIDE)
JOIN = event(1, SIDE, MAIN)
SAFE, RACY, M1, M3 = "safe", "racy", "m1", "m3"

# id, chain, documented verdict eager, captured
CHAINS = [
    ("1", (on(MAIN, HELD, C_PLAIN),), SAFE, SAFE),
    ("2", (on(MAIN, A, C_WAITS),), SAFE, SAFE),
    ("3", (on(MAIN, A, C),), RACY, RACY),
    ("4", (on(MAIN, HELD, C),), M3, M3),
    ("5", (on(MAIN, A, C_PLAIN),), SAFE, SAFE),
    ("6", (on(MAIN, A, B, C_WAITS),), M1, M1),
    ("7", (on(MAIN, A, EARLY, C_WAITS),), SAFE, SAFE),
    ("8", (on(MAIN, A, EARLY, C),), RACY, RACY),
    ("9", (on(MAIN, A, B, C_PLAIN),), SAFE, M1),
    ("9", (on(MAIN, A, B), FORK, on(SIDE, C_PLAIN)), SAFE, M1),
    ("10", (on(MAIN, A), FORK, on(SIDE, C)), SAFE, RACY),
    ("11", (on(MAIN, A, MEMSET, C),), SAFE, SAFE),
    ("12", (on(MAIN, HELD, C),), M3, M3),
    ("13", (FORK, on(SIDE, SHORT), on(MAIN, A), JOIN, on(MAIN, C)), RACY, RACY),
    ("14", (FORK, on(SIDE, A), on(MAIN, SHORT), JOIN, on(MAIN, C)), SAFE, RACY),
    ("15", (on(MAIN, A), FORK, on(SIDE, C_PLAIN)), SAFE, SAFE),
    ("16", (on(MAIN, A), FORK, on(SIDE, C_WAITS)), SAFE, SAFE),
    ("17", (on(MAIN, A), FORK, on(SIDE, pdl("D", trigger="early"), C_WAITS)), SAFE, M1),
    ("18", (on(MAIN, A), FORK, on(SIDE, plain("D"), C)), SAFE, SAFE),
    ("19", (on(MAIN, A), FORK, on(SIDE, plain("D")), on(MAIN, C)), RACY, RACY),
    ("19", (on(MAIN, A), FORK, on(SIDE, pdl("D")), on(MAIN, C)), RACY, RACY),
    ("20", (FORK, on(SIDE, A), JOIN, on(MAIN, C)), SAFE, RACY),
    ("21", (on(MAIN, A), event(0, MAIN, MAIN), on(MAIN, C)), RACY, RACY),
    ("23", (on(MAIN, A, LATE, C),), SAFE, SAFE),
    ("24", (FORK, on(SIDE, Z), on(MAIN, A), JOIN, on(MAIN, C_OF_Z)), SAFE, RACY),
    ("25", (on(MAIN, HELD, C),), M3, M3),
    ("26", (on(MAIN, HELD, C),), M3, M3),
    ("27", (on(MAIN, A, C),), RACY, RACY),
    ("28", (on(MAIN, ROOT), FORK, on(SIDE, PDL_Z), on(MAIN, PDL_A), JOIN, on(MAIN, C_OF_Z)),
     SAFE, RACY),
    ("29", (on(MAIN, A), FORK, JOIN, on(MAIN, C)), RACY, RACY),
    ("30", (on(MAIN, A, B), FORK, on(SIDE, C)), SAFE, RACY),
    ("31", (on(MAIN, A, B, B, C_WAITS),), M1, M1),
    ("32", (FORK, on(SIDE, MEMSET), on(MAIN, A), JOIN, on(MAIN, C)), RACY, RACY),
    ("P1", (FORK, on(SIDE, Z), on(MAIN, A), JOIN, on(MAIN, C_OF_Z)), SAFE, RACY),
    ("P4", (on(MAIN, A), FORK, on(SIDE, plain("D")), JOIN, on(MAIN, C)), SAFE, SAFE),
    ("P4b", (on(MAIN, A), FORK, on(SIDE, pdl("D", trigger="early")), JOIN, on(MAIN, C)),
     SAFE, RACY),
]  # fmt: skip
CASES = [
    pytest.param(row, chain, captured, verdict, id=f"{row}-{number}-{mode}")
    for number, (row, chain, eager, graph) in enumerate(CHAINS)
    for mode, captured, verdict in (("eager", False, eager), ("captured", True, graph))
]
TABLE = read_table(FOLDER / "sm_90-580.159.04.json")


def verdict_of(given: Program) -> str:
    races = check(given)
    assert len(races) <= 1  # every chain has exactly one conflict
    if not races:
        return SAFE
    return races[0].assumption or races[0].verdict


@pytest.mark.parametrize("row, chain, captured, verdict", CASES)
def test_documented_verdict(row, chain, captured, verdict):
    assert verdict_of(program(*chain, captured=captured)) == verdict


@pytest.mark.parametrize("row, chain, captured, verdict", CASES)
def test_measured_outcome_fits_the_verdict(row, chain, captured, verdict):
    measured = TABLE.row(row)
    outcome = measured.captured if captured else measured.eager
    if outcome == "stale":
        assert verdict == RACY
    if verdict == SAFE:
        assert outcome in ("ordered", "fresh")


@pytest.mark.parametrize("row, chain, captured, verdict", CASES)
def test_promised_means_safe_without_a_reading(row, chain, captured, verdict):
    given = program(*chain, captured=captured)
    clean = not check(given) and not unfenced(given)
    assert TABLE.row(row).promised[captured] == clean


def test_every_row_is_a_chain_or_a_graph_boundary():
    rows = {row.id for row in TABLE.rows}
    assert rows == {row for row, *_ in CHAINS} | {"22"}


@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, True)])
def test_row_22_graph_boundaries_are_full(kinds):
    first, second = kinds
    given = Program((Segment(on(MAIN, A), first), Segment(on(MAIN, C), second)))
    assert check(given) == ()
    other = Program((Segment(on(MAIN, A), first, 0), Segment(on(SIDE, C), second, 1)))
    assert verdict_of(other) == RACY  # only on the stream that launches the graph


def test_row_13_and_24_main_keeps_its_programmatic_edge():
    for captured in (False, True):
        chain = (FORK, on(SIDE, Z), on(MAIN, A), JOIN, on(MAIN, C))
        assert verdict_of(program(*chain, captured=captured)) == RACY


def test_row_28_the_wait_repairs_the_diamond():
    last = pdl("C", reads("x", "z"), waits=True)
    chain = (on(MAIN, ROOT), FORK, on(SIDE, PDL_Z), on(MAIN, PDL_A), JOIN, on(MAIN, last))
    for captured in (False, True):
        assert check(program(*chain, captured=captured)) == ()


def test_row_11_memcpy_that_writes_between():
    given = program(on(MAIN, A, Copy("memcpy", reads("x") + writes("y")), pdl("C", reads("y"))))
    assert check(given) == ()


def test_row_23_fence_in_front_of_the_trigger_is_the_promise():
    for captured in (False, True):
        (race,) = unfenced(program(on(MAIN, A, LATE, C), captured=captured))
        assert (race.first, race.second, race.kind) == ((0, 0), (2, 0), "RAW")
        assert (race.verdict, race.assumption) == ("assumed", "fence")
        fenced = pdl("B", waits=True, trigger="after_wait", fenced=True)
        assert unfenced(program(on(MAIN, A, fenced, C), captured=captured)) == ()


def test_fence_matters_only_for_reads_after_writes():
    reader = plain("A", reads("x"), "early")
    assert unfenced(program(on(MAIN, reader, LATE, pdl("C", writes("x"))))) == ()


def test_write_after_read_over_the_implicit_trigger_is_safe():
    reader, writer = plain("A", reads("x")), pdl("C", writes("x"))
    for captured in (False, True):
        assert check(program(on(MAIN, reader, writer), captured=captured)) == ()
        early = plain("A", reads("x"), "early")
        (race,) = check(program(on(MAIN, early, writer), captured=captured))
        assert (race.kind, race.verdict, race.assumption) == ("WAR", "racy", "")


def test_the_assumption_that_would_help_is_named():
    silent = pdl("B", writes("y"))
    for captured in (False, True):
        given = on(MAIN, A, silent, pdl("C", reads("y")))
        assert verdict_of(program(given, captured=captured)) == "m3"
        given = on(MAIN, A, silent, pdl("C", reads("x"), waits=True))
        assert verdict_of(program(given, captured=captured)) == "m1"


def test_table_is_data():
    assert json.loads(json.dumps(TABLE.as_json())) == TABLE.as_json()
    assert json.loads((FOLDER / "sm_90-580.159.04.json").read_text()) == TABLE.as_json()
    assert len({row.id for row in TABLE.rows}) == len(TABLE.rows)
    with pytest.raises(KeyError, match="no row '99' for sm_90 with driver 580.159.04"):
        TABLE.row("99")
    with pytest.raises(KeyError, match="no reading 'm2' for sm_90"):
        TABLE.reading("m2")


def test_citations_exist():
    rules = {rule for rule, _ in TABLE.rules}
    assert rules <= set(TEXTS)
    for rule in rules | {reading.id for reading in TABLE.readings}:
        assert TABLE.cite(rule)
        for row in TABLE.cite(rule):
            TABLE.row(row)
    assert TABLE.reading("held_exit_visible").holds
    assert not TABLE.reading("exit_completes").holds
    assert TABLE.cite("unheard") == ()


def test_early_read_of_a_prologue():
    # D01: the residual is read in front of the wait; gamma has no writer in flight.
    embed = plain("embed", writes("residual"), "early")
    prologue = reads("residual", "gamma", early=True)
    norm = pdl("norm", prologue + reads("residual") + writes("out"), waits=True)
    for captured in (False, True):
        (race,) = check(program(on(MAIN, embed, norm), captured=captured))
        assert (race.first, race.second, race.buffer) == ((0, 0), (1, 0), "residual")
        assert (race.kind, race.verdict) == ("RAW", "racy")
        at_entry = pdl("norm", reads("gamma", early=True) + reads("residual"), waits=True)
        assert check(program(on(MAIN, embed, at_entry), captured=captured)) == ()
        assert check(program(on(MAIN, embed, plain("norm", prologue)), captured=captured)) == ()


@pytest.mark.parametrize("captured", [False, True])
def test_attribute_without_a_wait(captured):
    # D02: C's wait covers B, which completes without waiting for A.
    last = pdl("C", reads("x", "y"), waits=True)
    silent = pdl("B", writes("y"), trigger="early")
    (race,) = check(program(on(MAIN, A, silent, last), captured=captured))
    assert (race.first, race.second, race.buffer, race.assumption) == ((0, 0), (2, 0), "x", "m1")
    for repaired in (pdl("B", writes("y"), True, "early"), plain("B", writes("y"), "early")):
        assert check(program(on(MAIN, A, repaired, last), captured=captured)) == ()


@pytest.mark.parametrize("captured", [False, True])
def test_counters_shared_by_two_streams(captured):
    # D11: both launches count in the same words.
    first, second = (plain(name, reads("cnt") + writes("cnt")) for name in ("topk_a", "topk_b"))
    apart = program(FORK, on(MAIN, first), on(SIDE, second), captured=captured)
    assert {race.kind for race in check(apart)} == {"RAW", "WAR", "WAW"}
    joined = program(FORK, on(SIDE, second), JOIN, on(MAIN, first), captured=captured)
    assert check(joined) == ()
