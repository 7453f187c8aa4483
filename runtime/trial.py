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
from kpipe.runtime.layer import Layer, Scratch
from kpipe.runtime.metadata import Caches, LayerError, Step, Weights
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
    """One layer's inputs and the state of every rank after it ran."""

    geometry: Geometry
    weights: ModelWeights
    batch: Batch
    ranks: tuple[RankRun, ...]


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
    of a layer are those of the one before plus its output.
    """
    geometry = geometry_of(layer_class)
    batches = [make_batch(geometry, case.lengths, case.q, seed=case.seed * 1000 + 7)]
    models = [make_weights(geometry, seed=case.seed * 1000 + n) for n in range(case.layers)]
    ranks = _ranks(layer_class, case)
    runs: list[list[RankRun]] = [[] for _ in ranks]

    def body(comm: Any, place: int) -> None:
        scratch = Scratch()
        hidden = batches[0].hidden
        for number, model in enumerate(models):
            batch = replace(_contexts(geometry, case, number), hidden=hidden)
            run = _run_rank(layer_class, geometry, model, batch, case, number, comm, ranks[place], scratch)
            runs[place].append(run)
            hidden = (hidden.float() + run.out.float()).bfloat16()

    if layer_class.CONTEXT_PARALLEL:
        group = VirtualRanks(layer_class.RANKS, timeout_s=120.0)
        group.run(lambda comm: body(comm, comm.rank))
    else:
        for place in range(len(ranks)):
            body(None, place)
    return tuple(
        Trial(
            geometry,
            model,
            replace(_contexts(geometry, case, number), hidden=_hidden_at(batches[0], runs[0], number)),
            tuple(rank_runs[number] for rank_runs in runs),
        )
        for number, model in enumerate(models)
    )


def _contexts(geometry: Geometry, case: Case, number: int) -> Batch:
    return make_batch(geometry, case.lengths, case.q, seed=case.seed * 1000 + 100 + number)


def _hidden_at(first: Batch, runs: Sequence[RankRun], number: int) -> Tensor:
    hidden = first.hidden
    for run in runs[:number]:
        hidden = (hidden.float() + run.out.float()).bfloat16()
    return hidden


def _ranks(layer_class: type[Layer], case: Case) -> tuple[int, ...]:
    if layer_class.CONTEXT_PARALLEL:
        return tuple(range(layer_class.RANKS))
    return case.only_ranks or (0,)


def _run_rank(
    layer_class: type[Layer],
    geometry: Geometry,
    model: ModelWeights,
    batch: Batch,
    case: Case,
    number: int,
    comm: Any,
    rank: int,
    scratch: Scratch,
) -> RankRun:
    sharded = layer_class.CONTEXT_PARALLEL
    shard = ContextShard(rank, layer_class.RANKS, layer_class.INTERLEAVE) if sharded else ContextShard()
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
        Weights(**{f.name: getattr(held, f.name) for f in fields(held) if not f.name.endswith("_inv")}),
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


Check = Callable[[Trial], None]
