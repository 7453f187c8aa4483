"""Row lengths: how many keys each query row of a step sees, and the checks before a launch.

A step has `requests` requests with `queries` query rows each.  `lengths` counts the keys of a
request including the new rows, so row `i` of a request of length `L` sees `L - queries + 1 + i`
keys.  A padded request has length 0 and its rows see nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def row_lengths(lengths: Tensor, queries: int) -> Tensor:
    """Visible keys of every row, int64 [requests * queries], never negative.

    A request shorter than its verify rows clamps at 0 (a kernel would read -1 as four billion).
    Raises ValueError where `queries` is not positive.
    """
    if queries < 1:
        raise ValueError(f"{queries} query rows per request; at least 1 is needed")
    offsets = torch.arange(1 - queries, 1, device=lengths.device)
    return (lengths.to(torch.int64).reshape(-1, 1) + offsets).clamp(min=0).reshape(-1)


def queries_of(rows: int, requests: int) -> int:
    """Query rows per request; ValueError where `rows` is no positive multiple of `requests`."""
    if requests < 1 or rows < requests or rows % requests:
        raise ValueError(f"{rows} rows are not a multiple of {requests} requests")
    return rows // requests


def block_count(lengths: Tensor, block: int) -> Tensor:
    """Blocks that hold `lengths` tokens, same shape, int64; a length of 0 needs none."""
    return (lengths.to(torch.int64).clamp(min=0) + block - 1) // block


def check_rows(rows: int, lengths: Tensor, block_table: Tensor, queries: int, stage: str) -> None:
    """Raises ValueError (KP-ROWS) unless `rows` = `queries` per request of lengths and table."""
    requests, tables = lengths.numel(), block_table.shape[0]
    if requests == tables and rows == requests * queries:
        return
    kind = "single-row" if queries == 1 else f"{queries} rows per request"
    raise ValueError(
        f"KP-ROWS: q has {rows} rows, seq_lens has {requests}, block_table has {tables}; "
        f"stage {stage} is declared {kind}"
    )


def check_row_lengths(counts: Tensor, queries: int) -> None:
    """Raises ValueError (KP-NEG-LEN) naming request and row of the first negative count."""
    negative = torch.nonzero(counts.reshape(-1) < 0)
    if negative.numel():
        row = int(negative[0])
        raise ValueError(
            f"KP-NEG-LEN: request {row // queries}, row {row % queries}: "
            f"length {int(counts.reshape(-1)[row])} is negative"
        )


def padded_lengths(lengths: Tensor, real: Tensor, queries: int) -> Tensor:
    """Lengths for a kernel that runs `queries` rows of every request, of which `real` are real.

    The padding rows stand behind the real ones, and masking counts from the last row, so a
    request must look `queries - real` keys longer: its real rows then see what they should.  Rows
    past the real ones have no meaning.  A request without real rows gets 0.  int64 [requests].
    Raises ValueError where a request has more real rows than `queries`.
    """
    real = real.to(torch.int64)
    if real.numel() and int(real.max()) > queries:
        request = int(real.argmax())
        raise ValueError(
            f"KP-QMAX: max_q_len={queries} but segment {request} has {int(real.max())} rows"
        )
    return torch.where(real > 0, lengths.to(torch.int64) - real + queries, 0)


def check_segments(cumulative: Sequence[int], longest: int) -> None:
    """Raises ValueError (KP-QMAX) where a segment of `cumulative` has more than `longest` rows.

    An over-estimate passes: it only costs idle rows.  A descending bound is refused as well.
    """
    for segment, (start, end) in enumerate(pairwise(cumulative)):
        if end < start:
            raise ValueError(f"KP-QMAX: segment {segment} ends at {end}, before its start {start}")
        if end - start > longest:
            raise ValueError(
                f"KP-QMAX: max_q_len={longest} but segment {segment} has {end - start} rows"
            )
