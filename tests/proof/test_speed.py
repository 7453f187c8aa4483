"""The proof's work grows with the launches, counted and not timed."""

from __future__ import annotations

import pytest
from proof_chains import MAIN, on, pdl, program, reads, writes
from proof_decode import decode

from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Program, Segment
from kpipe.codegen.proof.races import compare_all, racy_pairs, scan

BOTH = pytest.mark.parametrize("captured", [False, True])


@BOTH
def test_decode_is_safe(captured):
    assert racy_pairs(decode(160, captured)) == compare_all(decode(160, captured)) == frozenset()


@BOTH
def test_decode_without_a_wait_is_racy(captured):
    given = decode(160, captured, waits=False)
    assert racy_pairs(given) == compare_all(given) != frozenset()


@BOTH
def test_unions_grow_linearly(captured):
    small, large = (Order(decode(n, captured)).operations for n in (480, 960))
    assert large <= 2 * small + 16
    assert small <= 12 * 480


@BOTH
def test_safe_pairs_are_never_visited(captured):
    order = Order(decode(960, captured))
    work = scan(order)
    accesses = sum(len(launch.node.accesses) for launch in order.launches)
    assert work.compared == 0 and work.looked <= accesses


def test_records_on_a_long_chain_do_not_copy_it():
    order = Order(decode(960))
    assert max(len(parents) for parents in order.edges.parents) <= 4


def test_joins_are_not_repeated_when_nothing_covers_the_silent_kernels():
    small, large = (Order(decode(n, waits=False)).operations for n in (480, 960))
    assert large <= 2 * small + 16


def test_replays_bind_only_the_ends_of_their_graphs():
    step = Segment(decode(80).segments[0].actions, captured=True)
    one, many = (Order(Program((step,) * n)).operations for n in (1, 9))
    assert many <= 9 * (one + 4)


def test_disjoint_launches_cost_nothing():
    kernels = [pdl(f"k{n}", reads(f"b{n}") + writes(f"c{n}")) for n in range(300)]
    work = scan(Order(program(on(MAIN, *kernels))))
    assert (work.looked, work.compared, work.pairs) == (0, 0, [])
