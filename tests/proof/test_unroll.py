"""Steps unrolled: renamed buffers, races between steps, and how many copies show them."""

from __future__ import annotations

import random

import pytest
from proof_chains import MAIN, SIDE, event, on, pdl, plain, random_node, reads, writes

from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Action, Launch, Record, Segment, Wait
from kpipe.codegen.proof.races import check, racy_pairs
from kpipe.codegen.proof.unroll import copies_needed, place, rename, unroll

STEP = on(MAIN, plain("w", writes("x", "s")), plain("r", reads("x")))


def buffers(actions: tuple[Action, ...]) -> list[str]:
    launches = [action for action in actions if isinstance(action, Launch)]
    return [access.buffer for launch in launches for access in launch.node.accesses]


def test_slots_rotate_and_other_buffers_stay():
    assert buffers(rename(STEP, {"x": 2}, 0)) == ["x@0", "s", "x@0"]
    assert buffers(rename(STEP, {"x": 2, "s": 3}, 5)) == ["x@1", "s@2", "x@1"]
    given = unroll(STEP, {"x": 3})
    assert len(given.segments) == 5
    assert [buffers(segment.actions)[0] for segment in given.segments] == [
        "x@0", "x@1", "x@2", "x@0", "x@1",
    ]  # fmt: skip


def test_copies():
    assert copies_needed({}) == 3
    assert copies_needed({"x": 1, "y": 4}) == 6
    assert len(unroll(STEP, {"x": 2}, copies=7).segments) == 7
    with pytest.raises(ValueError, match="buffer 'x' has 0 slots; at least 1 is needed"):
        unroll(STEP, {"x": 0})
    with pytest.raises(ValueError, match="0 copies of a step; at least 1 is needed"):
        unroll(STEP, {}, copies=0)


def test_captured_segment_is_one_graph_per_step():
    segment = Segment(STEP, True, SIDE)
    given = unroll(segment, {"x": 2})
    assert all(one.captured and one.stream == SIDE for one in given.segments)
    order = Order(given)
    assert order.ordered((0, "E"), (2, "S"))


def test_place():
    assert [place(position, 2) for position in (0, 1, 5)] == [(0, 0), (0, 1), (2, 1)]


SCHEDULER = (*on(SIDE, plain("sched", writes("slot_map"))), *event(0, SIDE, MAIN))
FORWARD = on(MAIN, plain("fwd", reads("slot_map")))


def test_next_step_overwrites_what_the_previous_still_reads():
    # D16: one step alone is clean; the loop has no edge from the forward to the next scheduler.
    step = (*SCHEDULER, *FORWARD)
    assert check(unroll(step, {}, copies=1)) == ()
    races = check(unroll(step, {"slot_map": 1}))
    assert {race.kind for race in races} == {"WAR"}
    assert (races[0].first, races[0].second) == ((1, 0), (2, 0))
    assert [place(position, 2) for position in (1, 2)] == [(0, 1), (1, 0)]


def test_loop_top_wait_repairs_the_step():
    step = (*event(1, MAIN, SIDE), *SCHEDULER, *FORWARD)
    assert check(unroll(step, {"slot_map": 1})) == ()


def test_two_slots_hold_when_the_scheduler_is_at_most_one_step_ahead():
    # The event of the previous step's forward is awaited before it is recorded again.
    bound = (Wait(SIDE, 1), Record(MAIN, 1), *SCHEDULER, *FORWARD)
    assert check(unroll(bound, {"slot_map": 1})) != ()
    assert check(unroll(bound, {"slot_map": 2})) == ()
    assert check(unroll((*SCHEDULER, *FORWARD), {"slot_map": 2})) != ()


def test_side_copy_of_one_layer_against_the_next():
    # D16, layer form.
    save = plain("save", reads("tk"))
    layer = (*on(MAIN, plain("topk", writes("tk"))), *event(0, MAIN, SIDE), *on(SIDE, save))
    races = check(unroll(layer, {"tk": 1}))
    assert (races[0].first, races[0].second, races[0].kind) == ((1, 0), (2, 0), "WAR")
    assert check(unroll((*layer, *event(1, SIDE, MAIN)), {"tk": 1})) == ()
    graph = Segment((*layer, *event(1, SIDE, MAIN)), True)
    assert check(unroll(graph, {"tk": 1})) == ()


def test_eager_steps_chain_programmatically_and_replays_do_not():
    step = on(MAIN, pdl("first", writes("x"), trigger="early"))
    assert check(unroll(step, {"x": 1}))
    assert check(unroll(Segment(step, True), {"x": 1})) == ()
    waits = on(MAIN, pdl("first", writes("x"), waits=True, trigger="early"))
    assert check(unroll(waits, {"x": 1})) == ()


def random_step(rng: random.Random) -> tuple[Action, ...]:
    actions: list[Action] = []
    for position in range(rng.randint(1, 4)):
        for _ in range(rng.randint(0, 2)):
            actions.append(rng.choice((Record, Wait))(rng.randrange(2), rng.randrange(2)))
        actions.append(Launch(rng.randrange(2), random_node(rng, f"k{position}")))
    return tuple(actions)


def step_pairs(given_pairs: frozenset, size: int) -> set[tuple[int, int, int, int]]:
    """Racy pairs with the copies forgotten."""
    return {(i % size, a, j % size, b) for i, a, j, b in given_pairs}


RARE = 5847  # a step with a pair that slots + 1 copies do not show


def test_two_more_copies_than_slots_show_every_racy_pair():
    fewer = 0
    for seed in (*range(250), RARE):
        rng = random.Random(seed)
        step = random_step(rng)
        slots = {buffer: rng.randint(1, 3) for buffer in "xyz"}
        size = sum(isinstance(action, Launch) for action in step)
        enough = copies_needed(slots)
        seen = step_pairs(racy_pairs(unroll(step, slots)), size)
        assert seen == step_pairs(racy_pairs(unroll(step, slots, enough + 3)), size), seed
        fewer += seen != step_pairs(racy_pairs(unroll(step, slots, enough - 1)), size)
    assert fewer  # one copy less would not do
