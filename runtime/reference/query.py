"""Query stage: q_a norm, attention query of this rank's heads, latent insert, head gather."""

from __future__ import annotations

import torch
from torch import Tensor

from kpipe.runtime.comm.mailbox import Mailbox
from kpipe.runtime.comm.sanitise import canonicalise_nan
from kpipe.runtime.formats import GROUP, PagedCache

from .numerics import (
    E4M3,
    Rounds,
    head_product,
    quantise_groups,
    rms_norm,
    rounded,
    to_e4m3,
)

_QUERY_DTYPES = {"fp8_tensor": E4M3, "fp8_ds_mla": torch.bfloat16}


def query_norm(q_a: Tensor, q_c: Tensor, *, q_norm: Tensor, rms_eps: float) -> None:
    """q_c = BF16((q_a * rsqrt(mean(q_a^2) + eps)) * q_norm), FP32 inside; both [rows, q_lora]."""
    q_c.copy_(rms_norm(q_a, q_norm, rms_eps))


def mla_query(
    q_a: Tensor,
    kv_a: Tensor,
    slots: Tensor,
    latent_kv: PagedCache,
    *,
    query: Tensor | None = None,
    q_mail: Mailbox | None = None,
    q_c: Tensor | None = None,
    q_norm: Tensor,
    kv_norm: Tensor,
    q_b: Tensor,
    w_uk: Tensor,
    q_scale_inv: Tensor,
    k_scale_inv: Tensor,
    rms_eps: float,
    nope: int,
    pe: int,
    rounds: Rounds = Rounds(),  # noqa: B008 - frozen
    dcp: bool = False,
    polls: bool = False,
    writes_q_c: bool = False,
) -> None:
    """query_norm, then mla_query_split: the same bits as those two after one another.

    q_a [rows, q_lora] BF16; q_c [rows, q_lora] BF16 is written only with `writes_q_c`.  With
    `polls` (under `dcp`) it ends when every rank's heads have arrived in this rank's q_mail.
    The other operands are those of mla_query_split.
    """
    normed = rms_norm(q_a, q_norm, rms_eps).bfloat16()
    if writes_q_c:
        q_c.copy_(normed)
    constants = {"rms_eps": rms_eps, "nope": nope, "pe": pe, "rounds": rounds}
    mla_query_split(
        normed,
        kv_a,
        slots,
        latent_kv,
        query=query,
        q_mail=q_mail,
        kv_norm=kv_norm,
        q_b=q_b,
        w_uk=w_uk,
        q_scale_inv=q_scale_inv,
        k_scale_inv=k_scale_inv,
        dcp=dcp,
        **constants,
    )
    if dcp and polls:
        q_mail.poll((slice(0, q_a.shape[0]), slice(0, q_mail.ranks * w_uk.shape[0])))


def mla_query_split(
    q_c: Tensor,
    kv_a: Tensor,
    slots: Tensor,
    latent_kv: PagedCache,
    *,
    query: Tensor | None = None,
    q_mail: Mailbox | None = None,
    kv_norm: Tensor,
    q_b: Tensor,
    w_uk: Tensor,
    q_scale_inv: Tensor,
    k_scale_inv: Tensor,
    rms_eps: float,
    nope: int,
    pe: int,
    rounds: Rounds = Rounds(),  # noqa: B008 - frozen
    dcp: bool = False,
) -> None:
    """Attention query of this rank's heads, and the insert of the new latents.

    q_c [rows, q_lora] BF16, kv_a [rows, kv_lora + pe] BF16, slots [rows] i64 (negative: skip),
    q_b [heads * (nope + pe), q_lora], w_uk [heads, nope, kv_lora], scales FP32 [1].  Query row:
    Q_B in FP32, rounded; nope part times W_UK, rounded; followed by the pe part.  An fp8_tensor
    cache takes them times q_scale_inv as E4M3, an fp8_ds_mla cache as BF16.  Goes to
    query [rows, heads, kv_lora + pe], or with `dcp` into this rank's heads of every rank's
    q_mail [rows_cap, tp * heads, kv_lora + pe].  Raises ValueError where that memory does not
    have the dtype that the cache format asks for.
    """
    rows, heads = q_c.shape[0], w_uk.shape[0]
    insert_latent(latent_kv, slots, kv_a, kv_norm, k_scale_inv, rms_eps, rounds)
    value = _attention_query(q_c, q_b, w_uk, nope, pe, rounds)
    dtype = _QUERY_DTYPES[latent_kv.format.name]
    target = q_mail if dcp else query
    if target.dtype != dtype:
        raise ValueError(
            f"the query is {target.dtype}, a {latent_kv.format.name} cache needs {dtype}"
        )
    value = to_e4m3(value * q_scale_inv) if dtype == E4M3 else value.bfloat16()
    if not dcp:
        query.copy_(value)
        return
    mine = slice(q_mail.rank * heads, (q_mail.rank + 1) * heads)
    value = canonicalise_nan(value)
    for peer in range(q_mail.ranks):
        q_mail.store(peer, (slice(0, rows), mine), value)


def query_wait(q_mail: Mailbox, *, rows: int | None = None) -> None:
    """Returns when every rank's heads of the first `rows` rows have arrived (default: all rows).

    q_mail [rows_cap, tp * heads, latent]; the words stay where they are.
    """
    q_mail.poll((slice(0, q_mail.shape[0] if rows is None else rows),))


def insert_latent(
    latent_kv: PagedCache,
    slots: Tensor,
    kv_a: Tensor,
    kv_norm: Tensor,
    k_scale_inv: Tensor,
    rms_eps: float,
    rounds: Rounds = Rounds(),  # noqa: B008 - frozen
) -> None:
    """Inserts RMSNorm(latent) | pe of kv_a [rows, kv_lora + pe] BF16 at the slots >= 0.

    fp8_tensor: both times k_scale_inv, E4M3.  fp8_ds_mla: latent E4M3 with a scale per 128
    values, pe BF16 as it is, k_scale_inv unused.
    """
    kv_lora = kv_norm.numel()
    latent = rounded(rms_norm(kv_a[:, :kv_lora], kv_norm, rms_eps), rounds.kv_norm)
    pe = kv_a[:, kv_lora:].bfloat16()
    if latent_kv.format.name == "fp8_tensor":
        fields = {"latent": to_e4m3(latent * k_scale_inv), "pe": to_e4m3(pe.float() * k_scale_inv)}
    else:
        values, scale = quantise_groups(latent, GROUP)
        fields = {"latent": values, "scale": scale, "pe": pe}
    latent_kv.insert(slots, **fields)


def _attention_query(
    q_c: Tensor, q_b: Tensor, w_uk: Tensor, nope: int, pe: int, rounds: Rounds
) -> Tensor:
    """FP32 [rows, heads, kv_lora + pe] ahead of the scale: absorbed latent, then BF16 pe."""
    heads = w_uk.shape[0]
    weight = q_b.reshape(heads, nope + pe, q_b.shape[1])
    full = head_product(q_c.unsqueeze(1).expand(-1, heads, -1), weight)
    full = rounded(full, rounds.query_b)
    absorbed = head_product(full[:, :, :nope], w_uk.transpose(1, 2))
    return torch.cat([rounded(absorbed, rounds.absorb), rounded(full[:, :, nope:])], dim=2)
