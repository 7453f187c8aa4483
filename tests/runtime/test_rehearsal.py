"""Ranks that run at once: each has launched everything alone before one waits for another."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kpipe.runtime import prepared
from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.comm.mailbox import MailboxSpec

RANKS = 3
SPEC = MailboxSpec("rows", (RANKS, 2, 8), torch.float32, 0xFFFFFFFF, source_axis=0)


def test_each_rank_launches_alone_on_full_mailboxes_and_leaves_them_armed(monkeypatch):
    group = DeviceRanks(RANKS, "cpu", lockstep=False)
    boxes = [group.rank(rank).mailbox(SPEC, 0).local.view(torch.int32) for rank in range(RANKS)]
    launched, idle = [], []
    monkeypatch.setattr(group, "synchronize", lambda: idle.append(len(launched)))

    def launch_all(ready, before_each):
        for one in ready:
            before_each()
            assert not any((box == -1).any() for box in boxes)
            boxes[one.rank].fill_(-1)  # read, and armed again
            launched.append(one)

    monkeypatch.setattr(prepared, "launch_all", launch_all)
    ready = [
        [SimpleNamespace(rank=rank, layer=layer) for layer in range(2)] for rank in range(RANKS)
    ]
    prepared.rehearse(ready, group)
    assert [(one.rank, one.layer) for one in launched] == [
        (rank, layer) for rank in range(RANKS) for layer in range(2)
    ]
    assert idle == [2, 4, 6]
    assert all((box == -1).all() for box in boxes)


def test_blank_steps_come_back_as_they_were(monkeypatch):
    monkeypatch.setattr(prepared.torch.cuda, "synchronize", lambda: None)
    step = prepared.Step(
        hidden=torch.ones(2, 4),
        out=torch.ones(2, 4),
        lengths=torch.tensor([5, 6]),
        slots=torch.tensor([7, 8]),
        block_table=torch.ones(2, 1),
        index_slots=torch.tensor([9, 10]),
        index_table=torch.ones(2, 1),
        q=1,
    )
    restore = prepared.blank([[SimpleNamespace(step=step)]])
    assert not step.hidden.any() and not step.lengths.any()
    assert (step.slots == -1).all() and (step.index_slots == -1).all()
    restore()
    assert step.hidden.all() and step.lengths.tolist() == [5, 6]
    assert step.slots.tolist() == [7, 8] and step.index_slots.tolist() == [9, 10]
