"""Exact top-k of the scores, locally and over all ranks, as physical cache rows.

Order of keys: higher score first; among equal scores the lower id first (`low_id`) or the higher
id first (`high_id`).  NaN ranks as -inf.  Scores compare by bits: +0 is above -0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kpipe.runtime.comm.mailbox import Mailbox
from kpipe.runtime.comm.sanitise import EMPTY_ID, sanitise_scores
from kpipe.runtime.formats import PagedCache
from kpipe.runtime.sharding import Shard

from .rows import UNSHARDED, check_group, local_counts, requests_of, visible_counts

TIES = ("low_id", "high_id")

_LOW_WORD = 0xFFFFFFFF


def rank_keys(bits: Tensor, ids: Tensor, tie: str = "low_id") -> Tensor:
    """int64 keys that sort (descending) like score, then id.

    `bits` are the scores' FP32 bits as int32, `ids` int32 >= 0.  Raises ValueError for an
    unknown tie rule.
    """
    if tie not in TIES:
        raise ValueError(f"tie is {tie!r}; known are {', '.join(TIES)}")
    bits, ids = bits.to(torch.int64), ids.to(torch.int64)
    # Negative floats order backwards by bits: flip all bits but the sign.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) | (ids if tie == "high_id" else _LOW_WORD - ids)


def score_bits(scores: Tensor) -> Tensor:
    """FP32 bits as int32, NaN replaced by -inf."""
    return sanitise_scores(scores).contiguous().view(torch.int32)


def best(bits: Tensor, ids: Tensor, top_k: int, tie: str = "low_id") -> Tensor:
    """Places of the min(top_k, n) best of n candidates, best first, int64."""
    order = torch.argsort(rank_keys(bits, ids, tie), descending=True)
    return order[:top_k]


def topk_select(
    scores: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    latent_kv: PagedCache,
    selected: Tensor,
    valid: Tensor,
    *,
    top_k: int,
    tie: str = "low_id",
) -> None:
    """The min(top_k, visible) best keys of each row as physical rows, -1 behind the last.

    scores [rows, context] FP32, lengths [requests] i32, block_table [requests, pages] i32;
    writes every element of selected [rows, top_k] i32 and valid [rows] i32 (their number).
    Rows that see no more than top_k keys take all positions in ascending order.  Raises
    ValueError where a row sees more keys than scores has columns.
    """
    rows = scores.shape[0]
    counts = _checked(visible_counts(lengths, rows), scores)
    requests = requests_of(lengths, rows).tolist()
    for row, count in enumerate(counts):
        positions = torch.arange(count, device=scores.device)
        if count > top_k:
            positions = best(score_bits(scores[row, :count]), positions, top_k, tie)
        _store(row, positions, block_table[requests[row]], latent_kv, selected, valid)


def topk_local(
    scores: Tensor,
    lengths: Tensor,
    candidates: Mailbox,
    *,
    top_k: int,
    shard: Shard = UNSHARDED,
    tie: str = "low_id",
) -> None:
    """Publishes this rank's best min(top_k, local visible) keys to every rank.

    scores [rows, context] FP32 over local positions; candidates [dcp, rows_cap, top_k, 2] i32,
    place = source rank, pairs (score bits, global id); empty places hold (-inf, 0x80000000).
    Raises ValueError where a row sees more local keys than scores has columns, and where the
    shard counts other ranks than the mailbox.
    """
    check_group(shard, candidates.ranks)
    rows = scores.shape[0]
    pairs = torch.empty((rows, top_k, 2), dtype=torch.int32, device=scores.device)
    pairs[:, :, 0] = score_bits(torch.tensor(-torch.inf)).item()
    pairs[:, :, 1] = EMPTY_ID
    for row, count in enumerate(_checked(local_counts(lengths, rows, shard), scores)):
        ids = shard.global_position(torch.arange(count, device=scores.device))
        bits = score_bits(scores[row, :count])
        chosen = best(bits, ids, top_k, tie)
        pairs[row, : chosen.numel(), 0] = bits[chosen]
        pairs[row, : chosen.numel(), 1] = ids[chosen].to(torch.int32)
    for peer in range(candidates.ranks):
        candidates.store(peer, (candidates.rank, slice(0, rows)), pairs)


def topk_merge(
    candidates: Mailbox,
    lengths: Tensor,
    block_table: Tensor,
    latent_kv: PagedCache,
    selected: Tensor,
    valid: Tensor,
    *,
    top_k: int,
    shard: Shard = UNSHARDED,
    tie: str = "low_id",
) -> None:
    """Global top-k of all ranks' candidates, kept to the keys of this rank, as physical rows.

    A global winner is among its owner's local best, so the result is exact.  candidates as in
    topk_local, polled and re-armed; block_table [requests, pages] i32 over local positions;
    writes all of selected [rows, top_k] i32 (compacted, best first, -1 behind) and valid [rows].
    Raises ValueError where the shard counts other ranks than the mailbox.
    """
    check_group(shard, candidates.ranks)
    rows = selected.shape[0]
    received = _consumed(candidates, rows)
    requests = requests_of(lengths, rows).tolist()
    for row in range(rows):
        bits, ids = received[:, row].reshape(-1, 2).unbind(1)
        present = ids != EMPTY_ID
        bits, ids = bits[present], ids[present].to(torch.int64)
        ids = ids[best(bits, ids, top_k, tie)]
        mine = shard.local(ids[shard.owner(ids) == shard.rank])
        _store(row, mine, block_table[requests[row]], latent_kv, selected, valid)


def _consumed(candidates: Mailbox, rows: int) -> Tensor:
    """Copy of every rank's candidates, [dcp, rows, top_k, 2]; the places are re-armed."""
    received = []
    for source in range(candidates.ranks):
        place = (source, slice(0, rows))
        received.append(candidates.poll(place).clone())
        candidates.rearm(place)
    return torch.stack(received)


def _checked(counts: Tensor, scores: Tensor) -> list[int]:
    """The counts as a list; ValueError where one exceeds the columns of scores."""
    if int(counts.max()) > scores.shape[1]:
        raise ValueError(f"a row sees {int(counts.max())} keys, scores has {scores.shape[1]}")
    return counts.tolist()


def _store(
    row: int,
    positions: Tensor,
    table: Tensor,
    latent_kv: PagedCache,
    selected: Tensor,
    valid: Tensor,
) -> None:
    """Writes one row's physical rows, the -1 behind them, and their number."""
    physical = latent_kv.physical_rows(table, positions)
    if physical.numel() and int(physical.max()) > torch.iinfo(torch.int32).max:
        raise ValueError(f"physical row {int(physical.max())} does not fit 32 bits")
    selected[row] = -1
    selected[row, : physical.numel()] = physical.to(torch.int32)
    valid[row] = physical.numel()
