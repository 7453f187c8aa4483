"""The barriers of the wide core: every interleaving of its warps ends, and none reads too early.

The warps are written here; which barrier and phase they wait for is the code under test. Barriers
are those of the instruction set: a wait for a parity returns unless the phase of that parity is
the one that runs, so that a warp which misses a phase by one waits for ever.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kpipe.runtime.device import barrier
from kpipe.runtime.device.wide_stages import COUNT, SHARES, Stages

GATHER, SCORE, VALUE = SHARES, 2, 3  # warps
READY, FREE, SCORED, ASKED, DONE = 0, 10, 20, 30, 40


class Machine:
    """Barriers, what lies in the stages, and warps that take turns at random."""

    def __init__(self, monkeypatch, groups: int) -> None:
        self.groups = groups
        self.needed: dict[int, int] = {}
        self.arrived: dict[int, int] = {}
        self.phase: dict[int, int] = {}
        self.filled = [{warp: None for warp in range(GATHER)} for _ in range(COUNT)]
        self.weights: dict[int, int | None] = dict.fromkeys(range(SCORE))
        self.summed, self.gathered, self.asked, self.weighed = 0, 0, 0, 0
        monkeypatch.setattr(barrier, "wait_soon", self.wait)
        monkeypatch.setattr(barrier, "make_ready", self.make)
        monkeypatch.setattr(barrier, "fence_ready", lambda: None)
        places = {"ready": READY, "free": FREE, "scored": SCORED, "asked": ASKED, "done": DONE}
        unused = dict.fromkeys(("arena", "key_scales", "head_scales", "moves", "masses"))
        self.stages = Stages(blocks=9, **unused, **places)
        self.stages.initialise(GATHER, SCORE, VALUE)

    def make(self, at: int, count: int, arrivals: int) -> None:
        for place in range(at, at + count):
            self.needed[place], self.arrived[place], self.phase[place] = arrivals, 0, 0

    def wait(self, at: int, parity: int) -> None:
        self.wanted = (at, parity)

    def until(self) -> Iterator[tuple[int, int]]:
        """Hands the wait that was just asked for to the scheduler."""
        yield self.wanted

    def arrive(self, at: int) -> None:
        self.arrived[at] += 1
        if self.arrived[at] == self.needed[at]:
            self.arrived[at], self.phase[at] = 0, self.phase[at] + 1

    def gather(self, warp: int):
        for order in range(self.groups):
            if order >= COUNT:
                self.stages.wait_free(order - COUNT, warp)
                yield from self.until()
            yield None
            self.filled[order % COUNT][warp] = order
            self.gathered += 1
            yield None
            self.arrive(READY + order % COUNT)

    def score(self, warp: int):
        self.wait(ASKED, 0)
        yield from self.until()
        assert self.asked == VALUE
        for order in range(self.groups):
            self.stages.wait_ready(order)
            yield from self.until()
            assert set(self.filled[order % COUNT].values()) == {order}
            if order > 0:
                self.arrive(SCORED)  # of the group before: values start behind these scores
                self.stages.wait_free(order - 1)
                yield from self.until()
            self.weights[warp] = order
            yield None
        if self.groups > 0:
            self.arrive(SCORED)
        yield None
        self.weighed += 1
        self.arrive(DONE)

    def value(self, warp: int):
        yield None
        self.asked += 1  # its part of the query
        yield None
        self.arrive(ASKED)
        for order in range(self.groups):
            self.stages.wait_ready(order)
            yield from self.until()
            self.stages.wait_scored(order)
            yield from self.until()
            for share in range(SHARES):  # what it reads stays while it reads
                keys = [self.filled[order % COUNT][later] for later in range(share, SHARES)]
                assert set(keys) == {order}
                assert set(self.weights.values()) == {order}
                yield None
                self.arrive(self.stages.free_of(order) + share)
            self.summed += 1
        self.arrive(DONE)
        self.wait(DONE, 0)
        yield from self.until()
        assert self.summed == self.groups * VALUE, "behind it nobody reads the stages"
        assert self.weighed == SCORE, "nor the query, and the masses are there"
        written = self.gathered, self.asked
        assert written == (self.groups * GATHER, VALUE), "sums overwrite what has been stored"

    def run(self, choices: random.Random) -> None:
        """Lets a warp that can go on take a step, until all have ended."""
        kinds = (self.gather, GATHER), (self.score, SCORE), (self.value, VALUE)
        warps = [kind(warp) for kind, count in kinds for warp in range(count)]
        blocked: dict = dict.fromkeys(warps)
        while blocked:
            free = [w for w, at in blocked.items() if at is None or self.phase[at[0]] % 2 != at[1]]
            assert free, f"all wait: {sorted(at for at in blocked.values() if at)}"
            warp = choices.choice(free)
            try:
                blocked[warp] = next(warp)
            except StopIteration:
                del blocked[warp]


def test_sums_that_do_not_wait_overwrite_what_is_on_its_way(monkeypatch):
    def value(machine: Machine, warp: int):
        for step in whole(machine, warp):
            yield None if step == (DONE, 0) else step

    whole = Machine.value
    monkeypatch.setattr(Machine, "value", value)
    with pytest.raises(AssertionError, match="nobody reads|nor the query|sums overwrite"):
        for seed in range(300):
            Machine(monkeypatch, 2).run(random.Random(seed))


@pytest.mark.parametrize("groups", [0, 1, 2, 3, 7])
def test_every_interleaving_ends(monkeypatch, groups):
    for seed in range(300):
        machine = Machine(monkeypatch, groups)
        machine.run(random.Random(seed))
        assert machine.summed == groups * VALUE
        for place, count in machine.phase.items():
            assert machine.arrived[place] == 0, f"barrier {place} in phase {count}"
