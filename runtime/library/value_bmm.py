"""The values of all heads as one batched product of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kpipe.runtime.library.site import Site


class ValueBmm:
    """values = BF16(W_UV . latent), head first, in one torch.bmm.

    Sums are FP32 unless the engine lets cuBLAS reduce in BF16
    (`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`).
    """

    def __init__(self, site: Site) -> None:
        """Nothing has to be made ready."""

    @staticmethod
    def refusal() -> str:
        """Never refused: torch is there."""
        return ""

    def ready(self, rows: int) -> None:
        """Any number of rows is."""

    def __call__(self, latent: Tensor, values: Tensor, *, w_uv: Tensor) -> None:
        """latent [rows, heads, kv_lora], w_uv [heads, v_dim, kv_lora], values [heads, rows, v_dim].

        All BF16; `values` may be cut out of a buffer with more rows.
        """
        torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2), out=values)
