"""Timing a rank whose peers are on the same device: its share of contexts, its words, its boxes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kpipe.runtime import bench, bench_ranks
from kpipe.runtime.bench_floor import cache_bytes
from kpipe.runtime.bench_inputs import make_inputs
from kpipe.runtime.bench_ranks import RankBench, Witness, alone, bring
from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.comm.mailbox import MailboxSpec
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.sharding import Shard

GENERATED = Path(__file__).parents[2] / "generated"
RANKS = 3
ROWS = MailboxSpec("rows", (RANKS, 4, 8), torch.float32, 0xFFFFFFFF, source_axis=0)
GATHER = MailboxSpec("gather", (4, 24), torch.bfloat16, 0x80000000, source_axis=1, source_stride=8)


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


def exchange(comm) -> None:
    """What a rank does in a layer: sends its place to everybody, polls, re-arms; twice."""
    group = comm._group
    for spec in (ROWS, GATHER):
        for peer in range(RANKS):
            theirs = group.rank(peer).mailbox(spec, 0).local
            if spec is ROWS:
                theirs[comm.rank, :3] = 10.0 + comm.rank  # of four rows three
            else:
                theirs[:3, 8 * comm.rank : 8 * comm.rank + 8] = 1.0 + comm.rank
    comm.mailbox(ROWS, 1)  # another parity that nobody fills
    comm.before_poll()
    words = comm.mailbox(ROWS, 0).local.view(torch.int32)
    assert not (words[:, :3] == -1).any()
    words.fill_(-1)
    comm.before_poll()
    comm.mailbox(GATHER, 0).local.view(torch.int32).fill_(-(2**31))


def test_a_witness_keeps_what_had_come_ahead_of_the_polls() -> None:
    group = DeviceRanks(RANKS, "cpu")
    comm = group.rank(0)
    comm.mailbox(replace(ROWS, name="silent"), 0)
    with Witness(comm) as witness:
        group.run(exchange)
    assert set(witness.words) == {"rows", "gather"}
    rows = witness.words["rows"].view(torch.float32)
    assert (rows[:, :3] == torch.tensor([10.0, 11.0, 12.0])[:, None, None]).all()
    assert (witness.words["rows"][:, 3] == -1).all()
    gather = witness.words["gather"].view(torch.bfloat16)[:3].float()
    assert gather.unique().tolist() == [1.0, 2.0, 3.0]
    assert "before_poll" not in vars(comm)  # as it was


def test_words_come_into_both_parities_and_no_further_than_the_rows() -> None:
    group = DeviceRanks(RANKS, "cpu")
    comm = group.rank(0)
    boxes = [comm.mailbox(ROWS, parity) for parity in (0, 1)]
    other = comm.mailbox(GATHER, 0)
    words = {"rows": torch.full((RANKS, 4, 8), 7, dtype=torch.int32)}
    bring(words, comm.boxes.values(), 2)
    for box in boxes:
        words = box.local.view(torch.int32)
        assert (words[:, :2] == 7).all() and (words[:, 2:] == -1).all()
    assert (other.local.view(torch.int32) == -(2**31)).all()


def test_layers_of_a_graph_share_no_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    layer_class = SimpleNamespace(RANKS=RANKS, INTERLEAVE=1, NAME="x")
    made = []

    def prepared(layer_class, inputs, arch, number, scratch, comm):
        made.append((id(comm._group), number % 2, inputs, comm.rank))
        assert not comm.in_halves and comm.resident == comm._group.resident
        return SimpleNamespace(inputs=inputs)

    monkeypatch.setattr(bench_ranks, "prepared", prepared)
    ranks = RankBench(layer_class, "sm_90a", 4, "cpu")
    step = SimpleNamespace(rows=2)
    layer = SimpleNamespace(declared_rows=lambda step: step.rows)
    ready = [[SimpleNamespace(layer=layer, step=step, inputs=f"layer {n}") for n in range(4)]]
    mine = ranks.alone(ready, {}, 3)
    assert len(mine.layers) == len({(group, parity) for group, parity, *_ in made}) == 12
    assert [inputs for *_, inputs, _ in made] == [f"layer {n}" for n in range(4)] * 3
    assert {rank for *_, rank in made} == {0}
    ranks.alone(ready, {}, 3)
    assert len({group for group, *_ in made}) == 6  # the second time the same groups


def test_a_rank_alone_keeps_the_others_in_halves() -> None:
    group = DeviceRanks(2, "cpu")
    assert not alone(group).in_halves and group.rank(1).in_halves


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
