"""The parts of bench/ranks.py that need GPUs, with stand-ins for compiler, device and peers."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from layer.test_device_launches import Device
from layer_factory import LayerFactory

from kpipe.runtime.comm import device_processes
from kpipe.runtime.comm.device_processes import DeviceProcesses
from kpipe.runtime.comm.peer_memory import PeerMemory

ROOT = Path(__file__).parents[2]


class Graph:
    """A graph whose replays do nothing."""

    def replay(self) -> None:
        return


class Event:
    """Events that lie a millisecond apart."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing = enable_timing

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        return

    def elapsed_time(self, other: Event) -> float:
        assert self.timing and other.timing
        return 1.0


def memory(processes, count: int, device: torch.device) -> PeerMemory:
    views = tuple(torch.zeros(count, dtype=torch.int32) for _ in range(processes.ranks))
    return PeerMemory(views, None)


@pytest.fixture(scope="module")
def layer_class(tmp_path_factory):
    return LayerFactory(tmp_path_factory.mktemp("parts")).dcp(2)


@pytest.fixture
def rank(layer_class, monkeypatch, tmp_path):
    """Rank 0 of two that say the same."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    Device(monkeypatch)
    monkeypatch.setattr(device_processes, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(device_processes, "working_transport", lambda *_: ("host", ""))
    monkeypatch.setattr(device_processes, "TRANSPORTS", {"host": memory})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    processes = SimpleNamespace(
        rank=0,
        ranks=2,
        exchange=lambda topic, value=None: [value, value],
        barrier=lambda topic: None,
    )
    group = DeviceProcesses(processes, device=torch.device("cpu"))
    module = importlib.import_module("rank_parts.rank")
    yield module.Rank(processes, group, layer_class, "sm_90a", tmp_path, False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rank_parts"]:
        del sys.modules[name]


def part(monkeypatch, name: str, **constants):
    module = importlib.import_module(f"rank_parts.{name}")
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    return module


def test_times_are_those_of_a_layer_by_the_table(rank, monkeypatch):
    found = part(monkeypatch, "times", CONTEXT=256).run(rank)
    table = rank.layer_class.TABLE[("sm_90a", 1)]
    assert [(one["rows"], one["method"], one["us"]) for one in found["layers"]] == [
        (rows, table[rows], 250.0) for rows in (1, 4, 16, 64)
    ]
    kept = json.loads((rank.out / "times.json").read_text())
    assert kept["complete"] is False and len(kept["layers"]) == 4


def test_one_shot_is_kept_where_two_are_not_faster(rank, monkeypatch):
    module = part(monkeypatch, "crossover")
    monkeypatch.setattr(rank.group, "fill", lambda: None)
    times = iter([1.0, 2.0] * 3 + [2.0, 1.0] * 13)
    monkeypatch.setattr(type(rank), "slowest_us", lambda *_: {"us": 4 * next(times)})
    monkeypatch.setattr(module, "_error", lambda found, wanted: 0.0)
    found = module.run(rank)
    assert found["ok"] and found["two_shot_from"] == 4
    assert found["text"][-1] == "two shots are faster from 4 rows on"
    assert next(times, None) is None, "both forms at every number of rows"
    monkeypatch.setattr(module, "_error", lambda found, wanted: float("nan"))
    times = iter([1.0, 2.0] * 16)
    assert not module.run(rank)["ok"]


def test_every_pair_is_measured(rank, monkeypatch):
    module = part(monkeypatch, "link", BYTES=1 << 16, TRANSPORTS={"host": memory})
    monkeypatch.setattr(module, "compile_kernel", lambda *_: lambda own, peer, fault: None)
    found = module.run(rank)
    assert [(one["from"], one["to"]) for one in found["pairs"]] == [(0, 1), (1, 0)]
    assert found["pairs"][0]["stores"] == pytest.approx((1 << 16) / 1e-3 * 1e-9)
    assert [one["round_trip_us"] for one in found["ping_pong"]] == [1.0]


def test_collectives_are_timed_alone_and_together(rank, monkeypatch):
    module = part(monkeypatch, "collectives")
    called = []
    monkeypatch.setattr(module.dist, "new_group", lambda backend: backend)
    for name in ("all_gather_into_tensor", "all_to_all_single", "all_reduce"):
        monkeypatch.setattr(module.dist, name, lambda *_, group, name=name: called.append(group))
    found = module.run(rank)
    assert set(called) == {"nccl"} and len(found["layers"]) == 4
    for one in found["layers"]:
        assert len(one) == 7 and one["layer"] == {
            "us": 250.0,
            "us_by_rank": [250.0, 250.0],
            "captured": True,
        }


def test_a_collective_that_cannot_be_captured_is_timed_as_it_is(rank, monkeypatch):
    module = part(monkeypatch, "collectives", REPLAYS=2)

    def refused(graph, capture_error_mode):
        raise RuntimeError("not while capturing\nat all")

    monkeypatch.setattr(torch.cuda, "graph", refused)
    called = []
    found = module._us(rank, [lambda: called.append(1)])
    assert (found["captured"], found["why"]) == (False, "not while capturing")
    assert found["us"] == 1000.0 / 2 / 4 and len(called) == 1 + 2 * 4


def test_replays_that_leave_other_bits_are_counted(rank, monkeypatch):
    module = part(monkeypatch, "replays", CONTEXT=256, REPLAYS=6)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    found = module.run(rank)
    assert found["ok"] and found["text"] == [
        "12 replays with a late rank, 0 left other bits on some rank"
    ]
    replays = []

    def replay(self) -> None:
        replays.append(self)
        if len(replays) == 4:
            outs[0][0, 0] += 1  # from here on other bits than were kept

    outs: list[torch.Tensor] = []
    monkeypatch.setattr(Graph, "replay", replay)
    bits = module._bits
    monkeypatch.setattr(
        module, "_bits", lambda layers: (outs.append(bits(layers)[0]), bits(layers))[1]
    )
    found = module.run(rank)
    assert not found["ok"]
    kinds = found["by_rank"][0]
    assert [kinds[kind]["differing"] for kind in ("late_hosts", "late_devices")] == [4, 6]
