"""Random layers at full size, built on the device: for timing, where the oracle would be too slow.

Weights are normal with the variance that keeps activations near one; caches hold normal values
in their byte format; every request has its own pages, shuffled over the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.formats import PagedCache
from kpipe.runtime.generated_folder import layer_of_step
from kpipe.runtime.layer import Layer
from kpipe.runtime.memory import Scratch
from kpipe.runtime.metadata import DTYPES, Caches, Step, Weights
from kpipe.runtime.sharding import Shard

SCALES = {"q_scale": 0.02, "k_scale": 0.02, "v_scale": 0.02}
CHUNK = 1 << 22  # values made at a time


@dataclass(frozen=True)
class Inputs:
    """What one layer of one rank works on; several prepared layers may share it."""

    weights: Weights
    caches: Caches
    step: Step


@dataclass
class TimedLayer:
    """A prepared layer, the step that it runs, and what it was prepared on."""

    layer: Layer
    step: Step
    inputs: Inputs

    def run(self) -> str:
        """Launch the whole layer; returns the method."""
        return self.layer.run(self.step)


def build(
    layer_class: type[Layer],
    *,
    arch: str,
    rows: int,
    q: int,
    context: int,
    count: int,
    seed: int = 0,
    device: str = "cuda",
    backend: str = "cuda",
) -> list[TimedLayer]:
    """`count` layers of that class with weights and caches of their own and one shared scratch.

    Every request has `context` keys, its new rows included.
    """
    generator = torch.Generator(device).manual_seed(seed)
    scratch = Scratch(device)
    return [
        prepared(layer_class, made, arch, number, scratch, backend=backend)
        for number in range(count)
        for made in [make_inputs(layer_class, rows, q, context, generator)]
    ]


def prepared(
    layer_class: type[Layer],
    inputs: Inputs,
    arch: str,
    number: int,
    scratch: Scratch,
    comm: Any = None,
    backend: str = "cuda",
) -> TimedLayer:
    """Layer `number` of its kind on the device of the inputs; `comm` is its rank's end of a group.

    With a `comm` only what this step launches is compiled: kernels of ranks are many.
    """
    layer = layer_class()
    if comm is not None:
        layer = layer_of_step(layer_class, arch, inputs.step.rows, inputs.step.q)
    layer.prepare(
        inputs.weights,
        inputs.caches,
        backend=backend,
        arch=arch,
        layer=number,
        scratch=scratch,
        comm=comm,
    )
    return TimedLayer(layer, inputs.step, inputs)


def make_inputs(
    layer_class: type[Layer],
    rows: int,
    q: int,
    context: int,
    generator: torch.Generator,
    shard: Shard | None = None,
) -> Inputs:
    """Weights, caches and step of one layer on the generator's device.

    Every request has `context` keys over all ranks, its new rows included; with a `shard` the
    caches hold that rank's share, and a new row that another rank owns has the slot -1.
    """
    shard = shard or Shard()
    device, requests = generator.device, rows // q
    memory = layer_class.MEMORY
    weights = {
        name: _weight(name, spec.shape, DTYPES[spec.dtype], generator)
        for name, spec in memory.weights.items()
        if not name.endswith("_inv")
    }
    new = context - q + torch.arange(q, device=device)
    owned, positions = shard.owner(new) == shard.rank, shard.local(new)
    tables, slots, caches = {}, {}, {}
    for name, spec in memory.caches.items():
        pages = -(-max(shard.local_length(context), 1) // spec.page)
        blocks = requests * pages
        order = torch.randperm(blocks, generator=generator, device=device).view(requests, pages)
        form = memory.cache_format(name)
        data = torch.zeros((blocks, spec.page, form.row_bytes), dtype=torch.uint8, device=device)
        fill(PagedCache(data, form, name), generator)
        here = positions.clamp(max=pages * spec.page - 1)
        places = order[:, here // spec.page] * spec.page + here % spec.page
        slots[name] = torch.where(owned, places, -1).view(-1)
        tables[name], caches[name] = order.int(), data
    hidden_size = int(memory.geometry["hidden"])
    hidden = torch.randn(rows, hidden_size, generator=generator, device=device).bfloat16()
    step = Step(
        hidden=hidden,
        out=torch.empty_like(hidden),
        lengths=torch.full((requests,), context, dtype=torch.int32, device=device),
        slots=slots["latent_kv"],
        block_table=tables["latent_kv"],
        index_slots=slots["index_kv"],
        index_table=tables["index_kv"],
        q=q,
    )
    return Inputs(Weights(**weights), Caches(**caches), step)


def _weight(name: str, shape: tuple, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    device = generator.device
    if name in SCALES:
        return torch.full(shape, SCALES[name], dtype=dtype, device=device)
    values = torch.randn(shape, generator=generator, device=device)
    if len(shape) == 1:
        return (1 + 0.1 * values).to(dtype) if name.endswith("norm") else (0.1 * values).to(dtype)
    return values.mul_(shape[-1] ** -0.5).to(dtype)


def fill(cache: PagedCache, generator: torch.Generator) -> None:
    """Normal values in every field; scales are the powers of two that suit them."""
    for part in cache.format.fields:
        view = cache.view(part.name)
        if part.name == "scale":
            number = torch.full((part.count,), 2.0**-7, device=view.device)
            view.copy_(number.view(torch.uint8).expand(view.shape))
            continue
        blocks = max(1, CHUNK // (view.shape[1] * part.count))
        scaled = 50.0 if part.dtype == torch.float8_e4m3fn else 1.0
        for start in range(0, view.shape[0], blocks):
            piece = view[start : start + blocks]
            shape = (piece.shape[0], piece.shape[1], part.count)
            values = torch.randn(shape, generator=generator, device=view.device) * scaled
            piece.copy_(values.clamp_(-448, 448).to(part.dtype).view(torch.uint8))
