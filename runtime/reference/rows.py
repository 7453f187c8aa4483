"""Visible keys of the query rows, as the reference operations count them."""

from __future__ import annotations

import torch
from torch import Tensor

from kpipe.runtime.rows import queries_of, row_lengths
from kpipe.runtime.sharding import Shard

UNSHARDED = Shard(0, 1, 1)


def visible_counts(lengths: Tensor, rows: int) -> Tensor:
    """Keys that each row sees over all ranks, int64 [rows]; 0 marks an inactive row.

    `lengths` [requests] already counts the new rows.  Raises ValueError where the requests do
    not divide the rows.
    """
    return row_lengths(lengths, queries_of(rows, lengths.numel()))


def local_counts(lengths: Tensor, rows: int, shard: Shard = UNSHARDED) -> Tensor:
    """Keys that each row sees on this rank, int64 [rows]: its own global count, localised."""
    return shard.local_length(visible_counts(lengths, rows))


def requests_of(lengths: Tensor, rows: int) -> Tensor:
    """Request of each row, int64 [rows]."""
    queries = queries_of(rows, lengths.numel())
    return torch.arange(rows, device=lengths.device) // queries


def check_group(shard: Shard, ranks: int) -> None:
    """Raises ValueError unless contexts are sharded over exactly the ranks of the mailboxes."""
    if shard.ranks != ranks:
        raise ValueError(f"contexts are sharded over {shard.ranks} ranks, mailboxes have {ranks}")


def select_active(value: Tensor, lengths: Tensor) -> Tensor:
    """`value` [rows, n] with the inactive rows exactly 0, chosen and not multiplied.

    Padding rows may hold NaN in any operand.
    """
    active = visible_counts(lengths, value.shape[0]) > 0
    return torch.where(active.unsqueeze(1), value, torch.zeros_like(value))
