"""The edge rules one by one, and the closure against the rules written out in full."""

from __future__ import annotations

import random

import pytest
from proof_chains import (
    MAIN,
    SIDE,
    THIRD,
    FullRules,
    event,
    on,
    pdl,
    plain,
    program,
    random_program,
    reads,
    writes,
)

from kpipe.codegen.proof.edges import Unbound, edges
from kpipe.codegen.proof.instants import LETTERS, begin, end, number, point
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Access, Copy, Kernel, Program, Record, Segment, Wait
from kpipe.codegen.proof.races import check, compare_all, racy_pairs, unfenced

A = plain("A", writes("x"), "early")
BOTH = pytest.mark.parametrize("captured", [False, True])


def holds(order: Order, text: str) -> bool:
    """`text` as E0<S1."""
    first, second = text.split("<")
    return order.ordered((int(first[1:]), first[0]), (int(second[1:]), second[0]))


def inside(kernel: Kernel | Copy) -> set[str]:
    order = Order(program(on(MAIN, kernel)))
    return {a + b for a in LETTERS for b in LETTERS if a != b and order.ordered((0, a), (0, b))}


INNER = {"SW", "SX", "SE", "WX", "WE", "ST", "TX", "TE", "XE"}


def test_inner_order_of_a_waiting_kernel():
    assert inside(pdl("k", waits=True, trigger="early")) == INNER
    assert inside(pdl("k", waits=True, trigger="after_wait")) == INNER | {"WT"}
    assert inside(pdl("k", waits=True)) == INNER | {"XT", "WT"}


@pytest.mark.parametrize("kernel", [pdl("k"), plain("k"), Kernel("k", waits=True), Copy("k")])
def test_inner_order_without_a_wait_that_holds(kernel):
    assert inside(kernel) == INNER | {"WS", "WT", "XT"}


def test_release_needs_a_wait_that_holds():
    assert "WT" in inside(pdl("k", trigger="after_wait"))  # W is S here
    order = Order(program(on(MAIN, A, pdl("B", trigger="after_wait"), pdl("C"))))
    assert not holds(order, "E0<S2")


def test_fences_drop_only_the_unfenced_release():
    chain = on(MAIN, A, pdl("B", (), True, "after_wait"), pdl("C"))
    assert holds(Order(program(chain)), "E0<S2")
    assert not holds(Order(program(chain), fences=True), "E0<S2")
    chain = on(MAIN, A, pdl("B", (), True, "after_wait", fenced=True), pdl("C"))
    assert holds(Order(program(chain), fences=True), "E0<S2")


def test_accesses():
    early, late = Access("x", False, early=True), Access("x", True)
    waiting = pdl("k", waits=True)
    assert (begin(waiting, early), begin(waiting, late)) == ("S", "W")
    assert begin(pdl("k"), late) == begin(Kernel("k", waits=True), late) == "S"
    assert begin(Copy("k"), late) == "S"
    assert (end(early), end(late), end(late, frozenset({"m3"}))) == ("X", "E", "X")


def test_numbers():
    kernel = pdl("k", waits=True, trigger="early")
    assert [point(number(7, kernel, letter)) for letter in LETTERS] == [(7, x) for x in LETTERS]
    with pytest.raises(ValueError, match="'Q' is no instant; allowed: S, W, T, X, E"):
        number(0, kernel, "Q")


def test_unknown_assumption_is_refused():
    for ask in (edges, Order, racy_pairs, compare_all):
        with pytest.raises(ValueError, match="unknown assumption m2; allowed: m1, m3"):
            ask(Program(()), frozenset({"m1", "m2"}))


def test_eager_plain_launch_and_record_cover_the_whole_chain():
    silent = (pdl("B", trigger="early"), pdl("C", trigger="early"))
    order = Order(program(on(MAIN, A, *silent, plain("D"))))
    assert holds(order, "E0<S3") and holds(order, "E1<S3") and holds(order, "E2<S3")
    order = Order(program(on(MAIN, A, *silent), event(0, MAIN, SIDE), on(SIDE, pdl("D"))))
    assert holds(order, "E0<S3") and holds(order, "E1<S3") and holds(order, "E2<S3")


def test_captured_plain_launch_covers_only_the_front():
    order = Order(program(on(MAIN, A, pdl("B", trigger="early"), plain("C")), captured=True))
    assert holds(order, "E1<S2") and not holds(order, "E0<S2")


