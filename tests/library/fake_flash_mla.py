"""A stand-in for the package flash_mla: its call in float64, as strict and as careless as it is.

Written from what the library documents: rows of E4M3 codes, FP32 scales of 128 of them and BF16
positions; -1 skipped anywhere; natural LSE; rows without keys undefined (here NaN and +inf); a
schedule that belongs to the shapes of its first call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

GROUP = 128


@dataclass
class Schedule:
    """The shapes of the first call that it was handed to."""

    shapes: tuple[Any, ...] = ()


@dataclass
class Library:
    """The module's functions, and the schedules that they have made."""

    schedules: list[Schedule] = field(default_factory=list)
    legacy: bool = True

    def module(self) -> ModuleType:
        """What `import flash_mla` is to find."""
        made = ModuleType("flash_mla")
        made.__spec__ = __spec__
        made.get_mla_metadata = self.get_mla_metadata
        made.flash_mla_with_kvcache = self.flash_mla_with_kvcache
        made.has_legacy = lambda: self.legacy
        return made

    def get_mla_metadata(self, *args: Any, **kwargs: Any) -> tuple[Schedule, None]:
        self.schedules.append(Schedule())
        return self.schedules[-1], None

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor | None,
        cache_seqlens: Tensor | None,
        head_dim_v: int,
        tile_scheduler_metadata: Schedule,
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool | None = None,
        indices: Tensor | None = None,
        use_legacy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert use_legacy and self.legacy and is_fp8_kvcache and not causal
        batch, queries, heads, width = q.shape
        assert q.dtype == torch.bfloat16 and heads in (64, 128) and queries == 1
        pages, page, one, row_bytes = k_cache.shape
        pe = width - head_dim_v
        assert (page, one, k_cache.dtype) == (64, 1, torch.uint8)
        assert row_bytes == head_dim_v + head_dim_v // GROUP * 4 + pe * 2
        assert k_cache.stride() == (page * row_bytes, row_bytes, row_bytes, 1)
        assert indices.dtype == torch.int32 and indices.shape[:2] == (batch, 1)
        shapes = (q.shape, k_cache.shape[1:], indices.shape)
        schedule = tile_scheduler_metadata
        schedule.shapes = schedule.shapes or shapes
        assert schedule.shapes == shapes, "inconsistent with sched_meta"
        out = torch.full((batch, 1, heads, head_dim_v), torch.nan)
        lse = torch.full((batch, heads, 1), torch.inf)
        for row, listed in enumerate(indices[:, 0].long()):
            kept = listed[listed != -1]
            if len(kept):
                keys = rows_of(k_cache[kept // page, kept % page, 0], head_dim_v)
                logits = q[row, 0].double() @ keys.T * softmax_scale
                out[row, 0] = (torch.softmax(logits, 1) @ keys[:, :head_dim_v]).float()
                lse[row, :, 0] = torch.logsumexp(logits, 1).float()
        return out.bfloat16(), lse


def rows_of(data: Tensor, latent: int) -> Tensor:
    """Values of cache rows [n, row bytes] in float64."""
    end = latent + latent // GROUP * 4
    codes = data[:, :latent].view(torch.float8_e4m3fn).double()
    scales = data[:, latent:end].contiguous().view(torch.float32).double()
    position = data[:, end:].contiguous().view(torch.bfloat16).double()
    return torch.cat([codes * scales.repeat_interleave(GROUP, 1), position], 1)
