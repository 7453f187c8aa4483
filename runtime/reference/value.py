"""Value stage: merge of the ranks' rows, W_UV, output gate."""

from __future__ import annotations

from math import log2

import torch
from torch import Tensor

from kpipe.runtime.comm.mailbox import Mailbox
from kpipe.runtime.comm.sanitise import EMPTY_LSE, clear_negative_zero, sanitise_lse
from kpipe.runtime.sharding import Shard

from .numerics import Rounds, head_product, rounded, sigmoid
from .rows import UNSHARDED, check_group, select_active

_LSE_SCALES = {"2": 1.0, "e": log2(torch.e)}


def mla_value(
    latent: Tensor,
    gate: Tensor,
    lengths: Tensor,
    gated: Tensor,
    *,
    w_uv: Tensor,
    rounds: Rounds = Rounds(),  # noqa: B008 - frozen
    sigmoid: str = "exact",
) -> None:
    """gated = BF16(v * sigmoid(gate)) with v = W_UV . latent per head, rounded.

    latent [rows, heads, kv_lora] BF16, gate and gated [rows, heads * v_dim] BF16, lengths
    [requests] i32, w_uv [heads, v_dim, kv_lora] BF16.  Rows without keys become exactly 0,
    whatever latent and gate hold.
    """
    values = rounded(head_product(latent, w_uv), rounds.value)
    _gate(values, gate, lengths, gated, sigmoid)


def value_bmm(latent: Tensor, values: Tensor, *, w_uv: Tensor) -> None:
    """values = BF16(W_UV . latent), head first: [heads, rows, v_dim] BF16; FP32 accumulation."""
    values.copy_(head_product(latent, w_uv).transpose(0, 1))


def mla_gate(
    values: Tensor, gate: Tensor, lengths: Tensor, gated: Tensor, *, sigmoid: str = "exact"
) -> None:
    """gated = BF16(v * sigmoid(gate)), rows without keys exactly 0; operands as in mla_value.

    values [heads, rows, v_dim] BF16: behind value_bmm this gives the bits of mla_value.
    """
    _gate(values.transpose(0, 1).float(), gate, lengths, gated, sigmoid)


def dcp_value(
    valid: Tensor,
    gate: Tensor,
    lengths: Tensor,
    q_mail: Mailbox,
    partial_mail: Mailbox,
    lse_mail: Mailbox,
    gated: Tensor,
    *,
    partial: Tensor | None = None,
    partial_lse: Tensor | None = None,
    w_uv: Tensor,
    shard: Shard = UNSHARDED,
    lse_base: str = "2",
    rounds: Rounds = Rounds(),  # noqa: B008 - frozen
    sigmoid: str = "exact",
    pushes: bool = False,
) -> None:
    """Exchange and merge of the ranks' rows, then mla_value on the merged rows of own heads.

    Re-arms q_mail [rows_cap, tp * heads, latent]; with `pushes` sends partial [rows, tp * heads,
    kv_lora] BF16 and partial_lse [rows, tp * heads] FP32 (`lse_base`) to the heads' owners;
    consumes partial_mail [dcp, rows_cap, heads, kv_lora] and lse_mail [dcp, rows_cap, heads].
    valid [rows] i32 is the number of local keys of a row.  Rows that see no key on any rank
    become exactly 0.  Raises ValueError where the shard counts other ranks than the mailboxes.
    """
    check_group(shard, partial_mail.ranks)
    rows, heads = gate.shape[0], w_uv.shape[0]
    q_mail.rearm((slice(0, rows), slice(0, q_mail.ranks * heads)))
    if pushes:
        push_partials(partial, partial_lse, valid, partial_mail, lse_mail)
    merged = _collected(partial_mail, lse_mail, rows, lse_base)
    values = rounded(head_product(rounded(merged, rounds.merged), w_uv), rounds.value)
    _gate(values, gate, lengths, gated, sigmoid)


