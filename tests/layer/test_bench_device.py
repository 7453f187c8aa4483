"""`kpipe bench` of ranks that exchange words, with a stand-in for compiler and device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_device_launches import Device

from kpipe.runtime import bench
from kpipe.runtime.bench_ranks import RankBench

CONTEXT = 200


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr("kpipe.runtime.comm.device_ranks.multiprocessors", lambda device: 132)
    monkeypatch.setattr("torch.cuda.synchronize", lambda *device: None)
    return Device(monkeypatch)


@pytest.mark.parametrize(("mode", "rows", "q"), [("wait", 3, 1), ("fork", 64, 1), ("front", 8, 4)])
def test_a_rank_is_timed_whole_and_all_of_them_in_halves(
    layers, device, monkeypatch, mode, rows, q
):
    """Every launch gets operands of the shapes that it was compiled for: the stand-in looks."""
    layer_class = layers.dcp(2, mode=mode)
    ranks = RankBench(layer_class, "sm_90a", bench.LAYERS, "cpu")
    graphs: list[tuple[str, int, set[str], set[str]]] = []

    def graph_us(runs, replays=0, before=None, mode="global"):
        if before is not None:
            before()
        device.launched.clear()
        for run in runs:
            run()
        kernels = {one.kernel for one in device.launched}
        halves = {one.half for one in device.launched}
        graphs.append((mode, len(runs), kernels, halves))
        residents = {one.flags.get("resident", 132) for one in device.launched}
        assert residents == {132}  # the whole GPU, whoever runs
        return 8.0

    words = SimpleNamespace(replay=lambda: None)

    def medians(runs, before=None):
        return (graph_us(runs, before=before),)

    monkeypatch.setattr(bench, "graph_us", graph_us)
    monkeypatch.setattr(bench, "_medians", medians)
    monkeypatch.setattr(bench, "_captured", lambda runs, mode: words)
    found = bench.time_ranks(ranks, rows, q, CONTEXT)
    whole, *alone, together = graphs
    method = layer_class.TABLE["sm_90a", q][rows]
    ops = {op.name for op in bench.launches(layer_class, method)}
    assert whole[:2] == ("global", bench.LAYERS) and whole[3] == {"whole"}
    assert len(whole[2]) == len(ops)
    for mode_of_capture, count, kernels, halves in alone:
        assert (mode_of_capture, count) == ("global", bench.LAYERS * bench.REPEAT)
        assert len(kernels) == 1 and halves == {"whole"}
    assert together[:2] == ("relaxed", 1) and {"publish", "collect"} <= together[3]
    assert {one.what for one in found} == {"layer", "lockstep", *ops}
    assert {(one.rows, one.q, one.context, one.method) for one in found} == {
        (rows, q, CONTEXT, method)
    }
    assert found[0].us == 8.0 and found[-1].us == 8.0 / (bench.LAYERS * 2)


def test_a_poll_that_gives_up_is_named(layers, device, monkeypatch):
    ranks = RankBench(layers.dcp(2, mode="wait"), "sm_90a", 2, "cpu")
    monkeypatch.setattr(ranks, "words", raising(RuntimeError("device lost")))
    monkeypatch.setattr(ranks, "synchronize", raising(KeyError("query_wait")))
    with pytest.raises(KeyError, match="query_wait"):
        bench.time_ranks(ranks, 3, 1, CONTEXT)
    monkeypatch.setattr(ranks, "synchronize", lambda: None)
    with pytest.raises(RuntimeError, match="device lost"):
        bench.time_ranks(ranks, 3, 1, CONTEXT)


def raising(error: Exception):
    def call(*given):
        raise error

    return call


def test_only_what_the_step_launches_is_compiled(layers, device):
    layer_class = layers.dcp(2, mode="wait")
    ranks = RankBench(layer_class, "sm_90a", 2, "cpu")
    (first, _), _ = ranks.ready(3, 1, CONTEXT)
    (kept,) = first.layer.TABLE.items()
    assert kept == (("sm_90a", 1), {3: layer_class.TABLE["sm_90a", 1][3]})
    assert layer_class.TABLE["sm_90a", 1].keys() > {3, 64}
    assert {call.rows for call in first.layer.calls()} == {3}
