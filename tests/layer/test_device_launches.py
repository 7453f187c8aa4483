"""What a layer hands to its kernels on a device, without one: operands, order, halves.

The compiler is replaced by a stand-in whose kernels check every operand against its declaration.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from idle_device import Device
from layer_inputs import engine_inputs

from kpipe.runtime.comm import device_processes
from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.comm.mailbox import MailboxError
from kpipe.runtime.comm.peer_memory import PeerMemory
from kpipe.runtime.comm.virtual_ranks import VirtualRanks
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.prepared import launch_all, rehearse

CPU = torch.device("cpu")


@pytest.fixture
def device(monkeypatch) -> Device:
    return Device(monkeypatch)


def run_layers(
    device: Device, layer_class: type[Layer], rows: int, *, lockstep: bool = True, steps: int = 1
) -> None:
    """Runs `steps` steps of one layer on every rank."""
    group = DeviceRanks(layer_class.RANKS, "cpu", lockstep=lockstep)
    lengths = tuple(20 + 3 * row for row in range(rows))

    def body(comm: Any) -> None:
        inputs = engine_inputs(layer_class, lengths, rank=comm.rank)
        layer = inputs.prepared(layer_class, backend="cuda", comm=comm)
        device.know(comm)
        for _ in range(steps):
            layer.run(inputs.step)

    group.run(body)


PAIRS = {"query_wait": "q_mail", "topk_merge": "candidates", "o_reduce": "o_mail"}


@pytest.mark.parametrize("mode", ["serial", "fork", "front", "wait"])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_every_launch_gets_what_it_was_compiled_for(layers, device, mode, rows):
    run_layers(device, layers.dcp(2, mode=mode), rows)
    assert {one.rank for one in device.launched if one.polls or one.publishes} == {0, 1}


def test_a_query_of_two_bytes_and_another_interleave(layers, device):
    run_layers(device, layers.dcp(2, 4, ds_mla=True), 8)
    assert all(one.flags.get("interleave", 4) == 4 for one in device.launched)


@pytest.mark.parametrize("mode", ["serial", "fork", "front", "wait"])
@pytest.mark.parametrize("rows", [3, 64])
def test_in_lockstep_everything_is_sent_before_anybody_waits(layers, device, mode, rows):
    """Round by round: between two of a rank's polls lies the same stretch of launches for every
    rank, and the ranks go one after the other."""
    ranks = 2
    run_layers(device, layers.dcp(ranks, mode=mode), rows, steps=2)
    exchanges = [one for one in device.launched if one.polls or one.publishes]
    by_rank = [[(o.kernel, o.half) for o in exchanges if o.rank == rank] for rank in range(ranks)]
    assert by_rank[0] == by_rank[1]
    assert not any(one.polls and one.publishes and one.half == "whole" for one in exchanges)
    rounds = {rank: 0 for rank in range(ranks)}
    for one in exchanges:
        if one.polls:
            rounds[one.rank] += 1
        # Whoever is in a round behind its n-th poll knows all others at their n-th poll.
        assert rounds[one.rank] <= min(rounds.values()) + 1
        ahead = [rank for rank in range(ranks) if rounds[rank] < rounds[one.rank]]
        assert all(other > one.rank for other in ahead), "ranks take turns in their order"


def test_at_once_every_kernel_is_whole(layers, device, monkeypatch):
    monkeypatch.setattr("kpipe.runtime.comm.device_ranks.multiprocessors", lambda device: 132)
    run_layers(device, layers.dcp(2, mode="wait"), 3, lockstep=False)
    assert {one.half for one in device.launched} == {"whole"}
    assert {one.flags["resident"] for one in device.launched if "resident" in one.flags} == {48}


def test_beside_polls_of_other_ranks_clusters_are_narrower(layers, device, monkeypatch):
    """48 polling CTAs of the other rank take 6 of the 16 multiprocessors of a GPC: 10 are left."""
    monkeypatch.setattr("kpipe.runtime.comm.device_ranks.multiprocessors", lambda device: 132)
    layer_class = layers.dcp(2, mode="wait")
    run_layers(device, layer_class, 1)
    run_layers(device, layer_class, 1, lockstep=False)
    splits = [one.flags["splits"] for one in device.launched if "splits" in one.flags]
    assert splits[:2] == [16, 16] and len(splits) == 4
    assert all(1 < one <= 10 for one in splits[2:]), "the widest of the table that fits"


def test_a_cluster_without_room_beside_polls_of_other_ranks_is_refused(layers, device, monkeypatch):
    monkeypatch.setattr("kpipe.runtime.comm.device_ranks.multiprocessors", lambda device: 132)
    monkeypatch.setattr("kpipe.runtime.comm.device_ranks.SMS_PER_GPC", 7)
    wanted = (
        r"mla_query at 1 rows: a cluster of 8 CTAs, and beside what the other ranks have "
        r"waiting on this device there is room for 1; drive the ranks in lockstep, or take other"
    )
    with pytest.raises(LayerError, match=wanted):
        run_layers(device, layers.dcp(2, mode="wait"), 3, lockstep=False)


def test_more_ctas_than_run_at_once_are_refused(layers, device, monkeypatch):
    monkeypatch.setattr("kpipe.runtime.comm.device_ranks.multiprocessors", lambda device: 2)
    wanted = (
        r"dcp_value publishes and polls: 8 CTAs have to run at the same time, rank [01] can count "
        r"on 1 multiprocessors; drive the ranks in lockstep, or give them more of a device"
    )
    with pytest.raises(LayerError, match=wanted):
        run_layers(device, layers.dcp(2, mode="wait"), 3, lockstep=False)


def test_mailboxes_must_lie_where_the_backend_runs(layers, device):
    layer_class = layers.dcp(2)
    inputs = engine_inputs(layer_class, (5,))
    with pytest.raises(LayerError, match=r"mailboxes in memory of the device: .*DeviceRanks\(2\)"):
        inputs.prepared(layer_class, backend="cuda", comm=VirtualRanks(2).rank(0))
    with pytest.raises(LayerError, match=r"mailboxes in memory of the host: .*VirtualRanks\(2\)"):
        inputs.prepared(layer_class, comm=DeviceRanks(2, "cpu").rank(0))
    with pytest.raises(LayerError, match=r"for example DeviceRanks\(2\).rank\(0\)"):
        inputs.prepared(layer_class, backend="cuda")
    with pytest.raises((LayerError, MailboxError), match="2 ranks, the group has 4"):
        inputs.prepared(layer_class, backend="cuda", comm=DeviceRanks(4, "cpu").rank(0))


def test_a_rehearsal_launches_everything_of_one_rank_after_the_other(layers, device, monkeypatch):
    monkeypatch.setattr("kpipe.runtime.comm.device_ranks.multiprocessors", lambda device: 132)
    layer_class = layers.dcp(2, mode="wait")
    group = DeviceRanks(2, "cpu", lockstep=False)
    monkeypatch.setattr(group, "synchronize", lambda: None)
    ready = []
    for rank in range(2):
        inputs = engine_inputs(layer_class, (20, 23, 26), rank=rank)
        layer = inputs.prepared(layer_class, backend="cuda", comm=group.rank(rank))
        device.know(group.rank(rank))
        ready.append([SimpleNamespace(layer=layer, step=inputs.step)])
    rehearse(ready, group)
    exchanges = [one for one in device.launched if one.polls or one.publishes]
    by_rank = [[one.kernel for one in exchanges if one.rank == rank] for rank in range(2)]
    assert by_rank[0] == by_rank[1] and [one.rank for one in exchanges] == sorted(
        one.rank for one in exchanges
    )
    rehearsed = len(device.launched)
    group.run(lambda comm: launch_all(ready[comm.rank]))
    assert len(device.launched) == 2 * rehearsed


def test_a_process_launches_what_a_stream_of_its_own_launches(layers, device, monkeypatch):
    """Rank 1 with a device for itself, in memory that stands in for two devices'."""
    on_one = "kpipe.runtime.comm.device_ranks."
    monkeypatch.setattr(on_one + "multiprocessors", lambda device: 264)
    monkeypatch.setattr(on_one + "POLLING_SMS", 264)
    monkeypatch.setattr(on_one + "SMS_PER_GPC", 64)
    monkeypatch.setattr(device_processes, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(device_processes, "working_transport", lambda *_: ("host", ""))

    def made(processes, count, place):
        views = tuple(torch.zeros(count, dtype=torch.int32) for _ in range(processes.ranks))
        return PeerMemory(views, None)

    monkeypatch.setattr(device_processes, "TRANSPORTS", {"host": made})
    processes = SimpleNamespace(
        rank=1,
        ranks=2,
        exchange=lambda topic, value=None: [value, value],
        barrier=lambda topic: None,
    )
    streams = DeviceRanks(2, "cpu", lockstep=False)
    layer_class = layers.dcp(2)
    for rows in (3, 64):  # the output's sum in one shot, and in two
        launched = []
        for group in (streams, device_processes.DeviceProcesses(processes, device=CPU)):
            inputs = engine_inputs(layer_class, tuple(range(20, 20 + rows)), rank=1)
            layer = inputs.prepared(layer_class, backend="cuda", comm=group.rank(1))
            device.know(group.rank(1))
            device.launched.clear()
            group.run(lambda comm, one=layer, step=inputs.step: comm.rank and one.run(step))
            launched.append(list(device.launched))
        assert launched[0] == launched[1]
        exchanges = [one for one in launched[1] if one.polls or one.publishes]
        assert {one.rank for one in exchanges} == {1} and len(exchanges) >= 5
        assert {one.half for one in launched[1]} == {"whole"}
