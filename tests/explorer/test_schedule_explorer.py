"""The explorer against hand-written chains, and against itself on random programs."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from explorer.chains import (
    READ_X,
    READ_Y,
    WRITE_X,
    WRITE_Y,
    captured,
    eager,
    edge,
    graph,
    middle,
    reader,
    touching,
    writer,
)
from explorer.enqueue import enqueue, is_valid
from explorer.generator import MODES, random_program, two_kernel_programs, weaken, weakenings
from explorer.machine import explore, racy_pairs
from kpipe.codegen.proof.program import (
    Access,
    Copy,
    Kernel,
    Launch,
    Program,
    Record,
    Segment,
    Wait,
)

READINGS = (frozenset(), frozenset({"m1"}), frozenset({"m3"}), frozenset({"m1", "m3"}))
SAFE, RACY, M1, M3 = "safe", "racy", "safe under m1", "safe under m3"

A, C, C_WAITS = writer(), reader(), reader(waits=True)
HELD = writer("never")
Z = touching(middle("Z", False, trigger="early"), WRITE_X)  # a side writer of x
OTHER = touching(writer(), WRITE_Y)  # a triggering kernel on the main stream that is no writer of x
SILENT = middle()
FORK, JOIN = edge(0, 1, 7), edge(1, 0, 8)
SIDE_C, SIDE_C_WAITS, SIDE_C_PLAIN = (1, C), (1, C_WAITS), (1, reader(pdl=False))
EARLY_C = Kernel("C", (Access("x", False, early=True),), pdl=True, waits=True)

# name: (chain, verdict when eager, verdict when captured).  Every conflict in a chain counts.
CHAINS = {
    "plain after plain": ((A, reader(pdl=False)), SAFE, SAFE),
    "wait": ((A, C_WAITS), SAFE, SAFE),
    "early read in front of the wait": ((A, EARLY_C), RACY, RACY),
    "no wait": ((A, C), RACY, RACY),
    "held writer, no wait": ((HELD, C), M3, M3),
    "held reader, then a writer without wait": (
        (touching(HELD, READ_X), touching(C, WRITE_X)),
        SAFE,
        SAFE,
    ),
    "plain after a trigger": ((A, reader(pdl=False)), SAFE, SAFE),
    "silent middle, then a wait": ((A, SILENT, C_WAITS), M1, M1),
    "two silent middles, then a wait": ((A, SILENT, SILENT, C_WAITS), M1, M1),
    "waiting middle, then a wait": ((A, middle(waits=True, trigger="early"), C_WAITS), SAFE, SAFE),
    "waiting middle, then no wait": ((A, middle(waits=True, trigger="early"), C), RACY, RACY),
    "trigger behind the wait": ((A, middle(waits=True, trigger="after_wait"), C), SAFE, SAFE),
    "silent middle, then plain": ((A, SILENT, reader(pdl=False)), SAFE, M1),
    "silent middle, plain on the side": ((A, SILENT, FORK, SIDE_C_PLAIN), SAFE, M1),
    "fork to a side reader": ((A, FORK, SIDE_C), SAFE, RACY),
    "fork to a waiting side reader": ((A, FORK, SIDE_C_WAITS), SAFE, SAFE),
    "fork to a plain side reader": ((A, FORK, SIDE_C_PLAIN), SAFE, SAFE),
    "memset between": ((A, Copy("m"), C), SAFE, SAFE),
    "memset writes": ((Copy("m", WRITE_X), C), SAFE, SAFE),
    "memset reads, no wait": ((Copy("m", READ_X), touching(C, WRITE_X)), SAFE, SAFE),
    "join of a side kernel leaves the in-stream edge": (
        (FORK, (1, middle("D", False)), A, JOIN, C),
        RACY,
        RACY,
    ),
    "join of a side writer": (
        (FORK, (1, Z), OTHER, JOIN, C),
        SAFE,
        RACY,
    ),
    "join as the first act": ((FORK, (1, A), JOIN, C), SAFE, RACY),
    "side chain with a silent middle": (
        (A, FORK, (1, middle("D", trigger="early")), SIDE_C_WAITS),
        SAFE,
        M1,
    ),
    "side chain behind a plain kernel": ((A, FORK, (1, middle("D", False)), SIDE_C), SAFE, SAFE),
    "fork in between weakens nothing": ((A, FORK, (1, middle("D", False)), C), RACY, RACY),
    "event on its own stream": ((A, *[edge(0, 0)], C), RACY, RACY),
    "diamond": (
        (middle("R", False, trigger="early"), FORK, (1, touching(middle("Z"), WRITE_X)),
         touching(writer(pdl=True), WRITE_Y), JOIN, C),
        SAFE,
        M3,
    ),
    "diamond with a triggering side": (
        (middle("R", False, trigger="early"), FORK, (1, replace(Z, pdl=True)),
         touching(writer(pdl=True), WRITE_Y), JOIN, C),
        SAFE,
        RACY,
    ),
    "relay out and straight back": ((A, FORK, JOIN, C), RACY, RACY),
    "relay, then a wait": ((A, FORK, JOIN, C_WAITS), SAFE, SAFE),
    "fork of a plain kernel and join": ((A, FORK, (1, middle("D", False)), JOIN, C), SAFE, SAFE),
    "fork of a programmatic kernel and join": (
        (A, FORK, (1, middle("D", trigger="early")), JOIN, C),
        SAFE,
        RACY,
    ),
    "silent, then a side reader": ((A, SILENT, FORK, SIDE_C), SAFE, RACY),
    "writer beside a forked memset": ((FORK, A, (1, Copy("m")), JOIN, C), RACY, RACY),
    "forked memset joined": ((FORK, (1, Copy("m", WRITE_X)), JOIN, C), SAFE, SAFE),
    "stale event": ((*[edge(0, 1, 3)], A, (Wait(1, 3),), SIDE_C), RACY, RACY),
    "chain of early triggers": (
        (A, middle("B", trigger="early"), middle("D", waits=True), C_WAITS),
        M1,
        M1,
    ),
    "old event makes the grandparent a parent": (
        (A, FORK, SILENT, JOIN, C_WAITS),
        M1,
        SAFE,
    ),
}  # fmt: skip


def verdict(program: Program) -> str:
    """The weakest reading under which the program is safe."""
    plain, m1, m3, both = (bool(racy_pairs(program, 1, reading)) for reading in READINGS)
    assert both <= m1 <= plain and both <= m3 <= plain
    if not plain:
        return SAFE
    if not m1:
        return M1
    if not m3:
        return M3
    assert both, "no chain here needs both readings"
    return RACY


@pytest.mark.parametrize("name", CHAINS)
def test_chain(name: str) -> None:
    items, when_eager, when_captured = CHAINS[name]
    assert verdict(eager(*items)) == when_eager
    assert verdict(captured(*items)) == when_captured


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ((graph(A), graph(C)), SAFE),
        ((graph(A), Segment((Launch(0, C),))), SAFE),
        ((Segment((Launch(0, A),)), graph(C)), SAFE),
        # Not only the last nodes of a graph end it, and its nodes run on the launching stream.
        ((graph(A, SILENT), graph(C)), SAFE),
        ((graph(FORK, (1, A), JOIN, SILENT), Segment((Launch(0, C),))), SAFE),
        ((graph(FORK, (1, A)), Segment((Launch(1, C),))), RACY),
        ((graph(FORK, (1, A)), Segment((*edge(0, 1), Launch(1, C)))), SAFE),
        # Eager steps chain programmatically into each other.
        ((Segment((Launch(0, A),)), Segment((Launch(0, C),))), RACY),
        ((Segment((Launch(0, SILENT),)), graph(A), Segment((Launch(0, C),))), SAFE),
        # Behind a graph the chain starts afresh: its second kernel is programmatic again.
        ((graph(SILENT), Segment((Launch(0, A), Launch(0, C)))), RACY),
        # An event of an eager segment outlives a graph.
        (
            (
                Segment((Launch(1, A), Record(1, 0))),
                graph(SILENT),
                Segment((Wait(0, 0), Launch(0, C))),
            ),
            SAFE,
        ),
    ],
)
def test_graph_boundaries(segments: tuple[Segment, ...], expected: str) -> None:
    assert verdict(Program(segments)) == expected


def test_both_parents_of_a_join_race_when_captured() -> None:
    """Eager, the event covers the side writer only; captured, both edges are programmatic."""
    items = (FORK, (1, Z), touching(A, WRITE_Y), JOIN, touching(C, (*READ_X, *READ_Y)))
    assert racy_pairs(eager(*items)) == {(1, 0, 2, 1)}
    assert racy_pairs(captured(*items)) == {(0, 0, 2, 0), (1, 0, 2, 1)}


def test_wait_binds_to_the_record_before_the_call() -> None:
    wait_first = eager((1, A), (Wait(0, 0), Record(1, 0)), C)
    rebound = eager((Record(1, 0),), (1, A), (Record(1, 0), Wait(0, 0)), C)
    not_recorded = eager((1, A), (Wait(0, 5),), C)
    assert [verdict(p) for p in (wait_first, rebound, not_recorded)] == [RACY, SAFE, RACY]


def test_record_carries_waits_that_no_kernel_has_consumed() -> None:
    program = eager((2, A), edge(2, 1, 0), edge(1, 0, 1), C)
    assert verdict(program) == SAFE


def test_pairs_name_launches_and_accesses() -> None:
    first = Kernel("a", (*WRITE_Y, *READ_X, *WRITE_X), trigger="early")
    second = Kernel("b", (*READ_X, Access("x", True, early=True)), pdl=True, waits=True)
    assert racy_pairs(eager(first, second)) == {(0, 1, 1, 1), (0, 2, 1, 1)}


def test_boxes_that_do_not_overlap_never_race() -> None:
    left, right = ((0, 2), (0, 8)), ((2, 4), (0, 8))
    first = Kernel("a", (Access("x", True, box=left),), trigger="early")
    second = Kernel("b", (Access("x", False, box=right),), pdl=True)
    assert verdict(eager(first, second)) == SAFE
    whole = touching(second, READ_X)
    assert verdict(eager(first, whole)) == RACY


def test_a_read_ends_at_the_exit_and_a_write_at_the_flush() -> None:
    """Behind a kernel that never triggers, without a wait: only its stores are still open."""
    first = Kernel("a", (*READ_X, *WRITE_Y))
    second = Kernel("b", (*WRITE_X, *READ_Y), pdl=True)
    assert racy_pairs(eager(first, second)) == {(0, 1, 1, 1)}
    assert not racy_pairs(eager(first, second), 1, frozenset({"m3"}))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ((A, (1, C)), "stream 1 is used in the capture but never forked into it"),
        ((A, (Wait(0, 4),), C), "event 4 is waited for but not recorded in the capture"),
    ],
)
def test_invalid_captures_are_refused(items: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        racy_pairs(captured(*items))


def test_a_capture_has_to_join_its_streams() -> None:
    open_end = Program((Segment((*FORK, Launch(1, A)), True, 0),))
    assert not is_valid(open_end)
    with pytest.raises(ValueError, match="ends before its origin stream has joined A"):
        racy_pairs(open_end)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="unknown assumption m2: known are m1 and m3"):
        racy_pairs(eager(A, C), 1, frozenset({"m2"}))
    with pytest.raises(ValueError, match="at least one thread block"):
        racy_pairs(eager(A, C), 0)
    with pytest.raises(ValueError, match="mode 'lazy' is not one of eager, captured, mixed"):
        random_program(random.Random(0), "lazy")


def samples(mode: str, count: int, most: int = 6) -> list[Program]:
    """The same random programs in every run."""
    return [random_program(random.Random(f"test:{mode}:{k}"), mode, most) for k in range(count)]


@pytest.mark.parametrize("mode", MODES)
def test_taking_enabling_steps_at_once_loses_nothing(mode: str) -> None:
    for program in samples(mode, 150):
        for reading in READINGS:
            short, full = (explore(program, 1, reading, every_step=e) for e in (False, True))
            assert short.racy == full.racy


@pytest.mark.parametrize("mode", MODES)
def test_two_blocks_race_like_one(mode: str) -> None:
    for program in samples(mode, 250):
        assert racy_pairs(program, 2) == racy_pairs(program)
    for program in samples(mode, 15, most=3):
        assert explore(program, 2, every_step=True).racy == racy_pairs(program)


@pytest.mark.parametrize("mode", MODES)
def test_weaker_programs_race_at_least_as_much(mode: str) -> None:
    changed = 0
    for program in samples(mode, 60):
        for reading in READINGS:
            before = racy_pairs(program, 1, reading)
            for weaker in weakenings(program):
                after = racy_pairs(weaker, 1, reading)
                assert before <= after
                changed += before != after
    assert changed > 50


@pytest.mark.parametrize("mode", MODES)
def test_one_more_event_never_adds_a_race(mode: str) -> None:
    rng = random.Random(11)
    removed = 0
    for program in samples(mode, 200) * 3:
        number = rng.randrange(len(program.segments))
        segment = program.segments[number]
        at = rng.randint(0, len(segment.actions))
        extra = edge(rng.randrange(2), rng.randrange(2), 999)
        ordered = replace(segment, actions=(*segment.actions[:at], *extra, *segment.actions[at:]))
        segments = (*program.segments[:number], ordered, *program.segments[number + 1 :])
        stronger = Program(segments)
        if is_valid(stronger):
            assert racy_pairs(stronger) <= racy_pairs(program)
            removed += racy_pairs(stronger) != racy_pairs(program)
    assert removed > 3


def test_full_edges_on_one_stream_never_race() -> None:
    """Full edges only, on one stream: nothing races, however the program is cut."""
    for mode, seed in product(MODES, range(60)):
        program = random_program(random.Random(seed), mode)
        segments = tuple(_plain(segment) for segment in program.segments)
        assert not racy_pairs(Program(segments))


def _plain(segment: Segment) -> Segment:
    launches = (a for a in segment.actions if isinstance(a, Launch))
    nodes = (replace(a.node, pdl=False) if isinstance(a.node, Kernel) else a.node for a in launches)
    return Segment(tuple(Launch(0, node) for node in nodes), segment.captured, 0)


@pytest.mark.parametrize("mode", MODES)
def test_generator_covers_its_range_with_valid_programs(mode: str) -> None:
    programs = samples(mode, 400)
    assert programs == samples(mode, 400)
    assert all(is_valid(program) for program in programs)
    assert {len(program.launches) for program in programs} == set(range(2, 7))
    nodes = [launch.node for program in programs for launch in program.launches]
    kernels = {(n.pdl, n.waits, n.trigger) for n in nodes if isinstance(n, Kernel)}
    assert len(kernels) == 12 and any(isinstance(n, Copy) for n in nodes)
    accesses = {(a.buffer, a.write, a.early, a.box) for n in nodes for a in n.accesses}
    assert len(accesses) == 32
    streams = {len({launch.stream for launch in program.launches}) for program in programs}
    assert streams == {1, 2, 3}
    actions = [a for p in programs for segment in p.segments for a in segment.actions]
    unbound = any(isinstance(a, Wait) and a.event == 3 for a in actions)
    assert unbound == (mode != "captured")
    racy = sum(bool(racy_pairs(program)) for program in programs)
    assert 80 < racy < 320


def test_mixed_programs_cut_and_repeat() -> None:
    programs = samples("mixed", 300)
    kinds = {tuple(segment.captured for segment in program.segments) for program in programs}
    assert set(product((False, True), repeat=3)) <= kinds
    half = [p.segments[: len(p.segments) // 2] for p in programs]
    assert any(h and h * 2 == p.segments for h, p in zip(half, programs, strict=True))


def test_weaken_takes_one_of_the_weakenings() -> None:
    program = eager(A, *[edge(0, 1)], (1, C_WAITS))
    seen = {weaken(program, random.Random(seed)) for seed in range(60)}
    assert seen == set(weakenings(program))
    assert eager(A, (Record(0, 0),), (1, C_WAITS)) in seen  # the event wait dropped
    assert eager(replace(A, pdl=True), *[edge(0, 1)], (1, C_WAITS)) in seen
    assert eager(A, *[edge(0, 1)], (1, replace(C_WAITS, waits=False))) in seen
    assert eager(A, *[edge(0, 1)], (1, replace(C_WAITS, trigger="early"))) in seen
    assert weaken(eager(touching(A, ()), Copy("m")), random.Random(0)) is not None
    assert weaken(eager(Copy("m")), random.Random(0)) is None


def test_two_kernel_programs_are_distinct_and_hold_every_kind() -> None:
    programs = list(two_kernel_programs())
    assert len(programs) == len(set(programs)) == 46_948
    kinds = {tuple(launch.node for launch in program.launches) for program in programs}
    assert len(kinds) == 11 * 11
    assert {len(enqueue(program)) for program in programs[::101]} == {2}


def test_two_blocks_race_like_one_in_two_kernel_programs() -> None:
    programs = list(two_kernel_programs())[::61]
    for program in programs:
        racy = racy_pairs(program)
        assert racy == racy_pairs(program, 2)
        assert len(racy) <= 12  # sixteen pairs of probes, four of them read against read
