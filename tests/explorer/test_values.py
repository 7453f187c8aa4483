"""The value oracle and the placements on programs whose answers are known by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from explorer.chains import READ_X, READ_Y, WRITE_X, WRITE_Y, captured, eager, edge, touching
from explorer.enqueue import enqueue
from explorer.generator import MODES, random_program
from explorer.machine import racy_pairs as explored
from explorer.placement import cuts, fenced_writes, latest_cut, random_cut, reads
from explorer.values import cell_values, cells, host_order, value_safe
from kpipe.codegen.proof.program import Access, Copy, Kernel, Program
from kpipe.codegen.proof.races import racy_pairs

A = Kernel("A", WRITE_X, trigger="early")
B = Kernel("B", WRITE_X, pdl=True)
C = Kernel("C", READ_X, pdl=True)
PLAIN = Kernel("P", READ_X)
OVER = Kernel("O", WRITE_X)
EARLY_WRITE = Access("x", True, early=True)
EARLY_READ = Access("x", False, early=True)
LEFT, RIGHT, MIDDLE = (((0, 2),), ((2, 4),), ((1, 3),))


def seen(program: Program, launch: int) -> set[object]:
    """Every tag that a launch reads in any execution."""
    return {tag for cell in cell_values(program) for i, _, tag in cell.reads if i == launch}


def left(program: Program) -> set[object]:
    """Every tag that a cell may end with."""
    return {tag for cell in cell_values(program) for tag in cell.finals}


def test_a_racing_read_sees_both_values() -> None:
    assert seen(eager(A, C), 1) == {None, (0, 0)}
    assert not value_safe(eager(A, C))


def test_a_waiting_read_sees_the_store_alone() -> None:
    program = eager(A, replace(C, waits=True))
    assert seen(program, 1) == {(0, 0)} and value_safe(program)


def test_unordered_stores_leave_either() -> None:
    program = eager(A, B)
    assert left(program) == {(0, 0), (1, 0)} and not value_safe(program)
    assert seen(eager(A, B, PLAIN), 2) == {(0, 0), (1, 0)}


@pytest.mark.parametrize("chain", [eager, captured])
def test_dead_writes_are_refused_by_the_checker_and_safe_on_values(
    chain: Callable[..., Program],
) -> None:
    """Two unordered stores on two streams, that a third one overwrites before anybody reads."""
    forked = (Copy("F"), edge(0, 1), A, (1, replace(B, pdl=False)), edge(1, 0))
    overwritten = chain(*forked, OVER, PLAIN)
    assert racy_pairs(overwritten) == explored(overwritten) == {(1, 0, 2, 0)}
    assert value_safe(overwritten)
    assert (seen(overwritten, 4), left(overwritten)) == ({(3, 0)}, {(3, 0)})
    for alive in (chain(*forked), chain(*forked, PLAIN, OVER)):
        assert racy_pairs(alive) == {(1, 0, 2, 0)} and not value_safe(alive)


def test_a_store_that_arrives_behind_an_implicit_trigger() -> None:
    """The child may start at the exit, with the store still on its way."""
    silent = replace(A, trigger="never")
    assert seen(eager(silent, C), 1) == {None, (0, 0)}
    assert left(eager(silent, B)) == {(0, 0), (1, 0)}


def test_a_read_is_over_at_the_exit() -> None:
    reading = touching(replace(A, trigger="never"), READ_X)
    assert seen(eager(reading, B), 0) == {None} and value_safe(eager(reading, B))
    assert seen(eager(replace(reading, trigger="early"), B), 0) == {None, (1, 0)}


def test_an_own_store_on_its_way_is_seen_by_its_own_kernel() -> None:
    kernel = Kernel("K", (EARLY_WRITE, *READ_X), waits=True)
    assert seen(eager(kernel), 0) == {(0, 0)} and value_safe(eager(kernel))
    backwards = Kernel("K", (*READ_X, EARLY_WRITE), waits=True)  # the prologue comes first
    assert seen(eager(backwards), 0) == {(0, 1)}


def test_an_own_store_need_not_have_arrived_when_its_kernel_reads_it() -> None:
    """Forwarded and still invisible to a child that starts at the exit."""
    kernel = Kernel("K", (*WRITE_X, *READ_X))
    assert seen(eager(kernel, C), 0) == {(0, 0)}
    assert seen(eager(kernel, C), 1) == {None, (0, 0)}


def test_a_foreign_store_may_come_between_an_own_store_and_the_own_read() -> None:
    kernel = Kernel("K", (*WRITE_X, *READ_X), trigger="early")
    assert seen(eager(kernel, B), 0) == {(0, 0), (1, 0)}


def test_in_place_reads_the_old_value_and_leaves_the_new() -> None:
    in_place = Kernel("K", (*READ_X, *WRITE_X), pdl=True, waits=True)
    program = eager(A, in_place, PLAIN)
    assert (seen(program, 1), seen(program, 2), left(program)) == ({(0, 0)}, {(1, 1)}, {(1, 1)})
    assert value_safe(program)


def test_stores_of_one_launch_arrive_in_order() -> None:
    twice = Kernel("K", (EARLY_WRITE, *WRITE_X), waits=True, trigger="early")
    assert left(eager(twice)) == {(0, 1)}
    assert seen(eager(twice, C), 1) == {None, (0, 0), (0, 1)}


def test_memory_is_cut_at_the_corners_of_regions() -> None:
    whole = Kernel("W", (Access("x", True),))
    halves = Kernel("H", (Access("x", True, box=LEFT), Access("x", False, box=MIDDLE)))
    other = Copy("C", (Access("x", False, box=RIGHT), *READ_Y))
    w, h, m, r, y = (0, 0), (1, 0), (1, 1), (2, 0), (2, 1)
    found = {frozenset(cell) for cell in cells(eager(whole, halves, other))}
    expected = [{w}, {w, h}, {w, h, m}, {w, m, r}, {w, r}, {y}]
    assert found == {frozenset(sites) for sites in expected}


def test_regions_that_do_not_meet_are_safe_on_values() -> None:
    first = Kernel("A", (Access("x", True, box=LEFT),), trigger="early")
    second = Kernel("B", (Access("x", False, box=RIGHT),), pdl=True)
    assert value_safe(eager(first, second))
    assert not value_safe(eager(first, touching(second, (Access("x", False, box=MIDDLE),))))


def test_errors_are_named() -> None:
    mixed = eager(
        Kernel("A", (Access("x", True, box=LEFT),)), Kernel("B", (Access("x", True, box=LEFT * 2),))
    )
    with pytest.raises(ValueError, match="regions of buffer x have different numbers of axes"):
        value_safe(mixed)
    late = eager(Kernel("A", READ_X, pdl=True, waits=True, trigger="early"), B)
    message = "access 0 of launch 0 is no read that can lie in front of its trigger"
    with pytest.raises(ValueError, match=message):
        value_safe(late, frozenset({(0, 0)}))
    with pytest.raises(ValueError, match=message):
        value_safe(eager(A, B), frozenset({(0, 0)}))  # a store


def test_a_consumed_read_is_over_at_the_trigger() -> None:
    """Safe in the finer truth, refused by the checker: the contract cannot say where it reads."""
    reading = touching(A, READ_X)
    program = eager(reading, B)
    assert racy_pairs(program) == explored(program) == {(0, 0, 1, 0)}
    consumed = frozenset({(0, 0)})
    assert not explored(program, released=consumed)
    assert value_safe(program, consumed) and not value_safe(program)


def test_a_store_published_at_the_trigger() -> None:
    assert not explored(eager(A, C), released=frozenset({(0, 0)}))
    assert explored(eager(A, C)) == {(0, 0, 1, 0)}


def test_only_the_named_access_ends_at_the_trigger() -> None:
    reading = touching(A, (*READ_X, *READ_Y))
    program = eager(reading, touching(B, (*WRITE_X, *WRITE_Y)))
    assert explored(program, released=frozenset({(0, 0)})) == {(0, 1, 1, 1)}
    assert explored(program, 2, released=frozenset({(0, 0)})) == {(0, 1, 1, 1)}


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_consumed_read_is_not_over_before_the_trigger(blocks: int) -> None:
    beside = eager(touching(A, READ_X), (1, B))
    assert explored(beside, blocks, released=frozenset({(0, 0)})) == {(0, 0, 1, 0)}


def test_a_trigger_that_is_not_called_ends_nothing_before_the_exit() -> None:
    program = eager(touching(replace(A, trigger="never"), READ_X), touching(B, ()), C)
    assert explored(program, released=frozenset({(0, 0)})) == explored(program)


@pytest.mark.parametrize(
    ("waits", "trigger", "expected"),
    [
        (True, "never", [0]),
        (False, "never", [0]),
        (True, "early", [0, 1]),
        (False, "early", [0, 1, 2, 3]),
        (True, "after_wait", [1, 2, 3]),
    ],
)
def test_where_a_trigger_can_lie(waits: bool, trigger: str, expected: list[int]) -> None:
    kernel = Kernel("K", (*READ_X, EARLY_READ, *WRITE_X), True, waits, trigger)  # type: ignore[arg-type]
    assert list(cuts(kernel)) == expected
    assert list(cuts(Copy("C", kernel.accesses))) == [0]
    drawn = {random_cut(eager(kernel), random.Random(seed)) for seed in range(60)}
    order = [(0, 1), (0, 0), (0, 2)]  # the prologue first
    assert drawn == {frozenset(order[:cut]) for cut in expected}
    assert latest_cut(eager(kernel)) == frozenset(order[: expected[-1]])


def test_a_kernel_issued_again_is_cut_alike() -> None:
    kernel = Kernel("K", (*READ_X, *READ_Y, *WRITE_X), trigger="early")
    for seed in range(40):
        cut = random_cut(eager(kernel, kernel), random.Random(seed))
        assert {a for i, a in cut if i == 0} == {a for i, a in cut if i == 1}


def test_reads_and_fenced_stores_are_told_apart() -> None:
    kernel = Kernel("K", (*READ_X, *WRITE_Y), trigger="early", fenced=True)
    program = eager(kernel, replace(kernel, fenced=False), Copy("C", WRITE_X))
    sites = frozenset({(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)})
    assert reads(program, sites) == {(0, 0), (1, 0)}
    assert fenced_writes(program, sites) == {(0, 1)}


def samples(mode: str, count: int, most: int) -> list[Program]:
    """The same random programs in every run."""
    return [random_program(random.Random(f"values:{mode}:{k}"), mode, most) for k in range(count)]


@pytest.mark.parametrize("mode", MODES)
def test_branching_on_every_step_shows_nothing_more(mode: str) -> None:
    compared = 0
    for program in samples(mode, 60, 4):
        sites = reads(program, random_cut(program, random.Random(len(program.launches))))
        for consumed in {frozenset[tuple[int, int]](), sites}:
            short, full = (cell_values(program, consumed, every) for every in (False, True))
            assert [(c.reads, c.finals) for c in short] == [(c.reads, c.finals) for c in full]
            compared += sum(len(c.cell) > 1 for c in short)
    assert compared > 60


@pytest.mark.parametrize("mode", MODES)
def test_programs_without_a_race_read_what_host_order_does(mode: str) -> None:
    unsafe = finer = 0
    for program in samples(mode, 250, 6):
        safe = value_safe(program)
        found = cell_values(program)
        assert safe == all(cell.safe for cell in found)
        racy = explored(program)
        assert safe or racy
        unsafe += not safe
        finer += safe and bool(racy)
        for cell in found:
            expected, last = host_order(enqueue(program), cell.cell)
            assert expected <= cell.reads and last in cell.finals
    assert unsafe > 30


@pytest.mark.parametrize("mode", MODES)
def test_more_reads_consumed_never_add_a_race(mode: str) -> None:
    gained = 0
    for program in samples(mode, 250, 5):
        racy = explored(program)
        some = explored(program, released=reads(program, random_cut(program, random.Random(1))))
        most = explored(program, released=reads(program, latest_cut(program)))
        assert most <= racy and some <= racy
        gained += most != racy
    assert gained > 3
