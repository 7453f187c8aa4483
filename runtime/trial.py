"""One trial of a generated layer: seeded weights, requests and caches, run on virtual ranks.

Shared by `verify` and the tests.  Inputs come from the oracle's builders; every buffer is
poisoned with NaN bytes before a run, so that what was not written shows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.aot.opened import AUTO
from kpipe.runtime.carried import Carried, first_carried
from kpipe.runtime.comm.device_processes import DeviceProcesses
from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.comm.host_processes import HostProcesses
from kpipe.runtime.comm.virtual_ranks import VirtualRanks
from kpipe.runtime.gathering import gathered
from kpipe.runtime.generated_folder import geometry_of, layer_of_step, stages
from kpipe.runtime.late import run_late
from kpipe.runtime.layer import Layer
from kpipe.runtime.memory import Scratch
from kpipe.runtime.metadata import Caches, Step, Weights, given
from kpipe.runtime.oracle.caches import (
    ContextShard,
    PagedBytes,
    build_index_cache,
    build_latent_cache,
)
from kpipe.runtime.oracle.geometry import Geometry
from kpipe.runtime.oracle.inputs import Batch, handed_weights, make_batch, make_weights
from kpipe.runtime.oracle.inputs import Weights as ModelWeights
from kpipe.runtime.oracle.residual import MixWeights, make_mix_weights
from kpipe.runtime.prepared import (
    Prepared,
    RankRun,
    cloned,
    launch_all,
    poison,
    rehearse_blank,
    run_captured,
)

LOG = logging.getLogger(__name__)  # where a run is: see watch.py


@dataclass(frozen=True)
class Trial:
    """One layer's inputs and the state of every rank after it ran.

    `stages` are those that were entered; a run that was not cut short is `complete`.  In a `tied`
    one cached index keys repeat.  `carried` is what the layer took from the one ahead
    of it; `mix` are its weights of AttnRes, where it has that.
    """

    geometry: Geometry
    weights: ModelWeights
    batch: Batch
    ranks: tuple[RankRun, ...]
    stages: tuple[str, ...]
    complete: bool = True
    tied: bool = False
    carried: Carried | None = None
    mix: MixWeights | None = None


@dataclass(frozen=True)
class Case:
    """What to run."""

    lengths: tuple[int, ...]
    q: int = 1
    arch: str = ""
    seed: int = 0  # of the requests and caches
    model: int = 0  # seed of the weights
    layers: int = 1
    only_ranks: tuple[int, ...] = ()  # without context parallelism: which ranks to run
    block_rows: int | None = None  # latent block stride in rows, where it exceeds the page
    stop_after: str = ""
    poison: bool = True
    backend: str = "reference"
    captured: bool = False  # all layers in one CUDA graph, replayed on other inputs than captured
    method: str = ""  # of the layer, in place of the one that its table picks for these rows
    distinct_keys: int = 0  # index keys repeat after that many positions, so that scores tie
    cache_bytes: int = 0  # each cache is at least that large, its pages in use anywhere in it
    replays: int = 1  # of the graph; every one has to leave the same bits
    concurrent: bool = False  # ranks of one device at the same time, not in lockstep
    late: int | None = None  # seed of further runs in which one rank of each layer is late
    processes: bool = False  # each rank a process, on a device of its own
    build: Path | str | None = AUTO  # of the kernels, as Layer.prepare() takes it

    @property
    def device(self) -> torch.device:
        """Where the layer runs; inputs are built and results are compared on the CPU."""
        return torch.device("cuda" if self.backend == "cuda" else "cpu")


def run_case(
    layer_class: type[Layer], case: Case, group: HostProcesses | DeviceProcesses | None = None
) -> tuple[Trial, ...]:
    """Run `case.layers` chained layers of that class and return one trial per layer.

    With a `group` of processes this one runs its own rank, and only rank 0 gets the trials; the
    others get none.

    Layers have different weights and caches and share scratch and mailboxes; what a layer takes
    from the one before says `Carried` (without context parallelism hidden states grow by the
    partial outputs of the ranks that run).
    """
    chain = Chain(layer_class, case)
    first = chain.first()
    if group is not None:
        by_rank = gathered(group.processes, layer_class, chain.run_here(first, group))
        if not by_rank:
            return ()
    elif layer_class.CONTEXT_PARALLEL and case.late is not None:
        ranks = at_once(layer_class, case)
        by_rank = run_late(chain.ready(first, ranks), ranks, case.late)
    elif layer_class.CONTEXT_PARALLEL and case.backend == "cuda":
        ranks = DeviceRanks(layer_class.RANKS, "cuda", lockstep=not case.concurrent)
        by_rank = chain.run_on_device(first, ranks)
    elif layer_class.CONTEXT_PARALLEL:
        threads = at_once(layer_class, case)
        by_rank = threads.run(lambda comm: chain.run_rank(first, comm))
    else:
        by_rank = chain.run_alone(first)
    carried, trials = first, []
    for number in range(case.layers):
        runs = tuple(rank_runs[number] for rank_runs in by_rank)
        entered = stages(layer_class, runs[0].method, case.stop_after)
        batch = replace(chain.contexts(number), hidden=carried.hidden)
        parts = chain.geometry, chain.models[number], batch, runs, entered
        tied = bool(case.distinct_keys)
        mix = chain.mix_weights(number)
        trials.append(Trial(*parts, not case.stop_after, tied, carried, mix))
        carried = carried.behind(runs if not layer_class.CONTEXT_PARALLEL else runs[:1])
    return tuple(trials)


def at_once(
    layer_class: type[Layer], case: Case, *, refuse_overwrite: bool = True
) -> DeviceRanks | VirtualRanks:
    """A group whose ranks run at the same time: streams of the device, or threads."""
    if case.backend == "cuda":
        return DeviceRanks(layer_class.RANKS, "cuda", lockstep=False)
    return VirtualRanks(layer_class.RANKS, timeout_s=120.0, refuse_overwrite=refuse_overwrite)


@lru_cache(maxsize=4)  # as many as any chain is long
def _model(geometry: Geometry, seed: int) -> ModelWeights:
    """Weights of a layer; cases share them, since to make them takes seconds."""
    return make_weights(geometry, seed=seed)


class Chain:
    """The layers of a case: their weights and contexts, and running one rank's share of them."""

    def __init__(self, layer_class: type[Layer], case: Case) -> None:
        self.layer_class = layer_class
        self.case = case
        self.geometry = geometry_of(layer_class)
        seeds = range(case.model * 1000, case.model * 1000 + case.layers)
        self.models = [_model(self.geometry, seed) for seed in seeds]
        self._contexts: dict[int, Batch] = {}  # made once, all ranks have shares of them

    def first(self) -> Carried:
        """What the first layer takes."""
        operands = self.layer_class.MEMORY.step
        return first_carried(self.contexts(0).hidden, operands, seed=self.case.seed + 7)

    def mix_weights(self, number: int) -> MixWeights | None:
        """A layer's weights of AttnRes, None where it has none."""
        if "mix_query" not in self.layer_class.MEMORY.weights:
            return None
        return make_mix_weights(self.geometry.hidden, self.case.model * 1000 + number)

    def contexts(self, number: int) -> Batch:
        """The requests and cached tokens of a layer; the hidden states are those of layer 0."""
        if number not in self._contexts:
            self._contexts[number] = make_batch(
                self.geometry,
                self.case.lengths,
                self.case.q,
                seed=self.case.seed * 1000 + 100 + number,
                distinct_keys=self.case.distinct_keys,
            )
        return self._contexts[number]

    def spare_blocks(self, cache: str, rank: int) -> int:
        """Blocks of a cache that no request uses; of several ranks only the first has many."""
        if self.layer_class.CONTEXT_PARALLEL and rank:
            return 3
        spec = self.layer_class.MEMORY.caches[cache]
        form = self.layer_class.MEMORY.cache_format(cache)
        return max(3, -(-self.case.cache_bytes // (spec.page * form.row_bytes)))

    def run_rank(self, carried: Carried, comm: Any) -> list[RankRun]:
        """All layers on one rank of a group."""
        scratch, runs = Scratch(self.case.device), []
        for number in range(self.case.layers):
            runs.append(_run_rank(self, number, carried, comm, comm.rank, scratch))
            carried = carried.behind(runs[-1:])
        return runs

    def run_here(
        self, carried: Carried, group: HostProcesses | DeviceProcesses
    ) -> list[list[RankRun]]:
        """All layers on the rank that this process is."""
        if isinstance(group, DeviceProcesses):
            return self.run_on_device(carried, group)
        return group.run(lambda comm: self.run_rank(carried, comm))

    def ready(
        self, carried: Carried, group: DeviceRanks | DeviceProcesses | VirtualRanks
    ) -> list[list[Prepared]]:
        """All layers of the ranks of a group that this process drives, prepared."""
        numbers, found = range(self.case.layers), []
        here = range(group.ranks) if isinstance(group, VirtualRanks) else group.here
        for rank in here:
            scratch = Scratch(self.case.device)
            found.append(
                [prepare(self, n, carried, group.rank(rank), rank, scratch) for n in numbers]
            )
        return found

    def run_on_device(
        self, carried: Carried, group: DeviceRanks | DeviceProcesses
    ) -> list[list[RankRun]]:
        """All layers on the ranks of a group that this process drives."""
        if group.lockstep and not self.case.captured:
            return group.run(lambda comm: self.run_rank(carried, comm))
        ready = self.ready(carried, group)
        if self.case.captured:
            return run_captured(ready, self.case.replays, group)
        rehearse_blank(ready, group)
        group.barrier("first run")
        results = group.run(lambda comm: launch_all(ready[group.here.index(comm.rank)]))
        group.synchronize()
        LOG.info("run")
        return [
            [one.finished(*result) for one, result in zip(*of_rank, strict=True)]
            for of_rank in zip(ready, results, strict=True)
        ]

    def run_alone(self, carried: Carried) -> list[list[RankRun]]:
        """All layers on ranks that exchange nothing, one after the other."""
        ranks = self.case.only_ranks or (0,)
        scratch = [Scratch(self.case.device) for _ in ranks]
        if self.case.captured:
            numbers = range(self.case.layers)
            found = []
            for place, rank in enumerate(ranks):
                of_rank = [prepare(self, n, carried, None, rank, scratch[place]) for n in numbers]
                found += run_captured([of_rank], self.case.replays)
            return found
        runs: list[list[RankRun]] = [[] for _ in ranks]
        for number in range(self.case.layers):
            for place, rank in enumerate(ranks):
                run = _run_rank(self, number, carried, None, rank, scratch[place])
                runs[place].append(run)
            carried = carried.behind([rank_runs[-1] for rank_runs in runs])
        return runs


def prepare(
    chain: Chain, number: int, carried: Carried, comm: Any, rank: int, scratch: Scratch
) -> Prepared:
    """Layer `number` of the chain with seeded weights, caches and step tensors on its device."""
    layer_class, geometry, case = chain.layer_class, chain.geometry, chain.case
    model, batch = chain.models[number], chain.contexts(number)
    shard = ContextShard()
    if layer_class.CONTEXT_PARALLEL:
        shard = ContextShard(rank, layer_class.RANKS, layer_class.INTERLEAVE)
    latent_spec, index_spec = (layer_class.MEMORY.caches[n] for n in ("latent_kv", "index_kv"))
    latent = build_latent_cache(
        geometry,
        model,
        batch,
        latent_spec.format,
        page=latent_spec.page,
        shard=shard,
        block_rows=case.block_rows,
        spare_blocks=chain.spare_blocks("latent_kv", rank),
        seed=case.seed + rank,
    )
    index = build_index_cache(
        geometry,
        batch,
        page=index_spec.page,
        shard=shard,
        spare_blocks=chain.spare_blocks("index_kv", rank),
        seed=case.seed + rank + 50,
    )
    layer = _layer(layer_class, case)
    caches = Caches(
        latent_kv=moved(latent.data, case.device), index_kv=moved(index.data, case.device)
    )
    layer.prepare(
        _weights_of(chain, number, rank),
        caches,
        backend=case.backend,
        arch=case.arch,
        layer=number,
        comm=comm,
        scratch=scratch,
        build=case.build if case.backend == "cuda" else None,
    )
    LOG.info("rank %d, layer %d prepared", rank, number)
    step = carried.step(step_of(batch, latent, index))
    tensors = {name: tensor.to(case.device) for name, tensor in given(step).items()}
    return Prepared(rank, layer, replace(step, **tensors), latent, index, caches)


def _layer(layer_class: type[Layer], case: Case) -> Layer:
    """Not prepared yet; kernels of other steps than the case's need not be made ready."""
    if not case.method and case.backend != "cuda":
        return layer_class()
    rows = len(case.lengths) * case.q
    return layer_of_step(layer_class, case.arch, rows, case.q, case.method)


def _weights_of(chain: Chain, number: int, rank: int) -> Weights:
    """A rank's share of a layer's weights, on the device of the case."""
    layer, model = chain.layer_class, chain.models[number]
    tensors = handed_weights(chain.geometry, model, rank, layer.RANKS, layer.MEMORY.weights)
    if mix := chain.mix_weights(number):
        tensors.update(vars(mix))
    return Weights(**{name: tensor.to(chain.case.device) for name, tensor in tensors.items()})


def _run_rank(
    chain: Chain, number: int, carried: Carried, comm: Any, rank: int, scratch: Scratch
) -> RankRun:
    case = chain.case
    ready = prepare(chain, number, carried, comm, rank, scratch)
    if case.poison:
        poison(ready.layer)
    method = ready.layer.run(ready.step, stop_after=case.stop_after)
    return ready.finished(method, cloned(ready.layer.views(ready.layer.declared_rows(ready.step))))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device with the same strides: what lies between its blocks moves along."""
    if tensor.device == device:
        return tensor
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def step_of(batch: Batch, latent: PagedBytes, index: PagedBytes) -> Step:
    """The step record of a batch; the output is poisoned."""
    return Step(
        hidden=batch.hidden,
        out=torch.full_like(batch.hidden, torch.nan),
        lengths=batch.lengths_tensor(),
        slots=latent.slots,
        block_table=latent.table,
        index_slots=index.slots,
        index_table=index.table,
        q=batch.q,
    )
