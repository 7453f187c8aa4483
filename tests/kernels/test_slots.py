"""The ring of the sparse core: no schedule of its warps takes one phase for another."""

from __future__ import annotations

import itertools

import pytest

from kpipe.runtime.device.slots import ring_slots


def early_waits(slots: int, warps: int, groups: int) -> set[tuple[str, int]]:
    """(barrier, group) of every wait that some schedule lets through before its phase is over.

    All interleavings of `warps` gathering warps, as many scoring warps and one value warp. A wait
    looks at the parity of the running phase, as the hardware does; copies land later than they
    are requested, those of a warp in their order.
    """
    start = ((0,) * warps, (0,) * warps, (0,) * warps, 0, *[(0,) * slots] * 3)
    seen, todo, wrong = {start}, [start], set()

    def passes(name: str, phases: tuple[int, ...], group: int, phase: int) -> bool:
        if phases[group % slots] % 2 == phase % 2:
            return False
        if phases[group % slots] <= phase:
            wrong.add((name, group))
        return True

    def counted(values: tuple[int, ...], place: int) -> tuple[int, ...]:
        return tuple(v + (n == place) for n, v in enumerate(values))

    while todo:
        requested, landed, scored, summed, ready, weighed, free = todo.pop()
        following = []
        for warp in range(warps):
            group = warp + warps * requested[warp]
            waits = group >= slots
            if group < groups and (not waits or passes("free", free, group, group // slots - 1)):
                more = counted(requested, warp)
                following.append((more, landed, scored, summed, ready, weighed, free))
            if landed[warp] < requested[warp]:
                place = (warp + warps * landed[warp]) % slots
                more = counted(landed, warp)
                whole = counted(ready, place)
                following.append((requested, more, scored, summed, whole, weighed, free))
            group = warp + warps * scored[warp]
            if group < groups and passes("ready", ready, group, group // slots):
                more, done = counted(scored, warp), counted(weighed, group % slots)
                following.append((requested, landed, more, summed, ready, done, free))
        whole = summed < groups and passes("ready", ready, summed, summed // slots)
        if whole and passes("scored", weighed, summed, summed // slots):
            given = counted(free, summed % slots)
            following.append((requested, landed, scored, summed + 1, ready, weighed, given))
        for state in following:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return wrong


@pytest.mark.parametrize(("room", "groups"), [(2, 7), (3, 7), (4, 9), (5, 9), (6, 6), (9, 6)])
def test_no_wait_takes_another_phase(room, groups):
    assert early_waits(ring_slots(room, groups, 2), 2, groups) == set()


def test_a_ring_of_any_size_would_let_some_through():
    assert ("ready", 5) in early_waits(3, 2, 7)


def test_slots_that_are_used_again_belong_to_one_warp():
    for room, groups in itertools.product(range(4, 40), range(1, 80)):
        slots = ring_slots(room, groups, 4)
        assert 1 <= slots <= min(room, groups)
        assert slots == groups or (slots % 4 == 0 and slots > room - 4)


def test_too_little_room_is_refused():
    expected = "shared memory has room for 3 groups of keys, 4 warps need one each"
    with pytest.raises(ValueError, match=expected):
        ring_slots(3, 64, 4)
    assert ring_slots(3, 2, 4) == 2
