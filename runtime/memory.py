"""The memory of a layer: what its pipeline declares, and the buffers that layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kpipe.runtime.comm.mailbox import MailboxSpec
from kpipe.runtime.formats import CacheFormat, cache_format
from kpipe.runtime.metadata import DTYPES, BufferSpec, CacheSpec, LayerError, TensorSpec


@dataclass(frozen=True)
class Memory:
    """Everything that a layer reads and writes, as its pipeline declares it."""

    weights: Mapping[str, TensorSpec]
    step: Mapping[str, TensorSpec]
    caches: Mapping[str, CacheSpec]
    buffers: Mapping[str, BufferSpec]
    mailboxes: Mapping[str, MailboxSpec] = field(default_factory=dict)
    geometry: Mapping[str, float] = field(default_factory=dict)  # model dimensions, epsilons
    model: str = ""  # name of the model, for buffers that its pipelines share

    def cache_format(self, cache: str) -> CacheFormat:
        """The row layout of a cache, in the dimensions of this model."""
        names = ("kv_lora", "pe", "index_dim")
        dims = {name: int(self.geometry.get(name, 0)) for name in names}
        return cache_format(self.caches[cache].format, **dims)


class Scratch:
    """Buffers that layers share on one device; layers of all kinds and models take one.

    Who gets the same buffer under one name is decided by its scope: `layer`, nobody else; `kind`,
    layers of one pipeline; `model`, pipelines of one model; `device`, all.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.buffers: dict[tuple[str | int, ...], Tensor] = {}

    def buffer(
        self,
        name: str,
        spec: BufferSpec,
        rows_cap: int,
        layer: int = 0,
        *,
        kind: str = "",
        model: str = "",
    ) -> Tensor:
        """The buffer of that name for a layer of pipeline `kind`, allocated on first use.

        Raises LayerError where another layer that shares it has declared it differently.
        """
        shape = tuple(rows_cap if axis == "rows" else axis for axis in spec.shape)
        owner = {"layer": (kind, layer), "kind": (kind,), "model": (model,), "device": ()}
        key = (spec.scope, name, *owner[spec.scope])
        known = self.buffers.get(key)
        if known is None:
            make = torch.zeros if spec.zeroed else torch.empty
            known = make(shape, dtype=DTYPES[spec.dtype], device=self.device)
            self.buffers[key] = known
        if tuple(known.shape) != shape or known.dtype != DTYPES[spec.dtype]:
            raise LayerError(
                f"buffer {name}: shared as {tuple(known.shape)} {known.dtype}, this layer declares "
                f"{shape} {spec.dtype}"
            )
        return known