def test_eager_first_launch_with_the_attribute_is_full_behind_its_joins():
    parts = (on(SIDE, A), event(0, SIDE, MAIN), on(MAIN, pdl("B", waits=True)))
    assert holds(Order(program(*parts)), "E0<S1")
    captured = Order(program(*parts, captured=True))
    assert not holds(captured, "E0<S1") and holds(captured, "E0<W1") and holds(captured, "T0<S1")


def test_eager_join_adds_a_full_edge_and_leaves_the_stream_programmatic():
    order = Order(
        program(on(SIDE, A), on(MAIN, A), event(0, SIDE, MAIN), on(MAIN, pdl("C", waits=True)))
    )
    assert holds(order, "E0<S2") and not holds(order, "E1<S2")
    assert holds(order, "T1<S2") and holds(order, "E1<W2")


def test_pending_join_is_inherited_by_a_record_and_by_later_launches():
    relay = (on(SIDE, A), event(0, SIDE, MAIN), event(1, MAIN, THIRD), on(THIRD, pdl("C")))
    assert holds(Order(program(*relay)), "E0<S1")
    late = (on(SIDE, A), event(0, SIDE, MAIN), on(MAIN, pdl("B", trigger="early"), pdl("C")))
    assert holds(Order(program(*late)), "E0<S2")


@BOTH
def test_self_and_relayed_events_are_no_fence(captured):
    self_event = (on(MAIN, A), event(0, MAIN, MAIN), on(MAIN, pdl("C")))
    assert not holds(Order(program(*self_event, captured=captured)), "E0<S1")
    relay = (on(MAIN, A), event(0, MAIN, SIDE), event(1, SIDE, MAIN), on(MAIN, pdl("C")))
    assert not holds(Order(program(*relay, captured=captured)), "E0<S1")
    longer = (*relay[:2], event(1, SIDE, THIRD), event(2, THIRD, MAIN), relay[3])
    assert not holds(Order(program(*longer, captured=captured)), "E0<S1")


def test_captured_old_event_adds_a_programmatic_parent():
    parts = (on(MAIN, A), (Record(MAIN, 0),), on(MAIN, pdl("B", trigger="early")))
    last = on(MAIN, pdl("C", waits=True))
    assert not holds(Order(program(*parts, last, captured=True)), "E0<W2")
    rejoined = Order(program(*parts, (Wait(MAIN, 0),), last, captured=True))
    assert holds(rejoined, "E0<W2") and not holds(rejoined, "E0<S2")
    assert not holds(Order(program(*parts, (Wait(MAIN, 0),), last)), "E0<W2")


def test_wait_binds_to_the_latest_record_at_the_call():
    first, second = on(SIDE, A), on(SIDE, plain("B"))
    early = (first, event(0, SIDE, MAIN), second, (Record(SIDE, 0),), on(MAIN, plain("C")))
    order = Order(program(*early))
    assert holds(order, "E0<S2") and not holds(order, "E1<S2")


@BOTH
def test_wait_on_an_event_never_recorded(captured):
    given = program(on(SIDE, A), (Wait(MAIN, 3),), on(MAIN, plain("C")), captured=captured)
    assert edges(given).unbound == (Unbound(0, 1, MAIN, 3, captured),)
    alone = program(on(SIDE, A), on(MAIN, plain("C")), captured=captured)
    assert edges(alone).parents == edges(given).parents


def test_events_do_not_cross_into_a_capture_but_survive_it():
    eager = Segment((*on(MAIN, A), Record(MAIN, 0)))
    graph = Segment((Wait(SIDE, 0), *on(SIDE, pdl("B"))), True, SIDE)
    order = Order(Program((eager, graph)))
    assert not holds(order, "E0<S1") and order.edges.unbound[0].segment == 1
    after = Segment((Wait(SIDE, 0), *on(SIDE, pdl("C"))))
    order = Order(Program((eager, graph, after)))
    assert holds(order, "E0<S2") and holds(order, "E1<S2")


@BOTH
def test_copies_are_full_on_both_sides(captured):
    order = Order(
        program(on(MAIN, A, Copy("m"), pdl("C", waits=True, trigger="early")), captured=captured)
    )
    assert holds(order, "E0<S1") and holds(order, "E1<S2")


def test_mixed_captured_front_is_full_only_from_the_copy():
    parts = (on(SIDE, Copy("m")), on(MAIN, A), event(0, SIDE, MAIN), on(MAIN, pdl("C")))
    order = Order(program(*parts, captured=True))
    assert holds(order, "E0<S2") and holds(order, "T1<S2") and not holds(order, "E1<S2")


