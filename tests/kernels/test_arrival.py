"""Words that come while a launch waits: nothing comes ahead of it, everything behind it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kpipe.runtime import launch_check
from kpipe.runtime.launch_cases import boxes
from kpipe.runtime.launch_cases.arrival import PARTS, Arrival

SHAPE = (3, 2 * PARTS + 1, 16)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(boxes, "DEVICE", "cpu")


def mailbox() -> torch.Tensor:
    return boxes.armed(SHAPE, torch.uint8, 0xFFFFFFFF)


def words() -> torch.Tensor:
    return torch.arange(3 * (2 * PARTS + 1) * 4, dtype=torch.int32).view(*SHAPE[:-1], 4)


def test_every_word_comes_with_the_call_and_none_ahead_of_it():
    box, content = mailbox(), words()
    arrive = Arrival(box, content)
    assert torch.equal(box, mailbox())
    arrive()
    assert torch.equal(box.view(torch.int32), content)


def test_what_an_arrival_needs_is_made_ahead_of_the_launch(monkeypatch):
    log = []
    monkeypatch.setattr(launch_check.torch.cuda, "synchronize", lambda *_: log.append("idle"))

    class Case:
        def arrival(self, live):
            log.append(f"ready for {live['q_mail']}")
            return lambda: log.append("arrives")

    launch_check.run_eager(lambda box: log.append("launched"), {"q_mail": "box"}, (), Case())
    assert log == ["ready for box", "idle", "launched", "arrives", "idle"]


def test_cases_without_mailboxes_let_nothing_arrive():
    assert launch_check.arrival_of(SimpleNamespace(), {})() is None


def test_a_lost_device_says_which_poll_has_given_up():
    case = SimpleNamespace(boxes=boxes.Boxes())
    (address,) = case.boxes.fault().tolist()
    record = case.boxes._record.words
    assert record.data_ptr() == address and case.boxes.time_out() == ""
    record.copy_(torch.tensor([2, 0x1230, 1, 0, 7, -1, -1, -1]))
    with pytest.raises(RuntimeError) as caught, launch_check.time_out_told(case):
        raise RuntimeError("unspecified launch failure")
    assert caught.value.__notes__ == [
        "stage query_wait, rank 0: waited at 0x100001230 in vain, saw 0x00000007 0xFFFFFFFF "
        "0xFFFFFFFF 0xFFFFFFFF"
    ]


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError) as caught, launch_check.time_out_told(SimpleNamespace()):
        raise RuntimeError("out of memory")
    assert not hasattr(caught.value, "__notes__")
