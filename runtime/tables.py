"""Block tables: from the pages of a pool to the smaller blocks that kernels address."""

from __future__ import annotations

import torch
from torch import Tensor


def expand_table(table: Tensor, manager_page: int, kernel_block: int) -> Tensor:
    """Block table in kernel blocks, same dtype, [requests, pages * manager_page / kernel_block].

    A pool page of `manager_page` tokens is `manager_page / kernel_block` consecutive kernel
    blocks; page p becomes blocks p*factor .. p*factor + factor - 1.  Negative entries (no page)
    become -1.  Raises ValueError (SP-PAGE) where the page is not a multiple of the block, and
    where an expanded id does not fit the dtype.
    """
    if kernel_block < 1 or manager_page < kernel_block or manager_page % kernel_block:
        raise ValueError(
            f"SP-PAGE: page {manager_page} is not a multiple of kernel_block {kernel_block}"
        )
    factor = manager_page // kernel_block
    wide = table.to(torch.int64).unsqueeze(-1)
    blocks = wide * factor + torch.arange(factor, device=table.device)
    blocks = torch.where(wide < 0, -1, blocks).flatten(1)
    if blocks.numel() and int(blocks.max()) > torch.iinfo(table.dtype).max:
        raise ValueError(f"SP-PAGE: block {int(blocks.max())} does not fit {table.dtype}")
    return blocks.to(table.dtype)