def test_graph_ends_when_all_its_nodes_are_flushed_not_only_the_leaves():
    graph = Segment(on(MAIN, A, pdl("B")), True)
    order = Order(Program((graph, Segment(on(MAIN, pdl("C"))))))
    assert holds(order, "E0<S2") and holds(order, "E1<S2")
    order = Order(Program((graph, graph)))
    assert holds(order, "E0<S2") and holds(order, "E0<S3")


def test_graph_runs_on_the_queue_that_launches_it():
    # Captured on the side stream, launched on main: main's wait for it is its own work.
    graph = Segment(on(SIDE, A), True, MAIN)
    tail = (*event(0, MAIN, SIDE), *event(1, SIDE, MAIN), *on(SIDE, pdl("C")))
    order = Order(Program((graph, Segment(tail))))
    assert order.edges.queues == (MAIN, SIDE) and holds(order, "E0<S1")
    joined = (*on(SIDE, plain("B")), Record(SIDE, 0), Wait(MAIN, 0))
    order = Order(Program((Segment(joined), Segment(on(SIDE, A), True, MAIN))))
    assert holds(order, "E0<S1")


def test_graph_without_nodes_is_still_a_plain_item():
    empty = Segment((Record(MAIN, 0),), True, MAIN)
    order = Order(Program((Segment(on(MAIN, A)), empty, Segment(on(MAIN, pdl("C"))))))
    assert holds(order, "E0<S1")


@BOTH
def test_m1_completes_in_order_and_only_that(captured):
    given = program(on(MAIN, A, pdl("B"), pdl("C", waits=True)), captured=captured)
    assert not holds(Order(given), "E0<E1") and not holds(Order(given), "E0<W2")
    order = Order(given, frozenset({"m1"}))
    assert holds(order, "E0<E1") and holds(order, "E0<W2")
    assert not holds(order, "E0<X1") and not holds(order, "E0<S2")
    plain_pair = program(on(MAIN, A), on(SIDE, pdl("B")), captured=captured)
    assert not holds(Order(plain_pair, frozenset({"m1"})), "E0<E1")


def test_chain_names_the_construct_of_each_edge():
    given = program(on(MAIN, A), event(4, MAIN, SIDE), on(SIDE, pdl("B"), pdl("C", waits=True)))
    steps = Order(given).chain((0, "E"), (2, "W"))
    assert [(step.first, step.second, step.rule) for step in steps] == [
        ((0, "E"), (1, "S"), "join"),
        ((1, "S"), (1, "X"), "body"),
        ((1, "X"), (2, "S"), "early_start"),
        ((2, "S"), (2, "W"), "enter"),
    ]
    assert steps[0].text == (
        "B#1 starts behind the wait on event 4, which covers A#0 on another stream"
    )
    assert Order(given).chain((1, "W"), (1, "S")) == []  # one moment
    captured = Program((Segment(given.segments[0].actions, captured=True),))
    text = Order(captured).chain((0, "T"), (1, "S"))[0].text
    assert text.startswith("A#0 to B#1 is a programmatic edge of the graph: B#1 starts when")
    assert text.endswith("(through event 4)")


def test_chain_of_unordered_instants_is_refused():
    order = Order(program(on(MAIN, A, pdl("C"))))
    with pytest.raises(ValueError, match="the completion of A#0 is not ordered before the start"):
        order.chain((0, "E"), (1, "S"))
    with pytest.raises(ValueError, match="no launch 2; the program has 2"):
        order.ordered((0, "E"), (2, "S"))


def test_missing_says_what_does_hold():
    order = Order(program(on(MAIN, A, pdl("B", trigger="early"), pdl("C", waits=True))))
    gap = order.missing((0, "E"), (2, "W"))
    assert (gap.reached, gap.covered, gap.silent) == ((0, "T"), None, (1,))
    assert gap.text == (
        "the completion of A#0 is not ordered before the wait of C#2; only the trigger of A#0 "
        "is; B#1 never waits, so what is behind it does not cover what came first"
    )
    near = Order(program(on(MAIN, A, pdl("C", waits=True)))).missing((0, "E"), (1, "S"))
    assert near.covered == (1, "W") and near.silent == ()
    assert near.text.endswith("the order holds from the wait of C#1 on")
    apart = Order(program(on(MAIN, A), on(SIDE, A))).missing((0, "E"), (1, "S"))
    assert apart.reached is None and "nothing orders A#0 before it" in apart.text
    assert order.missing((0, "T"), (2, "S")) is None


