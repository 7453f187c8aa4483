"""What the way between two GPUs does: bandwidth of stores and copies, latency of a word."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from kpipe.runtime.bench import middle
from kpipe.runtime.comm.peer_memory import TRANSPORTS, PeerMemory
from kpipe.runtime.host.compile import compile_kernel
from rank_parts.rank import Rank

BYTES = 64 << 20
TIMES = 10
GAMES = 5


def run(rank: Rank) -> dict[str, Any]:
    """Every ordered pair alone, then all pairs at once; then ping-pong of every two ranks."""
    group = rank.cuda
    memory = TRANSPORTS[group.transport](rank.processes, BYTES // 4, rank.device)
    source = torch.ones(BYTES // 4, dtype=torch.int32, device=rank.device)
    pairs = list(itertools.permutations(range(rank.ranks), 2))
    found: dict[str, Any] = {"pairs": []}
    for sender, receiver in pairs:
        record: dict[str, Any] = {"from": sender, "to": receiver}
        for name, move in _moves(memory, source, receiver).items():
            rank.barrier(f"{name} {sender} {receiver}")
            mine = _gb_per_s(move) if rank.number == sender else 0.0
            record[name] = rank.told("bandwidth", mine)[sender]
        found["pairs"].append(record)
    after = (rank.number + 1) % rank.ranks
    for name, move in _moves(memory, source, after).items():
        rank.barrier(f"{name} in a ring")
        found[f"ring_{name}"] = rank.told("bandwidth", _gb_per_s(move))
    rank.save("link", {"complete": False, **found})
    found["ping_pong"] = [
        _ping_pong(rank, memory, *two) for two in itertools.combinations(range(rank.ranks), 2)
    ]
    text = [
        f"{one['from']} to {one['to']}: stores {one['stores']:.0f} GB/s, copies "
        f"{one['copies']:.0f} GB/s"
        for one in found["pairs"]
    ]
    text += [
        f"{one['between']}: a word there and back takes {one['round_trip_us']:.2f} us"
        for one in found["ping_pong"]
    ]
    return {"ok": True, "bytes": BYTES, **for_plans(found), **found, "text": text}


def for_plans(found: dict[str, Any]) -> dict[str, float]:
    """What `kpipe plan --link` reads of this: the slowest stores, the longest way of a word."""
    stores = [*(pair["stores"] for pair in found["pairs"]), *found["ring_stores"]]
    trips = [game["round_trip_us"] for game in found["ping_pong"]]
    return {"peer_store_gb_s": min(stores), "one_way_latency_us": max(trips) / 2}


def _moves(
    memory: PeerMemory, source: torch.Tensor, receiver: int
) -> dict[str, Callable[[], object]]:
    """By a kernel that stores, and by torch's copy."""
    target = memory.views[receiver]
    return {
        "stores": lambda: torch.add(source, 1, out=target),
        "copies": lambda: target.copy_(source),
    }


def _gb_per_s(move: Callable[[], object]) -> float:
    """GB (10^9 bytes) a second, the median over some turns."""
    move()
    times = []
    for _ in range(TIMES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        move()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return BYTES / middle(times) * 1e-9


def _ping_pong(rank: Rank, memory: PeerMemory, first: int, second: int) -> dict[str, Any]:
    """Microseconds of a round trip between two ranks, the median over some games."""
    from rank_parts.ping_kernel import TURNS, Ping, operands

    own, times = memory.views[rank.number][:TURNS], []
    playing = rank.number in (first, second)
    kernel: Callable[..., None] | None = None
    peer = fault = torch.empty(0)
    if playing:
        kernel = compile_kernel(Ping(rank.number == first), operands(), rank.arch)
        other = second if rank.number == first else first
        peer = torch.tensor([memory.bases[other]], dtype=torch.int64, device=rank.device)
        fault = rank.cuda.comm.record.fault
    for _ in range(GAMES + 1):
        own.fill_(-1)
        rank.barrier("words filled")
        if kernel is not None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            kernel(own, peer, fault)
            end.record()
            rank.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / TURNS)
        rank.barrier("a game")
    mine = middle(times[1:]) if playing else 0.0
    trip = rank.told("round trips", mine)[first]
    return {"between": f"{first} and {second}", "turns": TURNS, "round_trip_us": trip}
