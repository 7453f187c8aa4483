"""Sparse attention over the selected cache rows."""

from __future__ import annotations

from math import log2

import torch
from torch import Tensor

from kpipe.runtime.comm.mailbox import Mailbox
from kpipe.runtime.formats import PagedCache
from kpipe.runtime.sharding import Shard

from .numerics import E4M3
from .rows import UNSHARDED, check_group
from .value import push_partials

_LOG2_E = log2(torch.e)


def sparse_decode(
    latent_kv: PagedCache,
    selected: Tensor,
    valid: Tensor,
    *,
    query: Tensor | None = None,
    q_mail: Mailbox | None = None,
    latent: Tensor | None = None,
    partial: Tensor | None = None,
    partial_lse: Tensor | None = None,
    q_scale: Tensor,
    k_scale: Tensor,
    softmax_scale: float,
    kv_lora: int,
    lse_base: str = "2",
    dcp: bool = False,
) -> None:
    """Softmax attention of each row over its first valid[row] selected physical rows.

    selected [rows, top_k] i32, valid [rows] i32, query [rows, heads, kv_lora + pe] (E4M3 times
    q_scale, or BF16), latent [rows, heads, kv_lora] BF16.  With `dcp` reads all ranks' heads
    from q_mail and writes partial [rows, tp * heads, kv_lora] BF16 and partial_lse FP32, to the
    base that the core is declared with ("2" or "e").
    A row without keys gives exactly 0 and -inf.  No other cache row is read.
    """
    rows = selected.shape[0]
    target = partial if dcp else latent
    # Heads that only pad the query up to a core's tile have no place in the output.
    gathered = (q_mail.local[:rows] if dcp else query)[:, : target.shape[1]]
    scales = q_scale, k_scale, softmax_scale
    out, lse = attend(latent_kv, selected, valid, gathered, *scales, kv_lora)
    target.copy_(out)
    if dcp:
        partial_lse.copy_(lse if lse_base == "2" else lse / _LOG2_E)


def sparse_push(
    latent_kv: PagedCache,
    selected: Tensor,
    valid: Tensor,
    partial_mail: Mailbox,
    lse_mail: Mailbox,
    *,
    query: Tensor | None = None,
    q_mail: Mailbox | None = None,
    latent: Tensor | None = None,
    q_scale: Tensor,
    k_scale: Tensor,
    softmax_scale: float,
    kv_lora: int,
    lse_base: str = "2",
    shard: Shard = UNSHARDED,
    dcp: bool = True,
) -> None:
    """As sparse_decode with `dcp`; each head's row and LSE go to the rank that owns the head.

    partial_mail [dcp, rows_cap, heads, kv_lora] BF16 and lse_mail [dcp, rows_cap, heads] FP32,
    place = source rank.  Raises ValueError without `dcp` (nobody would read what it pushes), and
    where the shard counts other ranks than the mailboxes.
    """
    if not dcp or query is not None or latent is not None:
        raise ValueError("sparse_push runs under context parallelism only")
    check_group(shard, partial_mail.ranks)
    heads = partial_mail.shape[2] * partial_mail.ranks
    gathered = q_mail.local[: selected.shape[0], :heads]
    scales = q_scale, k_scale, softmax_scale
    out, lse = attend(latent_kv, selected, valid, gathered, *scales, kv_lora)
    lse = lse if lse_base == "2" else lse / _LOG2_E
    push_partials(out, lse, valid, partial_mail, lse_mail)


def attend(
    latent_kv: PagedCache,
    selected: Tensor,
    valid: Tensor,
    query: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    softmax_scale: float,
    kv_lora: int,
) -> tuple[Tensor, Tensor]:
    """BF16 rows [rows, heads, kv_lora] and FP32 base-2 LSE [rows, heads]; FP32 inside.

    Each row stands alone: a row of padding may hold NaN anywhere.
    """
    rows, heads = query.shape[:2]
    out = torch.zeros((rows, heads, kv_lora), dtype=torch.bfloat16, device=query.device)
    lse = torch.full((rows, heads), -torch.inf, device=query.device)
    for row, count in enumerate(valid.tolist()):
        if count <= 0:
            continue
        keys = latent_kv.dequantise(selected[row, :count], k_scale)
        values = query[row].float()
        values = values * q_scale if query.dtype == E4M3 else values
        logits = softmax_scale * (values @ keys.t())
        largest = logits.amax(1, keepdim=True)
        weights = torch.exp(logits - largest)
        total = weights.sum(1, keepdim=True)
        out[row] = ((weights @ keys[:, :kv_lora].contiguous()) / total).bfloat16()
        lse[row] = (torch.log2(total) + largest * _LOG2_E).squeeze(1)
    return out, lse
