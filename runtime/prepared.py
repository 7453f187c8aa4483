"""Layers of a trial that are prepared, and how they are run on a device: eagerly, or captured.

Scratch is poisoned ahead of every layer, so that what was not written shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.carried import hand_on
from kpipe.runtime.comm.device_processes import DeviceProcesses
from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import Caches, Step, given
from kpipe.runtime.oracle.caches import PagedBytes

LOG = logging.getLogger(__name__)  # where a run is: see watch.py


@dataclass
class RankRun:
    """What one rank holds after a run."""

    rank: int
    layer: Layer
    method: str
    views: SimpleNamespace  # buffers cut to the declared rows
    out: Tensor  # [rows, hidden] BF16, the step's own rows
    latent: PagedBytes  # caches with their metadata; data is what the layer has written
    index: PagedBytes
    new_prefix: Tensor | None = None  # the residual stream, where the layer writes it beside out
    unstable: int | None = None  # replays that left other bits than the first; None without any


@dataclass
class Prepared:
    """A layer of the chain, ready to run on the device, and what it was built from."""

    rank: int
    layer: Layer
    step: Step
    latent: PagedBytes
    index: PagedBytes
    caches: Caches  # on the device

    def finished(self, method: str, views: SimpleNamespace) -> RankRun:
        """The state after a run, on the CPU; cache bytes go back into `latent` and `index`."""
        self.latent.data.copy_(self.caches.latent_kv)
        self.index.data.copy_(self.caches.index_kv)
        kept = {n: v.cpu() for n, v in vars(views).items() if isinstance(v, Tensor)}
        return RankRun(
            self.rank,
            self.layer,
            method,
            SimpleNamespace(**kept, rows=views.rows),
            self.step.out.cpu(),
            self.latent,
            self.index,
            None if self.step.new_prefix is None else self.step.new_prefix.cpu(),
        )


DeviceGroup = DeviceRanks | DeviceProcesses


def run_captured(
    ready: Sequence[Sequence[Prepared]], replays: int, group: DeviceGroup | None = None
) -> list[list[RankRun]]:
    """All layers of the ranks that run here (of `group`, or one alone) in one CUDA graph.

    Scratch is poisoned ahead of each layer.  Captured with other inputs than it is replayed on:
    hidden states of zeros, no lengths, slots of -1.  The first run, eager and on those inputs,
    leaves the caches as they are.
    """
    every = [one for of_rank in ready for one in of_rank]
    restore = blank(ready)
    if group is not None and not group.lockstep:
        rehearse(ready, group)

    def launch() -> list[list[tuple[str, SimpleNamespace]]]:
        if group is None:
            return [launch_all(ready[0])]
        return group.run(lambda comm: launch_all(ready[group.here.index(comm.rank)]))

    wait = torch.cuda.synchronize if group is None else group.synchronize
    together = (lambda topic: None) if group is None else group.barrier
    together("first run")
    launch()  # warm: streams, allocator
    wait()
    LOG.info("warm")
    graph = torch.cuda.CUDAGraph()
    # Ranks launch from threads of their own, so what other threads do may not end the capture.
    with torch.cuda.graph(graph, capture_error_mode="relaxed" if group else "global"):
        results = [result for of_rank in launch() for result in of_rank]
    restore()
    LOG.info("captured")
    together("captured")  # a poll waits seconds, and a capture may take as long
    graph.replay()
    wait()
    LOG.info("replayed")
    unstable = _replay_again(graph, every, results, replays - 1)
    runs = []
    for one, (method, views), differing in zip(every, results, unstable, strict=True):
        runs.append(one.finished(method, views))
        runs[-1].unstable = differing
    layers = len(ready[0])
    return [runs[first : first + layers] for first in range(0, len(runs), layers)]


def blank(ready: Sequence[Sequence[Prepared]]) -> Callable[[], None]:
    """Steps without hidden states, lengths and slots; the result puts everything back."""
    steps = [one.step for of_rank in ready for one in of_rank]
    wanted = [{name: tensor.clone() for name, tensor in given(step).items()} for step in steps]
    for step in steps:
        for name, nothing in (("hidden", 0), ("lengths", 0), ("slots", -1), ("index_slots", -1)):
            getattr(step, name).fill_(nothing)

    def restore() -> None:
        for step, tensors in zip(steps, wanted, strict=True):
            for name, tensor in tensors.items():
                getattr(step, name).copy_(tensor)
        torch.cuda.synchronize()  # ranks may run on streams of their own

    return restore


def rehearse_blank(ready: Sequence[Sequence[Prepared]], group: DeviceGroup) -> None:
    """`rehearse` on steps without contents; caches and steps are then as they were."""
    restore = blank(ready)
    rehearse(ready, group)
    restore()


def rehearse(ready: Sequence[Sequence[Prepared]], group: DeviceGroup) -> None:
    """Every launch of every rank once, one rank of a device after the other, on full mailboxes.

    Behind it no kernel has to be loaded and no memory to be had while a poll waits for words: the
    driver may wait for that poll, and whoever sends the words for the driver.
    """
    group.barrier("rehearsal")
    for rank, of_rank in zip(group.here, ready, strict=True):

        def alone(comm: Any, rank: int = rank, of_rank: Sequence[Prepared] = of_rank) -> None:
            if comm.rank == rank:
                launch_all(of_rank, group.fill)

        group.run(alone)
        group.synchronize()
        LOG.info("rank %d rehearsed", rank)
    group.arm()


def _replay_again(
    graph: torch.cuda.CUDAGraph,
    ready: Sequence[Prepared],
    results: Sequence[tuple[str, SimpleNamespace]],
    times: int,
) -> list[int | None]:
    """Per layer how many of `times` further replays left other bits; None without any.

    The graph poisons the scratch itself; a layer inserts the same rows again.
    """
    if times < 1:
        return [None] * len(ready)

    def bits(place: int) -> list[Tensor]:
        step = ready[place].step
        tensors = [step.out, step.new_prefix, *vars(results[place][1]).values()]
        return [t.view(torch.uint8) for t in tensors if isinstance(t, Tensor)]

    first = [[t.clone() for t in bits(place)] for place in range(len(ready))]
    differing = [0] * len(ready)
    for _ in range(times):
        graph.replay()
        for place, kept in enumerate(first):
            same = all(torch.equal(a, b) for a, b in zip(kept, bits(place), strict=True))
            differing[place] += not same
    return [*differing]


def launch_all(
    ready: Sequence[Prepared], before_each: Callable[[], None] = lambda: None
) -> list[tuple[str, SimpleNamespace]]:
    """Runs the layers one behind the other and keeps what each has left in the scratch."""
    results = []
    for number, one in enumerate(ready):
        if number:
            hand_on(ready[number - 1].step, one.step)
        poison(one.layer)
        before_each()
        method = one.layer.run(one.step)
        views = one.layer.views(one.layer.declared_rows(one.step))
        results.append((method, cloned(views)))
    return results


def cloned(views: SimpleNamespace) -> SimpleNamespace:
    """Copies of every tensor of `views`."""
    tensors = {n: v.clone() for n, v in vars(views).items() if isinstance(v, Tensor)}
    return SimpleNamespace(**tensors, rows=views.rows)


def poison(layer: Layer) -> None:
    """Fill every buffer with bytes that are NaN in every float type and absurd as integers."""
    for name in layer.MEMORY.buffers:
        layer.buffers[name].view(torch.uint8).fill_(0x7F)
    for name, spec in layer.MEMORY.buffers.items():
        if spec.dtype in ("bf16", "fp32"):
            layer.buffers[name].fill_(torch.nan)