def dcp_value_projected(
    partial: Tensor,
    partial_lse: Tensor,
    valid: Tensor,
    gate: Tensor,
    lengths: Tensor,
    q_mail: Mailbox,
    partial_mail: Mailbox,
    lse_mail: Mailbox,
    gated: Tensor,
    *,
    w_uv_all: Tensor,
    shard: Shard = UNSHARDED,
    lse_base: str = "2",
    rounds: Rounds = Rounds(),  # noqa: B008 - frozen
    sigmoid: str = "exact",
) -> None:
    """As dcp_value with `pushes`, with W_UV of every rank's heads ahead of the push.

    w_uv_all [tp * heads, v_dim, kv_lora] BF16; partial_mail is [dcp, rows_cap, heads, v_dim] BF16.
    A rank's values are rounded on their way (`value`), what they are merged to at `merged`.
    Raises ValueError where the shard counts other ranks than the mailboxes, or where a value is
    declared to stay in FP32.
    """
    check_group(shard, partial_mail.ranks)
    if rounds.value != "bf16":
        raise ValueError(f"rounds.value is {rounds.value!r}; rows of values travel as bf16")
    rows, heads = gate.shape[0], partial_mail.shape[2]
    q_mail.rearm((slice(0, rows), slice(0, q_mail.ranks * heads)))
    values = head_product(partial, w_uv_all).bfloat16()
    push_partials(values, partial_lse, valid, partial_mail, lse_mail)
    merged = _collected(partial_mail, lse_mail, rows, lse_base)
    _gate(rounded(merged, rounds.merged), gate, lengths, gated, sigmoid)


def push_partials(
    partial: Tensor, lse: Tensor, valid: Tensor, partial_mail: Mailbox, lse_mail: Mailbox
) -> None:
    """Sends rows [rows, tp * heads, n] BF16 and LSE [rows, tp * heads] to the heads' owners.

    A row without local keys is sent as 0 with EMPTY_LSE, whatever its memory holds.
    """
    rows, heads = partial.shape[0], partial_mail.shape[2]
    filled = (valid > 0).reshape(-1, 1)
    partial = clear_negative_zero(
        torch.where(filled.unsqueeze(2), partial, torch.zeros_like(partial))
    )
    lse = sanitise_lse(torch.where(filled, lse, EMPTY_LSE))
    place = (partial_mail.rank, slice(0, rows))
    for owner in range(partial_mail.ranks):
        owned = slice(owner * heads, (owner + 1) * heads)
        partial_mail.store(owner, place, partial[:, owned])
        lse_mail.store(owner, place, lse[:, owned])


def merge_ranks(partial: Tensor, lse: Tensor, lse_base: str = "2") -> tuple[Tensor, Tensor]:
    """FP32 rows [rows, heads, n] and merged LSE [rows, heads] in the same base.

    partial [ranks, rows, heads, n] are normalised rows, lse [ranks, rows, heads] their log sums
    of exponentials to `lse_base` ("2" or "e").  Ranks at or below EMPTY_LSE, infinite or NaN
    weigh nothing and their rows are not read; without any weight the row is 0 with LSE -inf.
    Sums in rank order.  Raises ValueError for an unknown base.
    """
    if lse_base not in _LSE_SCALES:
        raise ValueError(f"lse_base is {lse_base!r}; known are 2, e")
    counts = torch.isfinite(lse) & (lse > EMPTY_LSE)
    powers = torch.where(counts, lse, -torch.inf) * _LSE_SCALES[lse_base]
    largest = torch.where(counts.any(0), powers.amax(0), 0.0)
    # float64: vectorised and scalar float32 exponentials may differ in the last bit.
    weights = torch.exp2((powers - largest).double()).float()
    total, merged = torch.zeros_like(largest), torch.zeros_like(partial[0], dtype=torch.float32)
    for source in range(weights.shape[0]):
        total = total + weights[source]
    for source in range(weights.shape[0]):
        share = torch.where(total > 0, weights[source] / total, 0.0).unsqueeze(-1)
        merged = merged + torch.where(share > 0, share * partial[source].float(), 0.0)
    base2 = largest.double() + torch.log2(total.double())
    return merged, (base2 / _LSE_SCALES[lse_base]).float()


def _gate(values: Tensor, gate: Tensor, lengths: Tensor, gated: Tensor, mode: str) -> None:
    """Writes BF16(values * sigmoid(gate)), zero for inactive rows; values [rows, heads, v_dim]."""
    product = values.flatten(1) * sigmoid(gate.float(), mode)
    gated.copy_(select_active(product.bfloat16(), lengths))


def _collected(partial_mail: Mailbox, lse_mail: Mailbox, rows: int, lse_base: str) -> Tensor:
    """The ranks' rows merged, FP32 [rows, heads, n]; both mailboxes are re-armed."""
    weights = torch.stack([_consumed(lse_mail, source, rows) for source in range(lse_mail.ranks)])
    parts = [_consumed(partial_mail, source, rows) for source in range(partial_mail.ranks)]
    return merge_ranks(torch.stack(parts), weights, lse_base)[0]


def _consumed(mail: Mailbox, source: int, rows: int) -> Tensor:
    """Copy of what `source` has sent for the first `rows` rows; the place is re-armed."""
    place = (source, slice(0, rows))
    received = mail.poll(place).clone()
    mail.rearm(place)
    return received
