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


def write_expanded(into: Tensor, table: Tensor, factor: int) -> None:
    """Write `expand_table` of pages of `factor` kernel blocks into `into`, on its device.

    `into` [requests, at least pages * factor] integer; columns behind become 0.  Nothing is read
    back, so ids must fit the dtype of `into`: they do where the cache they name has fewer blocks.
    """
    width = table.shape[1] * factor
    blocks = into[:, :width].unflatten(1, (table.shape[1], factor))
    blocks.copy_(table.unsqueeze(-1))
    if factor > 1:
        blocks.mul_(factor).add_(torch.arange(factor, dtype=into.dtype, device=into.device))
        blocks.clamp_(min=-1)  # a missing page is -1 in all of its blocks
    into[:, width:].zero_()


def write_token_pages(into: Tensor, tokens: Tensor, requests: Tensor, period: int) -> None:
    """Write the pages of some requests of a table that names every token, on its device.

    `tokens` [pool, context] integer names the place of each token, `requests` [n] the rows of it;
    pages are `period` consecutive places, `into` [n, pages] gets their numbers and 0 behind.
    """
    columns = tokens[:, : into.shape[1] * period : period]
    found = columns.index_select(0, requests)
    torch.div(found, period, rounding_mode="floor", out=found)
    into[:, : found.shape[1]].copy_(found)
    into[:, found.shape[1] :].zero_()
