"""The proof by order never proves what a search of all interleavings refutes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mailbox_protocols import (
    MODES,
    ROWS,
    chain,
    dense,
    one_box,
    rearm_moved,
    shipped,
    without,
    without_rearm,
)
from test_mailbox_random import protocols

from kpipe.codegen.proof.mailbox.causal import always_alike
from kpipe.codegen.proof.mailbox.explorer import bounds_to_check, explore
from kpipe.codegen.proof.mailbox.protocol import Act, Box, Merge, Op, Protocol, Split, Use
from kpipe.codegen.proof.mailbox.search import search
from kpipe.codegen.proof.mailbox.unrolled import Bounds, unroll

SMALL = 100_000  # states
TWO, THREE, ODD = Bounds(2, 4, 1), Bounds(3, 4, 1), Bounds(2, 3, 2)


@pytest.mark.parametrize("reduce", ROWS)
@pytest.mark.parametrize("mode", MODES)
def test_shipped_modes_are_proved_for_four_ranks(mode: str, reduce: str) -> None:
    protocol = shipped(mode, reduce)
    for bounds in bounds_to_check(protocol, 4):
        verdict = explore(protocol, bounds)
        assert verdict.proved, verdict.what
        assert verdict.what.startswith("safe for 4 ranks, ")
        program = unroll(protocol, bounds)
        assert verdict.states == 1 + sum(len(steps) for steps in program.ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_order_proves_what_the_search_proves_of_fewer_ranks(mode: str, ranks: int) -> None:
    """The search's half stands in `test_mailbox_shipped`."""
    for bounds in bounds_to_check(shipped(mode), ranks):
        assert always_alike(unroll(shipped(mode), bounds))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "protocol",
    [
        one_box(1),
        dense(1),
        without_rearm(shipped("fork"), "q_mail"),
        rearm_moved(shipped("fork"), "q_mail", "topk_merge"),
        without(shipped("fork"), "query_wait"),
    ],
)
def test_wrong_protocols_are_not_proved(protocol: Protocol, ranks: int) -> None:
    assert not always_alike(unroll(protocol, Bounds(ranks, 4, 1)))


def test_four_ranks_that_are_wrong_are_searched() -> None:
    verdict = explore(one_box(1), Bounds(4, 4, 1))
    assert not verdict.proved and verdict.kind == "reused" and verdict.counterexample


def test_two_parities_without_a_reduce_hold_in_a_long_step_and_not_across_odd_ones() -> None:
    for ranks in (2, 3, 4):
        assert always_alike(unroll(dense(), Bounds(ranks, 4, 1)))
        assert not always_alike(unroll(dense(), Bounds(ranks, 3, 2)))


def test_a_poll_behind_the_rearm_of_the_word_before_it_by_way_of_its_publish_only() -> None:
    """The peer publishes behind the re-arm, but a poll that does not wait for it meets the old
    word: on its own rank nothing holds it back."""
    items = (
        Op("send", "main", (Use(Act.PUBLISH, "m"),)),
        Op("take", "take", (Use(Act.POLL, "m"),)),
        Split("arm", "take"),
        Op("arm", "arm", chain((Act.REARM, "m"), (Act.PUBLISH, "go"))),
        Op("pace", "main", chain((Act.POLL, "go"), (Act.REARM, "go"))),
    )
    program = unroll(Protocol((Box("m", 1), Box("go", 2)), items), TWO)
    assert search(program, limit=SMALL).kind == "stale"
    assert not always_alike(program)


def test_a_rearm_beside_a_read_of_its_own_rank() -> None:
    """In the run the read comes first by chance: nothing holds the re-arm back until it ends."""
    items = (
        Op("gather", "main", chain((Act.PUBLISH, "m"), (Act.POLL, "m"))),
        Split("side"),
        Op("core", "side", (Use(Act.READ, "m"),)),
        Op("other", "main", chain((Act.PUBLISH, "n"), (Act.POLL, "n"), (Act.REARM, "n"))),
        Op("arm", "main", (Use(Act.REARM, "m"),)),
        Merge("side"),
    )
    boxes = (Box("m", 2), Box("n", 2))
    beside = unroll(Protocol(boxes, items), TWO)
    assert search(beside, limit=SMALL).kind in ("torn", "rearm")
    assert not always_alike(beside)
    behind = unroll(Protocol(boxes, (*items[:4], Merge("side"), items[4])), TWO)
    assert always_alike(behind)


def test_an_unfilled_start_is_not_proved() -> None:
    program = unroll(one_box(2), TWO, init_barrier=False)
    assert search(program, limit=100_000).kind == "init"
    assert not always_alike(program)


def test_a_read_needs_a_poll_of_its_own_rank() -> None:
    uses = (Use(Act.PUBLISH, "m"), Use(Act.READ, "m"), Use(Act.REARM, "m", after=(1,)))
    unguarded = Protocol((Box("m", 2),), (Op("gather", "main", uses),))
    assert not always_alike(unroll(unguarded, TWO))
    polled = chain((Act.PUBLISH, "m"), (Act.POLL, "m"), (Act.READ, "m"), (Act.REARM, "m"))
    guarded = Protocol((Box("m", 2),), (Op("gather", "main", polled),))
    assert always_alike(unroll(guarded, TWO)) and explore(guarded, TWO).proved
    torn = replace(guarded.ops[0], uses=(*polled[:3], Use(Act.REARM, "m", after=(1,))))
    assert not always_alike(unroll(Protocol((Box("m", 2),), (torn,)), TWO))


def test_what_order_proves_no_search_refutes() -> None:
    proved: list[bool] = []

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(protocols(), st.sampled_from([TWO, ODD, THREE, Bounds(2, 3, 2, True)]))
    def compare(protocol: Protocol, bounds: Bounds) -> None:
        program = unroll(protocol, bounds)
        if not always_alike(program):
            return
        found = search(program, limit=30_000)
        assert found.kind in ("", "undecided")
        proved.append(not found.kind)

    compare()
    assert sum(proved) > 5
