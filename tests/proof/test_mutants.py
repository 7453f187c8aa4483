"""The explorer kills every wrong checker, and each one errs on the side that it says."""

from __future__ import annotations

import random
from functools import cache

import pytest
from explorer.generator import MODES, random_program
from explorer.machine import racy_pairs as explored_pairs

from kpipe.codegen.proof.mutants import MUTANTS
from kpipe.codegen.proof.program import Program
from kpipe.codegen.proof.races import Pair, racy_pairs

SCHEDULES = 300


@cache
def samples() -> tuple[tuple[Program, frozenset[Pair]], ...]:
    """The same schedules in every run, with the pairs that the explorer finds racy."""
    programs = [
        random_program(random.Random(f"mutants:{mode}:{number}"), mode)
        for mode in MODES
        for number in range(SCHEDULES)
    ]
    return tuple((program, explored_pairs(program)) for program in programs)


def accepted_and_refused(checker) -> tuple[int, int]:
    """Schedules with a racy pair that it accepts, and with a safe pair that it refuses."""
    verdicts = [(truth, checker(program)) for program, truth in samples()]
    return sum(bool(t - c) for t, c in verdicts), sum(bool(c - t) for t, c in verdicts)


def test_the_right_checker_agrees_on_these_schedules():
    assert accepted_and_refused(racy_pairs) == (0, 0)


@pytest.mark.parametrize("name", MUTANTS)
def test_each_wrong_rule_is_caught(name):
    accepted, refused = accepted_and_refused(MUTANTS[name])
    assert bool(accepted) == MUTANTS[name].unsound
    if not accepted:
        assert refused


def test_only_the_capture_that_is_taken_for_eager_errs_on_both_sides():
    both = [name for name, rule in MUTANTS.items() if all(accepted_and_refused(rule))]
    assert both == ["capture_is_eager"]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_keep_positions_and_leave_the_right_rules_alone(name):
    program, truth = max(samples(), key=lambda sample: len(sample[1]))
    order = MUTANTS[name].order(program)
    streams = [launch.stream for launch in program.launches]
    assert [launch.stream for launch in order.launches] == streams
    assert racy_pairs(program) == truth


def test_a_rule_that_the_gpu_refutes_is_unsound():
    assert {rule.unsound for rule in MUTANTS.values() if rule.refuted} == {True}
    assert [name for name, rule in MUTANTS.items() if rule.unsound and not rule.refuted] == [
        "completion_is_transitive",
        "exit_publishes",
    ]
