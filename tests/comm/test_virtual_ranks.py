"""Groups of ranks: results, failures, and what a rank gets from its group."""

from __future__ import annotations

import re
import threading

import pytest
import torch

from kpipe.runtime.comm.gate import Gate
from kpipe.runtime.comm.mailbox import MailboxError, MailboxSpec, MailboxTimeout
from kpipe.runtime.comm.virtual_ranks import RankAborted, RankComm, VirtualRanks

ALL = slice(None)


def slots(ranks: int, rows: int = 2, **fields) -> MailboxSpec:
    return MailboxSpec("m", (ranks, rows, 4), torch.float32, 0xFFFFFFFF, source_axis=0, **fields)


def test_results_come_in_rank_order() -> None:
    group = VirtualRanks(4)

    def backwards(comm: RankComm) -> int:
        comm.wait_until_blocked(range(comm.rank + 1, comm.ranks))
        return comm.rank * 10

    assert group.run(backwards) == [0, 10, 20, 30]
    assert group.run(lambda comm: comm.ranks) == [4, 4, 4, 4]


def test_the_original_error_is_raised_and_blocked_ranks_stop() -> None:
    group = VirtualRanks(4)
    stopped: dict[int, str] = {}

    def fail(comm: RankComm) -> None:
        if comm.rank == 2:
            comm.wait_until_blocked((0, 1, 3))
            raise ValueError("broken on purpose")
        try:
            comm.mailbox(slots(4), 0).poll((ALL,))
        except RankAborted as error:
            stopped[comm.rank] = str(error)
            raise

    with pytest.raises(ValueError, match="^broken on purpose") as caught:
        group.run(fail)
    assert caught.value.__notes__ == ["raised by rank 2 of 4"]
    assert stopped == {
        rank: f"rank {rank} stopped: rank 2 failed with ValueError: broken on purpose"
        for rank in (0, 1, 3)
    }


def test_a_rank_that_was_not_waiting_stops_at_its_next_call() -> None:
    group = VirtualRanks(2)
    failing = threading.Event()
    reached: list[str] = []

    def fail(comm: RankComm) -> None:
        box = comm.mailbox(slots(2), 0)
        if comm.rank == 0:
            failing.set()
            raise KeyError("first")
        failing.wait(5)
        with pytest.raises(RankAborted):
            box.poll((ALL,))  # blocks until the failure is known
        for call in (
            lambda: box.store(0, (1,), torch.ones(2, 4)),
            lambda: box.rearm((1,)),
            lambda: box.poll((1,)),
        ):
            with pytest.raises(RankAborted, match="^rank 1 stopped: rank 0 failed with KeyError"):
                call()
            reached.append("stopped")
        raise RuntimeError("a later error does not hide the first")

    with pytest.raises(KeyError, match="first"):
        group.run(fail)
    assert reached == ["stopped"] * 3


