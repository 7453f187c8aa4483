"""The publish, poll, re-arm protocol over several layers, in forced and in seeded interleavings.

Every word carries its layer, source and destination, so a lost, stale or misdirected word shows.
"""

from __future__ import annotations

import random
import threading

import pytest
import torch

from kpipe.runtime.comm.mailbox import Mailbox, MailboxError, MailboxSpec
from kpipe.runtime.comm.virtual_ranks import RankComm, VirtualRanks

ALL = slice(None)
CAP, ROWS, WIDTH = 5, 3, 4
USED = (ALL, slice(0, ROWS))


def spec(ranks: int, name: str = "m", parities: int = 2) -> MailboxSpec:
    shape = (ranks, CAP, WIDTH)
    return MailboxSpec(name, shape, torch.float32, 0xFFFFFFFF, parities, source_axis=0)


def message(layer: int, source: int, peer: int) -> torch.Tensor:
    """Distinct values for every word of every message."""
    first = ((layer * 16 + source) * 16 + peer) * ROWS * WIDTH
    return (first + torch.arange(ROWS * WIDTH, dtype=torch.float32)).reshape(ROWS, WIDTH)


def publish(box: Mailbox, layer: int, peers: list[int]) -> None:
    for peer in peers:
        box.store(peer, (box.rank, slice(0, ROWS)), message(layer, box.rank, peer))


def consume(box: Mailbox, layer: int) -> None:
    got = box.poll(USED).clone()
    box.rearm(USED)
    want = torch.stack([message(layer, source, box.rank) for source in range(box.ranks)])
    assert torch.equal(got, want)


def all_armed(group: VirtualRanks, declared: MailboxSpec) -> bool:
    words = group.words(declared)
    return all((rank == -1).all() for parity in words for rank in parity)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_free_running_ranks_lose_nothing(ranks: int) -> None:
    group = VirtualRanks(ranks)

    def layers(comm: RankComm) -> None:
        for layer in range(12):
            box = comm.mailbox(spec(ranks), layer % 2)
            publish(box, layer, list(range(ranks)))
            consume(box, layer)

    group.run(layers)
    assert all_armed(group, spec(ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_seeded_orders_lose_nothing(ranks: int, seed: int) -> None:
    """In each layer the ranks publish one after the other, in a drawn order.

    A rank goes on only when all ranks ahead of it have published and are blocked in a poll, so
    the drawn order is the order of the writes, and the last rank of a layer makes all the others
    wait for it.
    """
    draw = random.Random(seed)
    orders = [draw.sample(range(ranks), ranks) for _ in range(6)]
    sequences = [[draw.sample(range(ranks), ranks) for _ in range(ranks)] for _ in range(6)]
    published = [[threading.Event() for _ in range(ranks)] for _ in range(6)]
    written: list[tuple[int, int]] = []
    group = VirtualRanks(ranks)

    def layers(comm: RankComm) -> None:
        for layer, order in enumerate(orders):
            box = comm.mailbox(spec(ranks), layer % 2)
            ahead = order[: order.index(comm.rank)]
            assert all(published[layer][rank].wait(5) for rank in ahead)
            comm.wait_until_blocked(ahead)
            written.append((layer, comm.rank))
            publish(box, layer, sequences[layer][comm.rank])
            published[layer][comm.rank].set()
            consume(box, layer)

    group.run(layers)
    assert written == [(layer, rank) for layer, order in enumerate(orders) for rank in order]
    assert all_armed(group, spec(ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("held", ["before publish", "before consume"])
def test_a_rank_held_back_in_every_second_layer(ranks: int, held: str) -> None:
    group = VirtualRanks(ranks)

    def layers(comm: RankComm) -> None:
        for layer in range(2 * ranks + 1):
            box = comm.mailbox(spec(ranks), layer % 2)
            others = [rank for rank in range(ranks) if rank != comm.rank]
            slow = layer == 2 * comm.rank
            if slow and held == "before publish":
                comm.wait_until_blocked(others)
            publish(box, layer, list(range(ranks)))
            if slow and held == "before consume":
                # The others finish this layer and stand in the next one.
                comm.wait_until_blocked(others)
            consume(box, layer)

    group.run(layers)
    assert all_armed(group, spec(ranks))


def test_one_parity_is_not_enough() -> None:
    """A fast rank publishes the next layer while a slow one has not read this one."""
    group = VirtualRanks(2)

    def layers(comm: RankComm) -> None:
        for layer in range(2):
            box = comm.mailbox(spec(2, parities=1), 0)
            publish(box, layer, [0, 1])
            if comm.rank == 1:
                comm.wait_until_blocked((0,))
            consume(box, layer)

    text = "rank 0: 12 of 12 words in rank 1 are overwritten before rank 1 has re-armed them"
    with pytest.raises(MailboxError, match=text) as caught:
        group.run(layers)
    assert caught.value.__notes__ == ["raised by rank 0 of 2"]


def test_a_missing_rearm_is_noticed_two_layers_later() -> None:
    group = VirtualRanks(2)
    entered: list[int] = []

    def layers(comm: RankComm) -> None:
        for layer in range(4):
            box = comm.mailbox(spec(2), layer % 2)
            entered.append(layer)
            publish(box, layer, [0, 1])
            box.poll(USED)

    with pytest.raises(MailboxError, match="parity 0, .* are overwritten before rank"):
        group.run(layers)
    assert max(entered) == 2


def test_a_word_is_visible_only_as_a_whole_region() -> None:
    """A poll over several sources waits for the last of them, whatever came before."""
    group = VirtualRanks(3)
    last_may_write = threading.Event()
    returned_early: list[bool] = []

    def layer(comm: RankComm) -> None:
        box = comm.mailbox(spec(3), 0)
        if comm.rank == 2:
            comm.wait_until_blocked((0, 1))
            returned_early.append(last_may_write.is_set())
            last_may_write.set()
        publish(box, 0, [0, 1, 2])
        box.poll(USED)
        returned_early.append(not last_may_write.is_set())

    group.run(layer)
    assert returned_early == [False] * 4


@pytest.mark.parametrize("seed", range(3))
def test_two_mailboxes_per_layer_and_changing_row_counts(seed: int) -> None:
    """Gather into one mailbox, answer through a second, with other rows in every layer."""
    ranks = 4
    rows_of = [random.Random(seed).randint(0, CAP) for _ in range(8)]
    group = VirtualRanks(ranks)

    def exchange(box: Mailbox, rows: int, base: float) -> torch.Tensor:
        for peer in range(ranks):
            value = torch.full((rows, WIDTH), base + 16 * box.rank + peer)
            box.store(peer, (box.rank, slice(0, rows)), value)
        got = box.poll((ALL, slice(0, rows))).clone()
        box.rearm((ALL, slice(0, rows)))
        return got

    def layers(comm: RankComm) -> None:
        for layer, rows in enumerate(rows_of):
            for name, base in (("gather", 1000.0 * layer), ("answer", 1000.0 * layer + 500)):
                box = comm.mailbox(spec(ranks, name), layer % 2)
                if (layer + comm.rank) % 3 == 0:
                    comm.wait_until_blocked(rank for rank in range(ranks) if rank < comm.rank)
                got = exchange(box, rows, base)
                sources = torch.arange(ranks, dtype=torch.float32).reshape(ranks, 1, 1)
                assert torch.equal(got, (base + 16 * sources + comm.rank).expand_as(got))

    group.run(layers)
    assert all_armed(group, spec(ranks, "gather"))
    assert all_armed(group, spec(ranks, "answer"))
