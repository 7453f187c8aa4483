"""Sum of the ranks' output projections through mailboxes."""

from __future__ import annotations

import torch
from torch import Tensor

from kpipe.runtime.comm.mailbox import Mailbox
from kpipe.runtime.comm.sanitise import clear_negative_zero


def owned_columns(hidden: int, rank: int, ranks: int) -> slice:
    """Columns that `rank` sums in a two-shot reduction; ValueError where they do not divide."""
    if hidden % ranks:
        raise ValueError(f"two-shot reduction: {hidden} columns do not divide by {ranks} ranks")
    width = hidden // ranks
    return slice(rank * width, (rank + 1) * width)


def o_reduce(
    o_mail: Mailbox,
    out: Tensor,
    *,
    o_gather: Mailbox | None = None,
    prefix: Tensor | None = None,
    saved: Tensor | None = None,
    mix_norm: Tensor | None = None,
    mix_query: Tensor | None = None,
    out_norm: Tensor | None = None,
    new_prefix: Tensor | None = None,
    two_shot: bool = False,
    add_prefix: bool = False,
    mix_blocks: bool = False,
    rms_eps: float = 0.0,
    round_mix: str = "fp32",
) -> None:
    """out = BF16(sum of the ranks' partials in rank order, FP32), the same bits on every rank.

    o_mail [tp, rows_cap, hidden] BF16 holds the partial of rank s in place s and is re-armed;
    out [rows, hidden] BF16.  With `two_shot` this rank sums the columns it owns, publishes them
    into o_gather [rows_cap, hidden] of every rank, then consumes its own gathered rows.  With
    `add_prefix` the stream is BF16(prefix + that sum), prefix [rows, hidden] BF16, else the sum.
    With `mix_blocks` the stream goes to new_prefix and out is what `attn_res` makes of it, of saved
    [blocks, rows, hidden] and of the weights [hidden], all BF16; else the stream is out.
    """
    stream = _exchanged(o_mail, o_gather, out.shape) if two_shot else _whole(o_mail, out.shape)
    if add_prefix:
        stream = (prefix.float() + stream.float()).bfloat16()
    if not mix_blocks:
        out.copy_(stream)
        return
    new_prefix.copy_(stream)
    query = mix_norm.float() * mix_query.float()
    out.copy_(attn_res(saved, stream, query, out_norm, rms_eps, round_mix))


def attn_res(
    saved: Tensor, stream: Tensor, query: Tensor, out_norm: Tensor, eps: float, round_mix: str
) -> Tensor:
    """The normed softmax mixture of saved [blocks, rows, hidden] and stream [rows, hidden].

    logit_i = (v_i . query) / rms(v_i) over the saved blocks, then the stream; FP32 [rows, hidden].
    `round_mix` is bf16 where the mixture is rounded ahead of its norm, else fp32.  Raises
    ValueError for another word.
    """
    if round_mix not in ("bf16", "fp32"):
        raise ValueError(f"round_mix is {round_mix!r}; choose bf16 or fp32")
    vectors = torch.cat([saved, stream[None]]).float()
    scale = (vectors.square().mean(-1) + eps).rsqrt()
    share = ((vectors @ query) * scale).softmax(0)
    mix = (share[..., None] * vectors).sum(0)
    if round_mix == "bf16":
        mix = mix.bfloat16().float()
    return mix * (mix.square().mean(-1, keepdim=True) + eps).rsqrt() * out_norm.float()


def _whole(o_mail: Mailbox, shape: tuple[int, int]) -> Tensor:
    """The sums of all columns, by this rank alone."""
    return _summed(o_mail, slice(0, shape[0]), slice(0, shape[1]))


def _exchanged(o_mail: Mailbox, o_gather: Mailbox, shape: tuple[int, int]) -> Tensor:
    """The sums of all columns, each by the rank that owns it."""
    rows, columns = slice(0, shape[0]), owned_columns(shape[1], o_mail.rank, o_mail.ranks)
    owned = clear_negative_zero(_summed(o_mail, rows, columns))
    for peer in range(o_gather.ranks):
        o_gather.store(peer, (rows, columns), owned)
    gathered = o_gather.poll((rows,)).clone()
    o_gather.rearm((rows,))
    return gathered


def _summed(o_mail: Mailbox, rows: slice, columns: slice) -> Tensor:
    """BF16 sum in rank order over the places of o_mail; re-arms what it has read."""
    total = None
    for source in range(o_mail.ranks):
        place = (source, rows, columns)
        partial = o_mail.poll(place).float()
        total = partial if total is None else total + partial
        o_mail.rearm(place)
    return total.bfloat16()
