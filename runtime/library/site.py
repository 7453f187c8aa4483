"""Where a library op runs: what it needs of its layer ahead of the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kpipe.runtime.formats import PagedCache
from kpipe.runtime.metadata import BufferSpec


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
