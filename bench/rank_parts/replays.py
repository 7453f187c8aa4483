"""Many replays of one graph with one rank late at random: every replay leaves the same bits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.bench_inputs import TimedLayer
from kpipe.runtime.prepared import poison
from rank_parts.rank import Rank

ROWS, CONTEXT, LAYERS = 4, 4096, 4
REPLAYS = 500
"""Of each kind: hosts that are late, and devices that are."""
HOST_US, DEVICE_CYCLES = 400, 600_000


def run(rank: Rank) -> dict[str, Any]:
    """Replays with late hosts, each compared on the host; then back to back with late devices."""
    context, times = (200, 25) if rank.quick else (CONTEXT, REPLAYS)
    layers = rank.layers(ROWS, 1, context, 2 if rank.quick else LAYERS)
    step = _eager(layers)
    if rank.on_gpus:
        step = rank.captured([_poisoned(one) for one in layers]).replay
    else:
        step()
    rank.synchronize()
    kept = [tensor.clone() for tensor in _bits(layers)]
    delays = random.Random(7)  # the same on every rank: all know who is late
    differing = 0
    rank.barrier("late hosts")
    for _ in range(times):
        late, pause = delays.randrange(rank.ranks), delays.random() * HOST_US * 1e-6
        if late == rank.number:
            time.sleep(pause)
        step()
        differing += not all(map(torch.equal, _bits(layers), kept))
    found: dict[str, Any] = {"late_hosts": {"replays": times, "differing": differing}}
    if rank.on_gpus:
        on_device = _late_devices(rank, layers, step, kept, delays)
        found["late_devices"] = {"replays": REPLAYS, "differing": on_device}
    every = rank.told("differing", found)
    wrong = sum(kind["differing"] for one in every for kind in one.values())
    total = sum(kind["replays"] for kind in found.values())
    text = f"{total} replays with a late rank, {wrong} left other bits on some rank"
    return {"ok": wrong == 0, "layers": len(layers), "rows": ROWS, "by_rank": every, "text": [text]}


def _late_devices(
    rank: Rank,
    layers: Sequence[TimedLayer],
    replay: Callable[[], object],
    kept: Sequence[Tensor],
    delays: random.Random,
) -> int:
    """Nothing waits on the host: a device is late by a spin, and counts differences itself."""
    count = torch.zeros((), dtype=torch.int64, device=rank.device)
    rank.barrier("late devices")
    for _ in range(REPLAYS):
        late, cycles = delays.randrange(rank.ranks), delays.randrange(DEVICE_CYCLES)
        if late == rank.number:
            torch.cuda._sleep(cycles)
        replay()
        different = [(now != then).any() for now, then in zip(_bits(layers), kept, strict=True)]
        count += torch.stack(different).any()
    rank.barrier("late devices done")
    return int(count)


def _bits(layers: Sequence[TimedLayer]) -> list[Tensor]:
    """What a step leaves: outputs, and the caches with their new rows."""
    found = []
    for one in layers:
        caches = one.inputs.caches
        found += [one.step.out, caches.latent_kv, caches.index_kv]
    return [tensor.view(torch.uint8) for tensor in found]


def _poisoned(one: TimedLayer) -> Callable[[], object]:
    def body() -> str:
        poison(one.layer)
        return one.run()

    return body


def _eager(layers: Sequence[TimedLayer]) -> Callable[[], object]:
    def body() -> None:
        with torch.no_grad():
            for one in layers:
                _poisoned(one)()

    return body
