"""Timing a rank whose peers are on the same device: its share of contexts, when its words come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kpipe.runtime import bench
from kpipe.runtime.bench_floor import cache_bytes
from kpipe.runtime.bench_inputs import make_inputs
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.sharding import Shard

GENERATED = Path(__file__).parents[2] / "generated"


@pytest.fixture(scope="module")
def without_weights() -> type:
    """The layer of two ranks with weights left out: they are large and of no interest here."""
    layer = load_layer(str(GENERATED / "dsa_dcp_d2"))
    return type("Light", (layer,), {"MEMORY": replace(layer.MEMORY, weights={})})


@pytest.mark.parametrize(("context", "q"), [(300, 1), (301, 4), (3, 2)])
def test_every_new_row_is_stored_by_one_rank_at_its_place(
    without_weights: type, context: int, q: int
) -> None:
    rows, kept = 3 * q, []
    for rank in range(2):
        shard = Shard(rank, 2, 1)
        generator = torch.Generator().manual_seed(rank)
        step = make_inputs(without_weights, rows, q, context, generator, shard).step
        assert step.lengths.tolist() == [context] * 3
        for slots, table in ((step.slots, step.block_table), (step.index_slots, step.index_table)):
            assert table.shape == (3, -(-len(range(rank, context, 2)) // 64))
            assert sorted(table.flatten().tolist()) == list(range(table.numel()))
            for row, slot in enumerate(slots.tolist()):
                token = context - q + row % q
                if slot < 0:
                    continue
                page = int(table[row // q, token // 2 // 64])
                assert (token % 2, slot) == (rank, page * 64 + token // 2 % 64)
        kept.append(step.slots >= 0)
    assert (kept[0] ^ kept[1]).all()


def test_a_rank_alone_holds_everything(without_weights: type) -> None:
    step = make_inputs(without_weights, 2, 1, 100, torch.Generator().manual_seed(0)).step
    assert (step.slots >= 0).all() and step.block_table.shape == (2, 2)


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self) -> None:
        self.log.append("event")

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.006


def test_words_come_ahead_of_every_replay_and_outside_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    graph = SimpleNamespace(replay=lambda: log.append("replay"))
    monkeypatch.setattr(bench, "_captured", lambda runs, mode: graph)
    monkeypatch.setattr(bench.torch.cuda, "Event", lambda enable_timing: FakeEvent(log))
    monkeypatch.setattr(bench.torch.cuda, "synchronize", lambda: None)
    runs = [lambda n=n: log.append(f"run {n}") for n in range(3)]
    us = bench.graph_us(runs, replays=2, before=lambda: log.append("words"))
    once = ["words", "event", "replay", "event"]
    warm = ["words", "run 0", "run 1", "run 2", "words", "replay"]
    assert log == [*warm, *once, *once]
    assert us == pytest.approx(2.0)


def test_a_graph_of_the_words_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU what comes ahead is a graph of its own, as the host would be too slow."""
    log: list[str] = []
    graph = SimpleNamespace(replay=lambda: log.append("replay"))
    monkeypatch.setattr(bench, "captured", lambda runs: runs[0]() or graph)
    before = bench.graphed(lambda: log.append("words"))
    before()
    before()
    assert log == ["words", "replay", "replay"]


def test_the_floor_of_a_rank_is_its_share_of_the_context() -> None:
    layer = load_layer(str(GENERATED / "dsa_dcp"))
    assert cache_bytes(layer, "index_scores", 4, 1, 32768) == 4 * 4096 * 132
    assert cache_bytes(layer, "sparse_decode", 4, 1, 32768) == 4 * 256 * 576


def test_the_document_says_what_is_not_in_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = GENERATED / "dsa_dcp"
    monkeypatch.setattr(bench.torch.cuda, "get_device_name", lambda: "GPU X")
    found = bench.document([], "sm_90a", folder, load_layer(str(folder)))
    assert found["ranks"] == 8 and "no NVLink in these times" in found["note"]
    assert "note" not in bench.document([], "sm_90a", GENERATED / "dsa_tp")
