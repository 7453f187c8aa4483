"""Reports about memory rather than about kernels: allocators, arenas, workspaces.

The mistakes of D06, D08 and D12 as programs, with their controls; what keeps them out of a plan is
in test_haz_cases.py.
"""

from __future__ import annotations

from pathlib import Path

from proof.proof_chains import MAIN, SIDE, event, on, plain, program, reads, writes
from spec_project import make_project, plan_of

from kpipe.codegen.proof.lower import lower
from kpipe.codegen.proof.program import Access, Copy, Kernel, Program, Reuse, Segment
from kpipe.codegen.proof.synthesis import races_of
from kpipe.codegen.proof.zeros import dirty

FORK = event(0, MAIN, SIDE)
JOIN = event(1, SIDE, MAIN)
Named = tuple[str, str, str, str, str]  # first, second, buffer, kind, verdict


def named(given: Program) -> set[Named]:
    """Races with the names of their launches."""
    node = [launch.node.name for launch in given.launches]
    return {
        (node[r.first[0]], node[r.second[0]], r.buffer, r.kind, r.assumption or r.verdict)
        for r in races_of(given)
    }


def both(*parts: tuple) -> set[Named]:
    """Races of actions that are the same eagerly and captured."""
    eager, captured = (named(program(*parts, captured=mode)) for mode in (False, True))
    assert eager == captured
    return eager


def given_back(buffer: str, stream: int) -> tuple:
    return on(stream, Reuse(f"reuse of {buffer}", writes(buffer)))


def test_D06_a_hand_off_through_an_allocator() -> None:
    """The case's input: allocated on the side stream, read on main, dropped once it is enqueued."""
    produced = (*FORK, *on(SIDE, plain("aux", writes("k_fp8"))), *JOIN)
    read = on(MAIN, plain("idx", reads("k_fp8") + writes("topk")))
    back = event(2, MAIN, SIDE)
    assert both(produced, read) == set()  # the kernels are in order: that is the trap
    lost = both(produced, read, given_back("k_fp8", SIDE))
    assert lost == {("idx", "reuse of k_fp8", "k_fp8", "WAR", "racy")}
    assert both(produced, read, back, given_back("k_fp8", SIDE)) == set()  # joined back
    assert both(produced, read, given_back("k_fp8", MAIN)) == set()  # main owns it
    # A join that comes ahead of the read is none, and neither is one to a third stream.
    assert both(produced, back, read, given_back("k_fp8", SIDE)) == lost
    assert both(produced, read, event(2, MAIN, 2), given_back("k_fp8", SIDE)) == lost


def test_D06_three_hand_offs_are_found_one_by_one() -> None:
    fork = (*event(0, MAIN, SIDE), *event(1, MAIN, 2))
    aux = (*on(SIDE, plain("aux", writes("weights", "k_fp8", "k_scale"))), *event(2, SIDE, 2))
    index = on(2, plain("idx", reads("weights", "k_fp8", "k_scale") + writes("topk")))
    caller = (*event(3, 2, MAIN), *on(MAIN, plain("attn", reads("topk"))))
    dropped = sum((given_back(name, SIDE) for name in ("weights", "k_fp8", "k_scale")), ())
    assert both(fork, aux, index, caller, dropped, given_back("topk", 2)) == {
        ("idx", "reuse of weights", "weights", "WAR", "racy"),
        ("idx", "reuse of k_fp8", "k_fp8", "WAR", "racy"),
        ("idx", "reuse of k_scale", "k_scale", "WAR", "racy"),
        ("attn", "reuse of topk", "topk", "WAR", "racy"),
    }
    back = (*event(4, 2, SIDE), *event(5, MAIN, 2))
    assert both(fork, aux, index, caller, back, dropped, given_back("topk", 2)) == set()


def test_D08_storage_that_goes_back_under_a_graph() -> None:
    """Replay, grow, replay: the second replay uses what the allocator has got back."""
    replay = Segment(on(MAIN, plain("replay", reads("arena") + writes("out"))), True)
    grow = Segment((*given_back("arena", MAIN), *on(MAIN, plain("eager", writes("arena_2")))))
    assert named(Program((replay, grow, replay))) == {
        ("reuse of arena", "replay", "arena", "RAW", "racy")
    }
    frozen = Segment(on(MAIN, plain("eager", writes("arena_2"))))
    assert named(Program((replay, frozen, replay))) == set()
    # Ahead of the first capture the arena may grow as it likes.
    assert named(Program((grow, replay, replay))) == set()


def test_D12_order_does_not_clean_a_workspace() -> None:
    """The case's input: perfectly ordered, and the counters start from what prefill has left."""

    def pairs(*nodes: Kernel | Copy) -> set[tuple[str, str]]:
        given = program(on(MAIN, *nodes))
        assert named(given) == set()
        name = [launch.node.name for launch in given.launches]
        return {(name[pair.first[0]], name[pair.second[0]]) for pair in dirty(given)}

    counters = (Access("ws", True, box=((0, 8),), zero=True),)
    prefill, decode = plain("P", writes("ws")), plain("D", counters)
    zero = Copy("zero", counters)
    assert pairs(prefill, decode) == {("P", "D")}
    assert pairs(prefill, zero, decode) == set()
    assert pairs(decode, plain("D2", counters)) == set()
    assert pairs(plain("P", writes("ws_p")), decode) == set()
    # It stays dirty: also the launch after the next one finds it.
    again = plain("D2", counters)
    assert pairs(prefill, decode, again) == {("P", "D"), ("P", "D2")}
    assert pairs(zero, prefill, decode) == {("P", "D")}


def test_D12_no_plan_dirties_its_counters(tmp_path: Path) -> None:
    plan = plan_of(make_project(tmp_path))
    counted = 0
    for method in plan.methods:
        given = lower(plan, method.plan, captured=True)
        counted += sum(access.zero for launch in given.launches for access in launch.node.accesses)
        assert dirty(given) == ()
    assert counted
