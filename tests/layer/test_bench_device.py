"""`kpipe bench` of ranks that exchange words, with a stand-in for compiler and device."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest
from test_device_launches import Device

from kpipe.runtime import bench
from kpipe.runtime.bench_ranks import AloneBench, RankBench
from kpipe.runtime.comm.mailbox import MailboxTimeout

CONTEXT = 200


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr("kpipe.runtime.comm.device_ranks.multiprocessors", lambda device: 132)
    monkeypatch.setattr("torch.cuda.synchronize", lambda *device: None)
    return Device(monkeypatch)


@dataclass
class Graph:
    """What was launched in one capture."""

    mode: str
    runs: int
    kernels: set[str]
    halves: set[str]
    ranks: set[int]


@pytest.fixture
def graphs(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The captures in their order; what comes ahead of them has come."""
    found: list[Graph] = []

    def medians(runs, before=None, mode="global"):
        if before is not None:
            before()
        device.launched.clear()
        for run in runs:
            run()
        launched = device.launched
        assert {one.flags.get("resident", 132) for one in launched} == {132}  # the whole GPU
        halves = {one.half for one in launched}
        ranks = {one.flags["rank"] for one in launched if "rank" in one.flags}
        found.append(Graph(mode, len(runs), {one.kernel for one in launched}, halves, ranks))
        return (7.0, 8.0, 9.0)

    monkeypatch.setattr(bench, "_medians", medians)
    monkeypatch.setattr(bench, "graphed", lambda run: run)
    return found


@pytest.mark.parametrize(("mode", "rows", "q"), [("wait", 3, 1), ("fork", 64, 1), ("front", 8, 4)])
def test_a_rank_is_timed_whole_and_all_of_them_in_halves(layers, graphs, mode, rows, q):
    """Every launch gets operands of the shapes that it was compiled for: the stand-in looks."""
    layer_class = layers.dcp(2, mode=mode)
    options = argparse.Namespace(q=q, context=CONTEXT, layers_only=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "AloneBench", lambda *given: AloneBench(*given, device="cpu"))
        patch.setattr(bench, "RankBench", lambda *given: RankBench(*given, device="cpu"))
        mine, together = bench._measure(layer_class, "sm_90a", [rows], options)
    whole, *launches, lockstep = graphs
    method = layer_class.TABLE["sm_90a", q][rows]
    ops = {op.name for op in bench.launches(layer_class, method)}
    assert (whole.mode, whole.runs, whole.halves) == ("global", bench.LAYERS, {"whole"})
    assert len(whole.kernels) == len(ops) and whole.ranks == {0}
    for one in launches:
        assert (one.mode, one.runs) == ("global", bench.LAYERS * bench.REPEAT)
        assert len(one.kernels) == 1 and one.halves == {"whole"} and one.ranks <= {0}
    assert (lockstep.mode, lockstep.runs) == ("relaxed", 1) and lockstep.ranks == {0, 1}
    assert {"publish", "collect"} <= lockstep.halves
    assert {one.what for one in mine} == {"layer", *ops} and len(together) == 1
    assert {(one.rows, one.q, one.context, one.method) for one in (*mine, *together)} == {
        (rows, q, CONTEXT, method)
    }
    assert mine[0].us == 8.0 and mine[0].floor_us == together[0].floor_us > 0
    ranks = bench.LAYERS * 2
    assert together[0].what == "lockstep" and together[0].us == 8.0 / ranks
    assert together[0].medians == (7.0 / ranks, 8.0 / ranks, 9.0 / ranks)


def test_a_rank_comes_ahead_of_all_of_them_at_every_number_of_rows(layers, graphs, monkeypatch):
    """What needs no kernels but rank 0's is written down before the others' are compiled."""
    monkeypatch.setattr(bench, "AloneBench", lambda *given: AloneBench(*given, device="cpu"))
    monkeypatch.setattr(bench, "RankBench", lambda *given: RankBench(*given, device="cpu"))
    options = argparse.Namespace(q=1, context=CONTEXT, layers_only=True)
    found = bench._measure(layers.dcp(2, mode="wait"), "sm_90a", [3, 8], options)
    assert [[(one.what, one.rows) for one in timings] for timings in found] == [
        [("layer", 3)],
        [("layer", 8)],
        [("lockstep", 3)],
        [("lockstep", 8)],
    ]


def test_a_poll_that_gives_up_is_named(layers, device, graphs, monkeypatch):
    layer_class = layers.dcp(2, mode="wait")
    alone = AloneBench(layer_class, "sm_90a", 2, device="cpu")
    together = RankBench(layer_class, "sm_90a", 2, "cpu")
    told = dict(mailbox="o_mail", stage="o_reduce", rank=0, peers=(1,), word=(1, 0, 0))
    timeout = MailboxTimeout("o_mail: rank 1 has not written", **told)

    def lost(*given, **named):
        raise RuntimeError("device lost")

    monkeypatch.setattr(bench, "_medians", lost)
    for what, group, time in (
        (alone, alone.peers, bench.time_alone),
        (together, together, bench.time_lockstep),
    ):
        with pytest.raises(RuntimeError, match="device lost"):
            time(what, 3, 1, CONTEXT)
        monkeypatch.setattr(group, "timeouts", lambda: [timeout])
        with pytest.raises(MailboxTimeout, match="rank 1 has not written"):
            time(what, 3, 1, CONTEXT)


def test_only_what_the_step_launches_is_compiled(layers, device):
    layer_class = layers.dcp(2, mode="wait")
    first = AloneBench(layer_class, "sm_90a", 2, device="cpu").ready(3, 1, CONTEXT)[0]
    (second, _), _ = RankBench(layer_class, "sm_90a", 2, "cpu").ready(3, 1, CONTEXT)
    assert layer_class.TABLE["sm_90a", 1].keys() > {3, 64}
    for one in (first, second):
        (kept,) = one.layer.TABLE.items()
        assert kept == (("sm_90a", 1), {3: layer_class.TABLE["sm_90a", 1][3]})
        assert {call.rows for call in one.layer.calls()} == {3}
