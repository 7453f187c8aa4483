"""A step made of views of the engine's own tensors: nothing is allocated, copied or launched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kpipe.runtime.engine.extent import Extent
from kpipe.runtime.engine.handed import Handed, Source, describe

COPY = "or copy through buffers=StepBuffers.for_layer(...)"


@dataclass(frozen=True)
class Views:
    """Takes what already has the layout that the kernels read, and refuses the rest.

    Addresses are the engine's, so a captured step reads what the engine writes there next.
    """

    source: Source
    like: Tensor  # the hidden states: everything lies where they do
    pads: bool = False

    def lengths(self, handed: Handed, extent: Extent) -> Tensor:
        """[requests] int32; LayerError for anything else."""
        return self._vector(handed, extent.requests, torch.int32, "requests")

    def slots(self, handed: Handed, extent: Extent) -> Tensor:
        """[rows] int64; LayerError for anything else."""
        return self._vector(handed, extent.rows, torch.int64, "rows")

    def table(self, handed: Handed, extent: Extent, every: int = 1, split: int = 1) -> Tensor:
        """[requests, pages] int32 with contiguous rows, of a table that has `every` rows a request.

        Raises LayerError for other layouts, and where an entry is to be `split` into pages.
        """
        source, tensor = self.source, handed.tensor
        source.check_tensor(handed, 2, self.like)
        source.check_extent(handed, extent.requests * every, "rows of the table")
        if split != 1:
            raise source.refusal(
                handed.attribute,
                f"a table of pages of {split} kernel pages",
                f"hand in the table that the engine's kernels use, {COPY}",
            )
        if tensor.dtype != torch.int32:
            raise source.refusal(handed.attribute, describe(tensor), f"kernels read i32, {COPY}")
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise source.refusal(
                handed.attribute,
                f"with strides {tuple(tensor.stride())}",
                f"kernels read the pages of a request side by side: make it contiguous, {COPY}",
            )
        return tensor[: extent.requests * every : every]

    def _vector(self, handed: Handed, count: int, dtype: torch.dtype, what: str) -> Tensor:
        source, tensor = self.source, handed.tensor
        source.check_tensor(handed, 1, self.like)
        source.check_extent(handed, count, what)
        if tensor.dtype != dtype:
            wanted = "i32" if dtype == torch.int32 else "i64"
            raise source.refusal(
                handed.attribute, describe(tensor), f"kernels read {wanted}, {COPY}"
            )
        if count > 1 and tensor.stride(0) != 1:
            raise source.refusal(
                handed.attribute,
                f"with stride {tensor.stride(0)}",
                f"kernels read it side by side: make it contiguous, {COPY}",
            )
        return tensor[:count]
