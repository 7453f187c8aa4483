"""Ranks of one device: addresses, turns, and what a time-out says; on the CPU's memory."""

from __future__ import annotations

import re
import threading

import pytest
import torch

from kpipe.runtime.comm.device_mailbox import STAGES, own_offset, peer_table
from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.comm.mailbox import MailboxError, MailboxSpec, MailboxTimeout
from kpipe.runtime.comm.sanitise import EMPTY_ID
from kpipe.runtime.comm.turns import TurnAborted, Turns

RANKS = 4
QUERY = MailboxSpec(
    "q_mail", (6, 8, 48), torch.float8_e4m3fn, 0xFFFFFFFF, source_axis=1, source_stride=2
)
ROWS = MailboxSpec("rows", (RANKS, 6, 2, 32), torch.bfloat16, 0x80000000, source_axis=0)
GATHER = MailboxSpec("gather", (6, 64), torch.bfloat16, 0x80000000, source_axis=1, source_stride=16)
SHARED = MailboxSpec("shared", (6, 16), torch.int32, 0xFFFFFFFF)


def group(**options) -> DeviceRanks:
    return DeviceRanks(RANKS, "cpu", **options)


@pytest.mark.parametrize("spec", [QUERY, ROWS, GATHER, SHARED], ids=lambda spec: spec.name)
def test_a_table_leads_to_the_places_of_its_rank(spec):
    """Element by element: the first place of a rank, found by indexing, lies at the address."""
    ranks = group()
    for rank in range(RANKS):
        box = ranks.rank(rank).mailbox(spec, 1)
        first = [0] * len(spec.shape)
        if spec.source_axis is not None:
            first[spec.source_axis] = rank * spec.source_stride
        for peer in range(RANKS):
            theirs = ranks.rank(peer).mailbox(spec, 1).local
            assert int(box.peers[peer]) == theirs[tuple(first)].data_ptr()
    offsets = [own_offset(spec, rank) for rank in range(RANKS)]
    assert offsets[0] == 0 and (spec.source_axis is None or len(set(offsets)) == RANKS)


def test_mailboxes_are_armed_and_apart():
    ranks = group()
    seen = set()
    for rank in range(RANKS):
        for parity in range(2):
            box = ranks.rank(rank).mailbox(ROWS, parity)
            assert (box.local.view(torch.int32) == -(2**31)).all()
            assert box is ranks.rank(rank).mailbox(ROWS, parity)
            seen.add(box.local.data_ptr())
    assert len(seen) == 2 * RANKS


@pytest.mark.parametrize("spec", [QUERY, ROWS, GATHER, SHARED], ids=lambda spec: spec.name)
def test_full_mailboxes_keep_nobody_waiting_and_say_nothing(spec):
    ranks = group()
    boxes = [ranks.rank(rank).mailbox(spec, parity) for rank in range(RANKS) for parity in (0, 1)]
    ranks.fill()
    for box in boxes:
        assert not (box.local.view(torch.int32) == spec.signed_sentinel).any()
        if spec.dtype in (torch.bfloat16, torch.float8_e4m3fn):
            assert not box.local.float().any()  # zeros, or nothing but negative ones
        else:
            assert (box.local == EMPTY_ID).all()  # the id of no candidate
    ranks.arm()
    for box in boxes:
        assert (box.local.view(torch.int32) == spec.signed_sentinel).all()


def test_operands_are_cut_to_the_rows():
    box = group().rank(1).mailbox(QUERY, 0)
    operands = box.operands(5)
    assert set(operands) == {"q_mail", "q_mail_peers", "fault"}
    assert operands["q_mail"].shape == (5, 8, 48) and operands["q_mail"].dtype == torch.uint8
    rows = group().rank(1).mailbox(ROWS, 0).operands(3)["rows"]
    assert rows.shape == (RANKS, 3, 2, 32) and rows.stride() == (6 * 64, 64, 32, 1)
    with pytest.raises(ValueError, match="mailbox q_mail: 7 rows, it holds 6 of them"):
        box.operands(7)


