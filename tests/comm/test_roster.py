"""The roster and the gate of processes, with two ranks of one process: their files do not mind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kpipe.runtime.comm import process_gate
from kpipe.runtime.comm.gate import RankAborted
from kpipe.runtime.comm.process_gate import ProcessGate
from kpipe.runtime.comm.roster import Roster

RANKS = 3


@pytest.fixture
def rosters(tmp_path: Path):
    made = [Roster(tmp_path, rank, RANKS) for rank in range(RANKS)]
    for roster in made:
        roster.enter()
    for roster in made:
        roster.see()
    yield made
    for roster in made:
        roster.close()


class Explained(Exception):
    """What a wait ends with."""


def outcome(roster: Roster, ready, timeout_s: float = 60.0) -> str:
    gate = ProcessGate(roster, timeout_s)
    with pytest.raises(Explained) as caught:
        gate.wait(roster.rank, ready, Explained)
    return str(caught.value)


def test_a_rank_that_says_nothing_any_more_is_gone(rosters):
    assert rosters[0].gone() == () and rosters[0].others_running()
    rosters[1].end()
    rosters[1].close()
    assert rosters[0].gone() == ()  # it had said that it ends
    rosters[2].close()
    assert rosters[0].gone() == (2,) and not rosters[0].others_running()
    assert outcome(rosters[0], lambda: False) == "the process of rank 2 is no more"


def test_a_failure_is_heard_and_cut_to_what_fits(rosters):
    gate = ProcessGate(rosters[0], 60.0)
    rosters[2].fail("ValueError: " + "x" * 10_000)
    for call in (lambda: gate.wait(0, lambda: False, Explained), gate.holding(0).__enter__):
        with pytest.raises(RankAborted, match="rank 0 stopped: rank 2 failed with ValueError: xxx"):
            call()
    assert len(rosters[0].failure()[1]) == 4096 - 32
    gate.wait(0, lambda: True, Explained)  # words that are there are there


def test_when_all_wait_nobody_waits_for_the_deadline(rosters):
    rosters[1].wait_at(0)
    rosters[2].enter_exchange()
    assert outcome(rosters[0], lambda: False) == "every rank waits or has ended"
    rosters[2].leave_exchange()
    rosters[2].end()
    assert outcome(rosters[0], lambda: False) == "every rank waits or has ended"


def test_a_rank_that_has_not_left_an_exchange_yet_may_still_write(rosters):
    """It sleeps in an exchange that this rank has left; in the next one it waits for this rank."""
    rosters[2].end()
    for roster in rosters[:2]:
        roster.enter_exchange()
    assert rosters[0].may_write() == ()
    rosters[0].leave_exchange()
    assert rosters[0].may_write() == (1,)
    rosters[1].leave_exchange()
    rosters[1].enter_exchange()
    assert rosters[0].may_write() == ()


def test_a_word_that_came_behind_the_look_is_seen(rosters):
    """Rank 1 stores and waits between this rank's look and its judgement."""
    rosters[2].end()
    looks = iter([False, True])
    rosters[1].wait_at(0)
    ProcessGate(rosters[0], 60.0).wait(0, lambda: next(looks), Explained)
    assert next(looks, None) is None


def test_a_rank_that_waited_before_a_write_may_still_write(rosters, monkeypatch):
    rosters[2].end()
    rosters[1].wait_at(0)
    with ProcessGate(rosters[0], 60.0).writing(0):
        pass
    assert rosters[0].may_write() == (1,) and rosters[1].writes() == 1
    now = iter(range(100))
    monkeypatch.setattr(process_gate.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(process_gate.time, "sleep", lambda seconds: None)
    assert outcome(rosters[0], lambda: False, timeout_s=5.0) == "after 5 s"
    assert rosters[1].may_write() == (0,)  # nobody who has stopped waiting counts as waiting
