"""A step in memory of its own: what the kernels cannot read in place is copied on the device.

The addresses are the same in every step, so that the copies may be part of a captured graph, or
run ahead of each replay on the stream that replays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kpipe.runtime.engine.extent import Extent
from kpipe.runtime.engine.handed import Handed, Source, describe
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import DTYPES
from kpipe.runtime.tables import write_expanded, write_token_pages

_SIDE = {"slots": "index_slots", "block_table": "index_table"}


@dataclass(frozen=True)
class StepBuffers:
    """Lengths, slots and tables of the largest declared step; one object serves all layers.

    `tensors` holds lengths [cap] int32, slots and index_slots [cap] int64, block_table and
    index_table [cap, pages of the context] int32, as far as the layer takes them.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def for_layer(cls, layer: Layer, context: int, device: torch.device | str) -> StepBuffers:
        """Buffers for a prepared layer and contexts of up to `context` tokens."""
        cap = layer.ROWS_CAP
        held = layer.shard.local_max(context)
        pages = {
            table: -(-held // layer.MEMORY.caches[cache].page)
            for table, cache in (("block_table", "latent_kv"), ("index_table", "index_kv"))
            if cache in layer.MEMORY.caches
        }
        tensors = {}
        for name, spec in layer.MEMORY.step.items():
            if name not in ("hidden", "out"):
                shape = (cap, pages[name]) if name in pages else (cap,)
                tensors[name] = torch.zeros(shape, dtype=DTYPES[spec.dtype], device=device)
        return cls(tensors)

    def taking(self, source: Source, like: Tensor) -> Copies:
        """Copies of what `source` hands over into these buffers."""
        return Copies(source, like, self.tensors)


@dataclass(frozen=True)
class Copies:
    """Takes any integer layout and pads to the rows of the step: length 0, slot -1, page 0.

    Every copy is a launch on the current stream; nothing is read back.  Raises LayerError for a
    shape or device that cannot be copied from, and for a table wider than the buffers.
    """

    source: Source
    like: Tensor
    tensors: Mapping[str, Tensor] = field(repr=False)
    index: bool = False  # whether slots and tables are those of the index cache
    pads: bool = True

    def of_index(self) -> Copies:
        """The same for the slots and the table of the index cache."""
        return Copies(self.source, self.like, self.tensors, index=True)

    def lengths(self, handed: Handed, extent: Extent, plus: int = 0) -> Tensor:
        """[requests of the step] int32: the lengths, each `plus` longer."""
        self.source.check_tensor(handed, 1, self.like)
        self.source.check_extent(handed, extent.requests, "requests")
        into = self.tensors["lengths"][: extent.step_requests]
        real = into[: extent.requests]
        real.copy_(handed.tensor[: extent.requests])
        if plus:
            real.add_(plus)
        into[extent.requests :].zero_()
        return into

    def slots(self, handed: Handed, extent: Extent) -> Tensor:
        """[rows of the step] int64; negative slots stay as they are."""
        self.source.check_tensor(handed, 1, self.like)
        self.source.check_extent(handed, extent.rows, "rows")
        into = self._buffer("slots")[: extent.step_rows]
        into[: extent.rows].copy_(handed.tensor[: extent.rows])
        into[extent.rows :].fill_(-1)
        return into

    def table(self, handed: Handed, extent: Extent, every: int = 1, split: int = 1) -> Tensor:
        """[requests of the step, pages] int32, of a table with `every` rows a request.

        Each entry becomes `split` consecutive pages.
        """
        self.source.check_tensor(handed, 2, self.like)
        self.source.check_extent(handed, extent.requests * every, "rows of the table")
        into = self._buffer("block_table")[: extent.step_requests]
        rows = handed.tensor[: extent.requests * every : every]
        if rows.shape[1] * split > into.shape[1]:
            raise self.source.refusal(
                handed.attribute,
                describe(handed.tensor),
                f"{rows.shape[1] * split} pages, the buffers hold {into.shape[1]}: make them for "
                "the engine's longest context",
            )
        write_expanded(into[: extent.requests], rows, split)
        into[extent.requests :].zero_()
        return into

    def token_table(self, tokens: Handed, requests: Handed, extent: Extent, period: int) -> Tensor:
        """[requests of the step, pages] int32, of a pool that names every token of a request.

        `period` consecutive places are one page; tokens behind the buffers' context are left out.
        """
        self.source.check_tensor(tokens, 2, self.like)
        self.source.check_tensor(requests, 1, self.like)
        self.source.check_extent(requests, extent.requests, "requests")
        into = self._buffer("block_table")[: extent.step_requests]
        chosen = requests.tensor[: extent.requests]
        write_token_pages(into[: extent.requests], tokens.tensor, chosen, period)
        into[extent.requests :].zero_()
        return into

    def _buffer(self, name: str) -> Tensor:
        return self.tensors[_SIDE[name] if self.index else name]