def test_wrong_declarations_are_refused():
    ranks = group()
    ranks.rank(0).mailbox(ROWS, 0)
    other = MailboxSpec("rows", (RANKS, 9, 2, 32), torch.bfloat16, 0x80000000, source_axis=0)
    with pytest.raises(MailboxError, match="mailbox rows is declared twice"):
        ranks.rank(1).mailbox(other, 0)
    with pytest.raises(MailboxError, match="no parity 2 among 2, rank 3"):
        ranks.rank(3).mailbox(ROWS, 2)
    with pytest.raises(MailboxError, match="places for 4 ranks, the group has 2"):
        DeviceRanks(2, "cpu").rank(0).mailbox(ROWS, 0)
    with pytest.raises(ValueError, match="at least one rank, not 0"):
        DeviceRanks(0, "cpu")
    with pytest.raises(ValueError, match="the share of rank 1 begins off a boundary of 16 bytes"):
        peer_table(QUERY, 1, [8], torch.device("cpu"))


def test_in_lockstep_nobody_passes_a_poll_before_all_have_come_to_it():
    ranks, log = group(), []

    def body(comm):
        for turn in range(3):
            log.append((turn, comm.rank))
            comm.before_poll()
        return comm.rank

    assert ranks.run(body) == list(range(RANKS))
    assert log == [(turn, rank) for turn in range(3) for rank in range(RANKS)]


def test_a_rank_that_ends_early_is_left_out():
    log = []

    def body(comm):
        for turn in range(1 + comm.rank % 2):
            log.append((turn, comm.rank))
            comm.before_poll()

    group().run(body)
    assert log == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 3)]


def test_a_failure_ends_every_rank_and_names_its_own():
    def body(comm):
        comm.before_poll()
        if comm.rank == 2:
            raise KeyError("no such thing")
        comm.before_poll()
        comm.before_poll()

    with pytest.raises(KeyError, match="no such thing") as caught:
        group().run(body)
    assert caught.value.__notes__ == ["raised by rank 2 of 4"]


def test_turns_stop_where_one_has_failed():
    turns = Turns(2)
    turns.end(1, failed=True)
    with pytest.raises(TurnAborted, match="thread 0 stopped: another one has failed"):
        turns.pass_on(0)


def test_at_once_nobody_waits_for_the_others():
    together = threading.Barrier(RANKS)

    def body(comm):
        comm.before_poll()
        together.wait(10)

    group(lockstep=False).run(body)


def record(ranks: DeviceRanks, rank: int, stage: str, address: int, seen: list[int]) -> None:
    """What a poll that gives up writes."""
    signed = [word - (1 << 32) if word >> 31 else word for word in seen]
    high, low = divmod(address, 1 << 32)
    low = low - (1 << 32) if low >> 31 else low
    words = torch.tensor([STAGES.index(stage) + 1, low, high, 0, *signed], dtype=torch.int32)
    ranks.rank(rank).record.words.copy_(words)


def test_a_time_out_says_who_waited_for_which_word():
    ranks = group()
    box = ranks.rank(1).mailbox(ROWS, 1)
    address = box.local[2, 3, 1, 16].data_ptr()  # the fragment of words 8 to 11 of that head
    record(ranks, 1, "dcp_value", address, [5, 6, 0x80000000, 0x80000000])
    (error,) = ranks.timeouts()
    assert isinstance(error, MailboxTimeout)
    assert (error.mailbox, error.stage, error.rank) == ("rows", "dcp_value", 1)
    assert (error.peers, error.word) == ((2,), (2, 3, 1, 10))
    assert str(error) == (
        "mailbox rows, parity 1, stage dcp_value, rank 1: rank 2 has not written; first missing "
        "word (2, 3, 1, 10); expected anything but 0x80000000, saw 0x00000005 0x00000006 "
        "0x80000000 0x80000000"
    )


def test_a_writer_is_found_along_the_last_axis_too():
    ranks = group()
    box = ranks.rank(0).mailbox(GATHER, 0)
    record(ranks, 0, "o_reduce", box.local[4, 40].data_ptr(), [0x80000000, 1, 1, 1])
    (error,) = ranks.timeouts()
    assert (error.peers, error.word) == ((2,), (4, 20))


def test_an_error_of_the_device_is_told_as_the_time_out_that_it_was():
    ranks = group()
    box = ranks.rank(3).mailbox(QUERY, 0)

    def body(comm):
        if comm.rank == 3:
            record(ranks, 3, "query_wait", box.local.data_ptr(), [0xFFFFFFFF] * 4)
            raise RuntimeError("unspecified launch failure")

    wanted = "stage query_wait, rank 3: rank 0 has not written; first missing word (0, 0, 0)"
    with pytest.raises(MailboxTimeout, match=re.escape(wanted)):
        ranks.run(body)
    assert not group().timeouts()
