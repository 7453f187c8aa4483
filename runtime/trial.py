"""One trial of a generated layer: seeded weights, requests and caches, run on virtual ranks.

Shared by `verify` and the tests.  Inputs come from the oracle's builders; every buffer is
poisoned with NaN bytes before a run, so that what was not written shows.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.comm.virtual_ranks import VirtualRanks
from kpipe.runtime.layer import HostStream, Layer, Scratch
from kpipe.runtime.metadata import Caches, LayerError, Step, Weights
from kpipe.runtime.op import Op
from kpipe.runtime.oracle.caches import (
    ContextShard,
    PagedBytes,
    build_index_cache,
    build_latent_cache,
)
from kpipe.runtime.oracle.geometry import Geometry
from kpipe.runtime.oracle.inputs import Batch, make_batch, make_weights, rank_weights
from kpipe.runtime.oracle.inputs import Weights as ModelWeights


def load_layer(folder: str | Path) -> type[Layer]:
    """The layer class of a generated folder.  Raises LayerError where there is none."""
    path = Path(folder)
    entry = path / "__init__.py"
    if not entry.is_file():
        raise LayerError(f"`{folder}` is not a generated folder: it has no __init__.py")
    name = f"kpipe_generated_{path.resolve().name}_{abs(hash(str(path.resolve())))}"
    module = sys.modules.get(name) or _import(name, entry)
    return getattr(module, module.__all__[0])


def _import(name: str, entry: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, entry, submodule_search_locations=[str(entry.parent)]
    )
    if spec is None or spec.loader is None:
        raise LayerError(f"cannot import `{entry}`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def geometry_of(layer: type[Layer]) -> Geometry:
    """The model's dimensions as the layer was generated for them."""
    known = {field.name for field in fields(Geometry)}
    values = {name: value for name, value in layer.MEMORY.geometry.items() if name in known}
    return Geometry(**values)  # type: ignore[arg-type]


def launches(layer_class: type[Layer], method: str) -> tuple[Op, ...]:
    """The ops that a method launches, in host order; nothing is prepared or executed."""
    layer, found = layer_class(), []

    def recorder(op: Op) -> Callable[..., None]:
        return lambda *operands, **named: found.append(op)

    for op in layer_class.OPS:
        setattr(layer, op.name, recorder(op))
    for name in layer_class.MEMORY.caches:
        setattr(layer, name, None)
    for name in ("main", *layer_class.STREAMS):
        setattr(layer, name, HostStream(name))
    anything = _Anything()
    getattr(layer, method)(anything, anything)
    return tuple(found)


def stages(layer_class: type[Layer], method: str, stop_after: str = "") -> tuple[str, ...]:
    """The stages that a method enters, in order, until the last op of `stop_after` has run.

    Raises LayerError that lists all of them where `stop_after` is none of them.
    """
    entered = [op.stage for op in launches(layer_class, method)]
    if stop_after and stop_after not in entered:
        known = ", ".join(dict.fromkeys(entered))
        raise LayerError(f"{layer_class.NAME}: no stage {stop_after!r}; stages: {known}")
    while stop_after and entered[-1] != stop_after:
        entered.pop()
    return tuple(dict.fromkeys(entered))


class _Anything:
    """Has every attribute; stands in for operands where only the launches matter."""

    def __getattr__(self, name: str) -> None:
        return None


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


@dataclass(frozen=True)
class Trial:
    """One layer's inputs and the state of every rank after it ran.

    `stages` are those that were entered; a run that was not cut short is `complete`.
    """

    geometry: Geometry
    weights: ModelWeights
    batch: Batch
    ranks: tuple[RankRun, ...]
    stages: tuple[str, ...]
    complete: bool = True


@dataclass(frozen=True)
class Case:
    """What to run."""

    lengths: tuple[int, ...]
    q: int = 1
    arch: str = ""
    seed: int = 0
    layers: int = 1
    only_ranks: tuple[int, ...] = ()  # without context parallelism: which ranks to run
    block_rows: int | None = None  # latent block stride in rows, where it exceeds the page
    stop_after: str = ""
    poison: bool = True


