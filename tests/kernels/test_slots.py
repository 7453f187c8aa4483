"""The ring of the sparse core: no schedule of its warps takes one phase for another."""

from __future__ import annotations

import itertools

import pytest

from kpipe.runtime.device.slots import ring_slots


def early_waits(
    slots: int, teams: int, groups: int, members: int = 1, gatherers: int = 2
) -> set[tuple[str, int]]:
    """(barrier, group) of every wait that some schedule lets through before its phase is over.

    All interleavings of the gathering warps, the `members` of the scoring teams and one value warp.
    A wait looks at the parity of the running phase, as the hardware does; copies land later than
    they are requested, in any order.
    """
    warps = teams * members
    start = ((0,) * gatherers, frozenset(), (0,) * warps, 0, *[(0,) * slots] * 3)
    seen, todo, wrong = {start}, [start], set()

    def passes(name: str, arrivals: tuple[int, ...], each: int, group: int, phase: int) -> bool:
        over = arrivals[group % slots] // each
        if over % 2 == phase % 2:
            return False
        if over <= phase:
            wrong.add((name, group))
        return True

    def counted(values: tuple[int, ...], place: int) -> tuple[int, ...]:
        return tuple(v + (n == place) for n, v in enumerate(values))

    while todo:
        requested, flying, scored, summed, ready, weighed, free = todo.pop()
        following = []
        for warp, group in enumerate(requested):
            waits = group >= slots
            if group < groups and (not waits or passes("free", free, 1, group, group // slots - 1)):
                more, copies = counted(requested, warp), flying | {(warp, group)}
                following.append((more, copies, scored, summed, ready, weighed, free))
        for copy in flying:
            here = counted(ready, copy[1] % slots)
            following.append((requested, flying - {copy}, scored, summed, here, weighed, free))
        for warp in range(warps):
            group = warp // members + teams * scored[warp]
            if group < groups and passes("ready", ready, gatherers, group, group // slots):
                more, done = counted(scored, warp), counted(weighed, group % slots)
                following.append((requested, flying, more, summed, ready, done, free))
        phase = summed // slots
        whole = summed < groups and passes("ready", ready, gatherers, summed, phase)
        if whole and passes("scored", weighed, members, summed, phase):
            given = counted(free, summed % slots)
            following.append((requested, flying, scored, summed + 1, ready, weighed, given))
        for state in following:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return wrong


@pytest.mark.parametrize(("room", "groups"), [(2, 5), (3, 5), (4, 7), (5, 6), (5, 5), (9, 4)])
def test_no_wait_takes_another_phase(room, groups):
    assert early_waits(ring_slots(room, groups, 2), 2, groups) == set()


def test_members_of_a_team_need_not_keep_step():
    assert early_waits(ring_slots(2, 5, 2), 2, 5, members=2, gatherers=1) == set()


def test_a_ring_of_any_size_would_let_some_through():
    assert ("ready", 5) in early_waits(3, 2, 7, gatherers=1)


def test_slots_that_are_used_again_belong_to_one_team():
    for room, groups in itertools.product(range(4, 40), range(1, 80)):
        slots = ring_slots(room, groups, 4)
        assert 1 <= slots <= min(room, groups)
        assert slots == groups or (slots % 4 == 0 and slots > room - 4)


def test_too_little_room_is_refused():
    expected = "shared memory has room for 3 groups of keys, 4 teams need one each"
    with pytest.raises(ValueError, match=expected):
        ring_slots(3, 64, 4)
    assert ring_slots(3, 2, 4) == 2