def test_a_failed_group_does_not_run_again() -> None:
    group = VirtualRanks(2)
    with pytest.raises(ZeroDivisionError):
        group.run(lambda comm: 1 // comm.rank)
    with pytest.raises(RankAborted, match="^rank 0 of this group failed; make a new group$"):
        group.run(lambda comm: comm.rank)


def test_a_forgotten_publish_is_found_without_waiting_for_the_deadline() -> None:
    # The deadline is far beyond the patience of anybody who runs the tests.
    group = VirtualRanks(3, timeout_s=1e6)

    def forget(comm: RankComm) -> None:
        box = comm.mailbox(slots(3), 0)
        comm.stage = "value"
        if comm.rank != 1:
            for peer in range(3):
                box.store(peer, (comm.rank,), torch.ones(2, 4))
        box.poll((ALL,))

    text = "stage value, rank [012]: rank 1 has not written \\(every rank waits or has ended\\)"
    with pytest.raises(MailboxTimeout, match=text):
        group.run(forget)


def test_a_rank_that_ended_early_does_not_leave_the_others_waiting() -> None:
    group = VirtualRanks(2, timeout_s=1e6)

    def leave(comm: RankComm) -> None:
        if comm.rank == 1:
            comm.wait_until_blocked((0,))
            return
        comm.mailbox(slots(2), 0).poll((1,))

    with pytest.raises(MailboxTimeout, match="rank 0: rank 1 has not written") as caught:
        group.run(leave)
    assert caught.value.__notes__ == ["raised by rank 0 of 2"]


def test_the_deadline_ends_a_poll_while_another_rank_is_busy() -> None:
    group = VirtualRanks(2, timeout_s=0.05)
    failed = threading.Event()

    def busy(comm: RankComm) -> None:
        if comm.rank == 1:
            failed.wait(5)
            return
        try:
            comm.mailbox(slots(2), 1).poll((1,))
        finally:
            failed.set()

    with pytest.raises(MailboxTimeout, match=re.escape("rank 1 has not written (after 0.05 s)")):
        group.run(busy)


def test_waiting_for_a_busy_rank_ends_at_the_deadline() -> None:
    group = VirtualRanks(2, timeout_s=0.05)
    failed = threading.Event()

    def busy(comm: RankComm) -> None:
        if comm.rank == 1:
            failed.wait(5)
            return
        try:
            comm.wait_until_blocked((1,))
        finally:
            failed.set()

    text = "rank 0: ranks [1] neither wait nor have ended after 0.05 s"
    with pytest.raises(TimeoutError, match=f"^{re.escape(text)}\nraised by rank 0 of 2$"):
        group.run(busy)


def test_a_rank_that_gave_up_waiting_is_busy_again() -> None:
    gate = Gate(2, timeout_s=0.05)
    gate.start((0, 1))
    with pytest.raises(LookupError, match="^after 0.05 s$"):
        gate.wait(0, lambda: False, LookupError)
    with pytest.raises(TimeoutError, match=r"^rank 1: ranks \[0\] neither wait"):
        gate.wait_until_blocked(1, (0,))
    gate.end(0)
    gate.wait_until_blocked(1, (0,))


def test_one_name_has_one_declaration() -> None:
    group = VirtualRanks(2)
    first = group.rank(0).mailbox(slots(2), 0)
    again = group.rank(0).mailbox(slots(2), 0)
    assert first.local.data_ptr() == again.local.data_ptr()
    with pytest.raises(MailboxError, match="^mailbox m is declared twice: "):
        group.rank(1).mailbox(slots(2, rows=3), 0)


def test_parities_are_separate_memory() -> None:
    comm = VirtualRanks(2).rank(1)
    even, odd = comm.mailbox(slots(2), 0), comm.mailbox(slots(2), 1)
    even.store(1, (1,), torch.ones(2, 4))
    assert (odd.local.view(torch.int32) == -1).all()
    for parity in (2, -1):
        with pytest.raises(MailboxError, match=f"^mailbox m: no parity {parity} among 2, rank 1$"):
            comm.mailbox(slots(2), parity)


def test_source_places_must_fit_the_group() -> None:
    with pytest.raises(
        MailboxError, match="^mailbox m: axis 0 has places for 3 ranks, the group has 2$"
    ):
        VirtualRanks(2).rank(0).mailbox(slots(3), 0)


def test_a_group_has_a_rank() -> None:
    with pytest.raises(ValueError, match="^a group has at least one rank, not 0$"):
        VirtualRanks(0)


def test_threads_run_without_autograd_and_the_thread_count_is_restored() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inside = VirtualRanks(2).run(
            lambda comm: (torch.get_num_threads(), torch.is_grad_enabled())
        )
        assert inside == [(1, False)] * 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_stage_names_nest() -> None:
    comm = VirtualRanks(1).rank(0)
    with comm.in_stage("outer"):
        with comm.in_stage("inner"):
            assert comm.stage == "inner"
        assert comm.stage == "outer"
    assert comm.stage == ""
