"""Random walks of the independent simulator agree with the explorer."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mailbox_protocols import MODES, dense, one_box, rearm_moved, shipped, without, without_rearm
from mailbox_simulator import Simulator, Wrong

from kpipe.codegen.proof.mailbox.explorer import explore
from kpipe.codegen.proof.mailbox.protocol import Act, Box, Merge, Op, Protocol, Split, Use
from kpipe.codegen.proof.mailbox.search import search
from kpipe.codegen.proof.mailbox.unrolled import Bounds, unroll


def _fails(protocol: Protocol, bounds: Bounds, seed: int) -> bool:
    try:
        Simulator(protocol, bounds).walk(random.Random(seed))
    except Wrong:
        return True
    return False


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_walks_through_the_shipped_modes_find_nothing(mode: str, ranks: int) -> None:
    protocol = shipped(mode, "two_shot")
    assert not any(_fails(protocol, Bounds(ranks, 3, 2), seed) for seed in range(3))


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
def test_walks_find_what_is_wrong(protocol: Protocol) -> None:
    """The simulator is able to fail."""
    assert not explore(protocol, Bounds(2, 4, 1)).proved
    assert any(_fails(protocol, Bounds(2, 4, 1), seed) for seed in range(60))


@st.composite
def protocols(draw: st.DrawFn) -> Protocol:
    """One or two mailboxes, up to four ops on two streams, any acts in any order."""
    names = draw(st.sampled_from([("a",), ("a", "b")]))
    boxes = tuple(Box(name, draw(st.integers(1, 2))) for name in names)
    ordered = [
        (act, name) for name in names for act in (Act.PUBLISH, Act.POLL, Act.READ, Act.REARM)
    ]
    acts = ordered if draw(st.booleans()) else draw(st.permutations(ordered))
    dropped = draw(st.sets(st.sampled_from(range(len(acts))), max_size=2))
    acts = [act for place, act in enumerate(acts) if place not in dropped]
    cuts = sorted(draw(st.sets(st.integers(1, len(acts) - 1), max_size=3)))
    bounds = [0, *cuts, len(acts)]
    ops = []
    for number, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        concurrent = draw(st.booleans())
        uses = tuple(
            Use(act, box, after=() if concurrent or not place else (place - 1,))
            for place, (act, box) in enumerate(acts[start:end])
        )
        ops.append(Op(f"op{number}", "main", uses))
    if len(ops) < 3 or draw(st.booleans()):
        return Protocol(boxes, tuple(ops))
    side = Op(ops[1].name, "side", ops[1].uses)
    return Protocol(boxes, (ops[0], Split("side"), side, ops[2], Merge("side"), *ops[3:]))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(protocols(), st.sampled_from([Bounds(2, 4, 1), Bounds(2, 3, 2)]))
def test_parts_decide_as_the_whole(protocol: Protocol, bounds: Bounds) -> None:
    """Every word and every interleaving at once, nothing left out: the same answer."""
    whole = search(unroll(protocol, bounds), limit=15_000)
    verdict = explore(protocol, bounds, limit=100_000)
    assert whole.kind == "undecided" or verdict.proved is not bool(whole.kind)
    if whole.kind and not verdict.left_out:
        assert whole.kind == "undecided" or len(whole.moves) == len(verdict.counterexample)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(protocols(), st.sampled_from([Bounds(2, 4, 1), Bounds(2, 3, 2), Bounds(2, 3, 2, True)]))
def test_any_protocol(protocol: Protocol, bounds: Bounds) -> None:
    """A proof survives random walks; a counterexample can be played, and is an error there."""
    verdict = explore(protocol, bounds, limit=100_000)
    assert verdict.kind != "undecided"
    if verdict.proved:
        assert not any(_fails(protocol, bounds, seed) for seed in range(5))
    else:
        simulator = Simulator(protocol, bounds, left_out=verdict.left_out)
        assert simulator.replay(verdict.counterexample)
