"""What a rank with a GPU of its own makes of errors of its device; in the host's memory."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from kpipe.runtime.comm import device_processes, peer_memory
from kpipe.runtime.comm.device_mailbox import STAGES
from kpipe.runtime.comm.device_processes import DeviceProcesses
from kpipe.runtime.comm.gate import RankAborted
from kpipe.runtime.comm.mailbox import MailboxError, MailboxSpec, MailboxTimeout
from kpipe.runtime.metadata import LayerError

SPEC = MailboxSpec("rows", (2, 3, 4), torch.int32, 0xFFFFFFFF, source_axis=0)
CPU = torch.device("cpu")


class Alone:
    """A group of which only rank 0 is there, and says what all say."""

    def __init__(self, gone: tuple[int, ...] = ()) -> None:
        self.rank, self.ranks, self.local_rank = 0, 2, 0
        self.roster = SimpleNamespace(gone=lambda: gone)
        self.failed: list[BaseException] = []
        self.topics: list[str] = []

    def exchange(self, topic: str, value: object = None) -> list[object]:
        self.topics.append(topic)
        return [value, value]

    def barrier(self, topic: str) -> None:
        self.topics.append(topic)

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)


@pytest.fixture(autouse=True)
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buffers of this process in place of two GPUs'."""

    def made(processes, count, device):
        views = tuple(torch.zeros(count, dtype=torch.int32) for _ in range(processes.ranks))
        return peer_memory.PeerMemory(views, None)

    monkeypatch.setattr(device_processes, "TRANSPORTS", {"host": made})
    monkeypatch.setattr(device_processes, "working_transport", lambda *_: ("host", ""))


def group(processes: Alone) -> DeviceProcesses:
    return DeviceProcesses(processes, device=CPU)  # type: ignore[arg-type]


def broken(one: DeviceProcesses, error: Exception) -> pytest.ExceptionInfo:
    def body(comm: object) -> None:
        raise error

    with pytest.raises(Exception) as caught:  # noqa: B017, PT011 - whatever it has become
        one.run(body)
    return caught


def test_all_have_armed_their_mailboxes_before_anybody_stores() -> None:
    processes = Alone()
    one = group(processes)
    box = one.comm.mailbox(SPEC, 0)
    assert processes.topics == ["mailbox rows", "mailbox rows armed"]
    assert (box.local == -1).all() and one.comm.mailbox(SPEC, 0) is box
    other = one.comm.mailbox(SPEC, 1)
    assert (other.peers - box.peers).tolist() == [SPEC.armed_words().nbytes] * 2
    assert len(processes.topics) == 2, "both parities are made at once"
    assert (one.comm.in_halves, one.comm.resident, list(one.here)) == (False, 1, [0])
    with pytest.raises(MailboxError, match="no parity 2 among 2, rank 0"):
        one.comm.mailbox(SPEC, 2)
    with pytest.raises(LayerError, match="this process is rank 0, not 1"):
        one.rank(1)


@pytest.mark.parametrize("gone", [(), (1,)])
def test_a_device_that_is_lost_is_told_as_the_poll_that_gave_up(gone: tuple[int, ...]) -> None:
    processes = Alone(gone)
    one = group(processes)
    address = one.comm.mailbox(SPEC, 1).local[1, 2].data_ptr()
    high, low = divmod(address, 1 << 32)
    low = low - (1 << 32) if low >> 31 else low
    words = [STAGES.index("topk_merge") + 1, low, high, 0, 5, -1, -1, -1]
    one.comm.record.words.copy_(torch.tensor(words, dtype=torch.int32))
    error = broken(one, RuntimeError("unspecified launch failure")).value
    assert isinstance(error, MailboxTimeout)
    wanted = "mailbox rows, parity 1, stage topk_merge, rank 0: rank 1 has not written; first "
    assert str(error).startswith(wanted + "missing word (1, 2, 1); ")
    notes = ["the process of rank 1 is no more"] if gone else []
    assert getattr(error, "__notes__", []) == notes
    assert processes.failed == [error]


def test_a_device_that_is_lost_with_a_peer_but_without_a_record() -> None:
    error = broken(group(Alone((1,))), RuntimeError("an illegal memory access\nmore")).value
    assert isinstance(error, RankAborted)
    text = "rank 0 stopped: the process of rank 1 is no more (an illegal memory access)"
    assert str(error) == text


def test_any_other_error_stays_what_it_is() -> None:
    for error in (RuntimeError("out of memory"), KeyError("x"), MailboxError("y")):
        processes = Alone((1,) if isinstance(error, MailboxError) else ())
        assert broken(group(processes), error).value is error
        assert processes.failed == [error]


def test_a_transport_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "transport 'pigeon'; choose from auto, symmetric, ipc"
    with pytest.raises(LayerError, match=re.escape(text)):
        peer_memory.working_transport(Alone(), CPU, "pigeon")  # type: ignore[arg-type]


def test_where_no_transport_works_every_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(processes, count, device):
        raise RuntimeError("not on this machine")

    def deaf(processes, count, device):
        views = tuple(torch.zeros(count, dtype=torch.int32) for _ in range(2))
        return peer_memory.PeerMemory(views, None)

    monkeypatch.setattr(peer_memory, "TRANSPORTS", {"symmetric": refused, "ipc": deaf})
    with pytest.raises(LayerError) as caught:
        peer_memory.working_transport(Alone(), CPU, "auto")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "the ranks cannot store into each other's memory: symmetric, rank 0: RuntimeError: not on "
        "this machine; ipc, rank 0: words [0, -1] have come, not [0, 1]"
    )


def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LayerError, match="2 ranks .* need a GPU each, this machine has one GPU; "):
        DeviceProcesses(Alone())  # type: ignore[arg-type]