def test_regions():
    left = plain("A", (Access("x", True, box=((0, 4),)),), "early")
    for box, races in (((4, 8), 0), ((3, 8), 1)):
        given = program(on(MAIN, left, pdl("C", (Access("x", False, box=(box,)),))))
        assert len(check(given)) == races
    unknown = pdl("C", (Access("x", False, box=((9, 10), (0, 1))),))
    assert len(check(program(on(MAIN, left, unknown)))) == 1


def test_a_launch_does_not_race_with_itself():
    both = pdl("C", reads("x", early=True) + writes("x"), waits=True)
    assert check(program(on(MAIN, both))) == ()
    (race,) = check(program(on(MAIN, A, both)))
    assert (race.first, race.second, race.kind) == ((0, 0), (1, 0), "RAW")


def test_early_prologue_reads_are_split_per_access():
    given = program(on(MAIN, A, pdl("C", reads("x", early=True) + reads("x"), waits=True)))
    assert [race.second for race in check(given)] == [(1, 0)]


def test_races_are_sorted_and_complete():
    given = program(on(MAIN, A, pdl("B", writes("x")), pdl("C", reads("x"))))
    races = check(given)
    assert list(races) == sorted(races)
    assert [(race.first[0], race.second[0], race.kind) for race in races] == [
        (0, 1, "WAW"), (0, 2, "RAW"), (1, 2, "RAW"),
    ]  # fmt: skip
    assert [race.assumption for race in races] == ["", "", "m3"]


SEEDS = range(600)


def test_closure_equals_the_rules_in_full():
    for seed in SEEDS:
        rng = random.Random(seed)
        given = random_program(rng, rng.randint(2, 9))
        m1 = bool(seed % 2)
        order = Order(given, frozenset({"m1"} if m1 else ()))
        full = FullRules(given, m1)
        points = [(p, letter) for p in range(len(order.launches)) for letter in LETTERS]
        for second in points:
            seen = {first for first in points if order.ordered(first, second)}
            assert seen == full.ancestors[second], (seed, second)


def test_scan_equals_asking_about_every_pair():
    racy = 0
    for seed in SEEDS:
        given = random_program(random.Random(seed), 8)
        for assumptions in (frozenset(), frozenset({"m3"}), frozenset({"m1", "m3"})):
            pairs = racy_pairs(given, assumptions)
            assert pairs == compare_all(given, assumptions), seed
            racy += len(pairs)
    assert racy > 1000


def test_verdict_names_the_assumption_that_orders_the_pair():
    seen = set()
    for seed in SEEDS:
        given = random_program(random.Random(seed), 7)
        races = check(given)
        racy = {
            names: racy_pairs(given, frozenset(names.split()))
            for names in ("", "m1", "m3", "m1 m3")
        }
        assert racy["m1 m3"] == racy["m1"] & racy["m3"]
        assert [(*race.first, *race.second) for race in races] == sorted(racy[""])
        for race in races:
            pair = (*race.first, *race.second)
            helps = [name for name in ("m1", "m3") if pair not in racy[name]]
            assert race.assumption == " or ".join(helps)
            assert race.verdict == ("assumed" if helps else "racy")
            seen.add(race.assumption)
    assert seen == {"", "m1", "m3", "m1 or m3"}


def test_chains_are_made_of_edges():
    for seed in range(60):
        order = Order(random_program(random.Random(seed), 7))
        size = len(order.launches)
        for first in range(size):
            for second in range(first + 1, size):
                start, stop = (first, "E"), (second, "E")
                if not order.ordered(start, stop):
                    assert order.missing(start, stop).text
                    continue
                steps = order.chain(start, stop)
                ends = [order.number(step.second) for step in steps]
                begins = [order.number(step.first) for step in steps]
                assert begins == [order.number(start), *ends[:-1]]
                assert ends[-1] == order.number(stop)
                for step, target in zip(steps, ends, strict=True):
                    known = {(edge.source, edge.rule) for edge in order.edges.parents[target]}
                    assert (order.number(step.first), step.rule) in known


def test_unfenced_reads_are_reads_after_writes_that_are_safe_in_time():
    found = 0
    for seed in SEEDS:
        given = random_program(random.Random(seed), 7)
        races = unfenced(given)
        racy = {(race.first, race.second) for race in check(given)}
        assert not racy & {(race.first, race.second) for race in races}
        assert all((race.kind, race.assumption) == ("RAW", "fence") for race in races)
        found += len(races)
    assert found