def run_case(layer_class: type[Layer], case: Case) -> tuple[Trial, ...]:
    """Run `case.layers` chained layers of that class and return one trial per layer.

    Layers have different weights and caches and share scratch and mailboxes; the hidden states
    of a layer are those of the one before plus its output (without context parallelism: plus the
    partial outputs of the ranks that run).
    """
    chain = _Chain(layer_class, case)
    first = chain.contexts(0).hidden
    if layer_class.CONTEXT_PARALLEL:
        group = VirtualRanks(layer_class.RANKS, timeout_s=120.0)
        by_rank = group.run(lambda comm: chain.run_rank(first, comm))
    else:
        by_rank = chain.run_alone(first)
    hidden, trials = first, []
    for number in range(case.layers):
        runs = tuple(rank_runs[number] for rank_runs in by_rank)
        entered = stages(layer_class, runs[0].method, case.stop_after)
        batch = replace(chain.contexts(number), hidden=hidden)
        parts = chain.geometry, chain.models[number], batch, runs, entered
        trials.append(Trial(*parts, complete=not case.stop_after))
        hidden = _next_hidden(hidden, runs if not layer_class.CONTEXT_PARALLEL else runs[:1])
    return tuple(trials)


class _Chain:
    """The layers of a case: their weights and contexts, and running one rank's share of them."""

    def __init__(self, layer_class: type[Layer], case: Case) -> None:
        self.layer_class = layer_class
        self.case = case
        self.geometry = geometry_of(layer_class)
        seeds = range(case.seed * 1000, case.seed * 1000 + case.layers)
        self.models = [make_weights(self.geometry, seed=seed) for seed in seeds]

    def contexts(self, number: int) -> Batch:
        """The requests and cached tokens of a layer; the hidden states are those of layer 0."""
        seed = self.case.seed * 1000 + 100 + number
        return make_batch(self.geometry, self.case.lengths, self.case.q, seed=seed)

    def run_rank(self, hidden: Tensor, comm: Any) -> list[RankRun]:
        """All layers on one rank of a group."""
        scratch, runs = Scratch(), []
        for number in range(self.case.layers):
            runs.append(_run_rank(self, number, hidden, comm, comm.rank, scratch))
            hidden = _next_hidden(hidden, runs[-1:])
        return runs

    def run_alone(self, hidden: Tensor) -> list[list[RankRun]]:
        """All layers on ranks that exchange nothing, one after the other."""
        ranks = self.case.only_ranks or (0,)
        scratch = [Scratch() for _ in ranks]
        runs: list[list[RankRun]] = [[] for _ in ranks]
        for number in range(self.case.layers):
            for place, rank in enumerate(ranks):
                run = _run_rank(self, number, hidden, None, rank, scratch[place])
                runs[place].append(run)
            hidden = _next_hidden(hidden, [rank_runs[-1] for rank_runs in runs])
        return runs


def _next_hidden(hidden: Tensor, runs: Sequence[RankRun]) -> Tensor:
    return (hidden.float() + sum(run.out.float() for run in runs)).bfloat16()


def _run_rank(
    chain: _Chain, number: int, hidden: Tensor, comm: Any, rank: int, scratch: Scratch
) -> RankRun:
    layer_class, geometry, case = chain.layer_class, chain.geometry, chain.case
    model, batch = chain.models[number], replace(chain.contexts(number), hidden=hidden)
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
        seed=case.seed + rank,
    )
    index = build_index_cache(
        geometry, batch, page=index_spec.page, shard=shard, seed=case.seed + rank + 50
    )
    layer = layer_class()
    held = rank_weights(geometry, model, rank, layer_class.RANKS)
    layer.prepare(
        Weights(
            **{f.name: getattr(held, f.name) for f in fields(held) if not f.name.endswith("_inv")}
        ),
        Caches(latent_kv=latent.data, index_kv=index.data),
        arch=case.arch,
        layer=number,
        comm=comm,
        scratch=scratch,
    )
    if case.poison:
        poison(layer)
    step = step_of(batch, latent, index)
    method = layer.run(step, stop_after=case.stop_after)
    views = layer.views(layer.declared_rows(step))
    kept = SimpleNamespace(
        **{n: v.clone() for n, v in vars(views).items() if isinstance(v, Tensor)}, rows=views.rows
    )
    return RankRun(rank, layer, method, kept, step.out, latent, index)


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


def poison(layer: Layer) -> None:
    """Fill every buffer with bytes that are NaN in every float type and absurd as integers."""
    for name in layer.MEMORY.buffers:
        layer.buffers[name].view(torch.uint8).fill_(0x7F)
    for name, spec in layer.MEMORY.buffers.items():
        if spec.dtype in ("bf16", "fp32"):
            layer.buffers[name].fill_(torch.nan)
