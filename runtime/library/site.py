"""Where a library op runs: what it needs of its layer ahead of the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kpipe.runtime.formats import PagedCache
from kpipe.runtime.metadata import BufferSpec

if TYPE_CHECKING:
    from kpipe.runtime.layer import Layer
    from kpipe.runtime.memory import Scratch


@dataclass(frozen=True)
class Site:
    """The place of a library op in a prepared layer.

    `heads` are the head rows of an attention core: those of one rank, or of all ranks under
    context parallelism.  `buffer` hands out scratch by name, allocated for the largest step and
    shared by the layers of one kind.
    """

    layer: str
    heads: int
    top_k: int
    latent_kv: PagedCache
    buffer: Callable[[str, BufferSpec], Tensor]


def site_of(layer: Layer, scratch: Scratch) -> Site:
    """The place that a prepared layer gives its library ops; `scratch` is the layer's own."""
    dims = layer.MEMORY.geometry
    heads = int(dims["heads_total"]) // (1 if layer.CONTEXT_PARALLEL else layer.RANKS)

    def buffer(name: str, spec: BufferSpec) -> Tensor:
        return scratch.buffer(name, spec, layer.ROWS_CAP, kind=layer.NAME)

    return Site(layer.NAME, heads, int(dims["top_k"]), layer.latent_kv, buffer)
