"""What an engine hands to a layer: weights, caches and a step of one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kpipe.runtime.generated_folder import geometry_of
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import Caches, Step, Weights
from kpipe.runtime.oracle.caches import ContextShard, build_index_cache, build_latent_cache
from kpipe.runtime.oracle.inputs import handed_weights, make_batch, make_weights
from kpipe.runtime.trial import step_of


@dataclass
class Inputs:
    """Records of one rank; a test may spoil them before the layer sees them."""

    weights: Weights
    caches: Caches
    step: Step

    def prepared(self, layer_class: type[Layer], **options: Any) -> Layer:
        """A layer of that class, prepared with these weights and caches."""
        layer = layer_class()
        layer.prepare(self.weights, self.caches, **options)
        return layer


def engine_inputs(
    layer: type[Layer], lengths: tuple[int, ...], q: int = 1, rank: int = 0
) -> Inputs:
    """Seeded inputs of a rank; hidden rows that see nothing are NaN, and so is the output."""
    geometry = geometry_of(layer)
    model, batch = make_weights(geometry), make_batch(geometry, lengths, q)
    shard = ContextShard()
    if layer.CONTEXT_PARALLEL:
        shard = ContextShard(rank, layer.RANKS, layer.INTERLEAVE)
    latent_format = layer.MEMORY.caches["latent_kv"].format
    latent = build_latent_cache(geometry, model, batch, latent_format, shard=shard)
    index = build_index_cache(geometry, batch, shard=shard)
    held = handed_weights(geometry, model, rank, layer.RANKS, layer.MEMORY.weights)
    return Inputs(
        Weights(**held),
        Caches(latent_kv=latent.data, index_kv=index.data),
        step_of(batch, latent, index),
    )


def with_empty_requests(step: Step, extra: int) -> Step:
    """A step with `extra` requests of length 0 behind it; hidden rows and output are NaN."""

    def grown(tensor: torch.Tensor, rows: int, value: float) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), value)])

    rows = extra * step.q
    return replace(
        step,
        hidden=grown(step.hidden, rows, torch.nan),
        out=grown(torch.full_like(step.out, torch.nan), rows, torch.nan),
        lengths=grown(step.lengths, extra, 0),
        slots=grown(step.slots, rows, -1),
        index_slots=grown(step.index_slots, rows, -1),
        block_table=grown(step.block_table, extra, 0),
        index_table=grown(step.index_table, extra, 0),
    )
