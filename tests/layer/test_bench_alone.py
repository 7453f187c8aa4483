"""`kpipe bench` of rank 0 alone, on the reference backend: what its layers and launches find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kpipe.runtime import bench
from kpipe.runtime.bench_ranks import AloneBench
from kpipe.runtime.comm.mailbox import MailboxTimeout

RANKS, TOP_K, CONTEXT, LAYERS, REPEAT = 2, 16, 200, 4, 2


class Clock:
    """In place of graphs: runs once what would be captured, and once more as a replay.

    `attended` holds of every layer of every chain the keys a row that rank 0 then attends to.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attended: list[list[list[int]]] = []
        monkeypatch.setattr(bench, "graphed", lambda run: run)
        monkeypatch.setattr(bench, "_medians", self.medians)

    def medians(self, runs: Sequence[Any], before: Callable[[], object]) -> tuple[float, ...]:
        for _ in range(2):
            before()
            found = []
            for run in runs:
                one = run.__self__
                run()
                found.append(one.layer.buffers["valid"][: one.step.rows].tolist())
        self.attended.append(found)
        return (8.0, 9.0, 10.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(("mode", "rows", "q"), [("wait", 3, 1), ("fork", 64, 4)])
def test_rank_0_attends_to_its_share_in_every_layer_and_launch(
    layers, clock: Clock, mode: str, rows: int, q: int
) -> None:
    """Not to as many keys as are selected on all ranks, which it does where its peers' candidates
    come from other inputs than its own.  Every launch alone finds what it polls."""
    layer_class = layers.dcp(RANKS, mode=mode)
    alone = AloneBench(layer_class, "sm_90a", LAYERS, REPEAT, "cpu", "reference")
    found = bench.time_alone(alone, rows, q, CONTEXT)
    method = layer_class.TABLE["sm_90a", q][rows]
    ops = [op.name for op in bench.launches(layer_class, method)]
    assert [one.what for one in found] == ["layer", *dict.fromkeys(ops)]
    assert {(one.us, one.method, one.rows, one.q) for one in found} == {(9.0, method, rows, q)}
    chained = LAYERS * REPEAT
    assert [len(chain) for chain in clock.attended] == [LAYERS, *[chained] * (len(found) - 1)]
    for one, chain in zip(found, clock.attended, strict=True):
        for attended in chain:  # equal scores are more often zero than anything else
            assert all(abs(keys - TOP_K // RANKS) <= 1 for keys in attended), one.what


def test_layers_repeat_with_mailboxes_of_their_own(layers) -> None:
    alone = AloneBench(layers.dcp(RANKS), "sm_90a", 3, 2, "cpu", "reference")
    timed = alone.ready(3, 1, CONTEXT)
    assert [one.inputs for one in timed[:3]] == [one.inputs for one in timed[3:]]
    assert len({id(one.inputs) for one in timed}) == 3
    boxes = [box.local.data_ptr() for one in timed for box in one.layer._mailboxes.values()]
    assert len(set(boxes)) == len(boxes) == 6 * len(timed)
    assert {one.layer.shard.rank for one in timed} == {0}
    again = alone.ready(8, 1, CONTEXT)
    kept = [box.local.data_ptr() for one in again for box in one.layer._mailboxes.values()]
    assert kept == boxes  # other rows, the same mailboxes


def test_words_of_rank_0_itself_come_where_launches_are_left_out_alone(layers) -> None:
    alone = AloneBench(layers.dcp(RANKS, mode="wait"), "sm_90a", 2, 1, "cpu", "reference")
    timed = alone.ready(3, 1, CONTEXT)
    for own in (False, True):
        alone.peers.words(timed, own)()
        for one in timed:
            for box in one.layer._mailboxes.values():
                words = box.local.view(torch.int32).narrow(box.spec.rows_axis, 0, 3)
                armed = words == box.spec.signed_sentinel
                of_rank_0, of_rank_1 = armed.chunk(RANKS, dim=box.spec.source_axis)
                assert not of_rank_1.any()
                assert not of_rank_0.any() if own else of_rank_0.all(), box.name


def test_words_come_to_the_first_layers_where_these_are_given(layers) -> None:
    alone = AloneBench(layers.dcp(RANKS, mode="wait"), "sm_90a", 1, 2, "cpu", "reference")
    first, second = alone.ready(3, 1, CONTEXT)
    alone.peers.words([first])()
    first.run()
    with pytest.raises(MailboxTimeout, match="rank 0: rank 1 has not written"):
        second.run()
