"""Projections: packed input rows, index query, output projection of this rank's heads."""

from __future__ import annotations

from torch import Tensor

from kpipe.runtime.comm.mailbox import Mailbox
from kpipe.runtime.comm.sanitise import clear_negative_zero

from .numerics import product
from .reduce import owned_columns


def packed_gemm(
    hidden: Tensor,
    projected: Tensor,
    *,
    packed: Tensor,
    gate_columns: tuple[int, int] = (0, 0),
    without_gate: bool = False,
) -> None:
    """projected = BF16(hidden @ packed^T), FP32 accumulation.

    hidden [rows, hidden] BF16, packed [pitch, hidden] BF16, projected [rows, pitch] BF16.
    `without_gate` leaves the columns from `gate_columns[0]` to `gate_columns[1]` as they are.
    """
    first, behind = gate_columns if without_gate else (0, 0)
    for part in (slice(0, first), slice(behind, None)):
        projected[:, part].copy_(product(hidden, packed[part]))


def gate_gemm(
    hidden: Tensor, gate: Tensor, *, packed: Tensor, gate_columns: tuple[int, int]
) -> None:
    """gate = BF16(hidden @ W^T), FP32 accumulation; W: rows `gate_columns` of packed.

    hidden [rows, hidden] BF16, packed [pitch, hidden] BF16, gate [rows, heads * v_dim] BF16.
    """
    gate.copy_(product(hidden, packed[slice(*gate_columns)]))


def index_gemm(q_c: Tensor, index_q: Tensor, *, index_q_b: Tensor) -> None:
    """index_q = BF16(q_c @ index_q_b^T), FP32 accumulation.

    q_c [rows, q_lora] BF16, index_q_b [index_heads * index_dim, q_lora] BF16,
    index_q [rows, index_heads * index_dim] BF16.
    """
    index_q.copy_(product(q_c, index_q_b))


def o_proj(
    gated: Tensor,
    *,
    out: Tensor | None = None,
    o_mail: Mailbox | None = None,
    o_proj: Tensor,
    dcp: bool = False,
    two_shot: bool = False,
) -> None:
    """This rank's partial BF16(gated @ o_proj^T), FP32 accumulation.

    gated [rows, heads * v_dim] BF16, o_proj [hidden, heads * v_dim] BF16.  Without `dcp` the
    partial goes to out [rows, hidden] BF16.  With `dcp` it is published, negative zeros made
    positive, into place `rank` of o_mail [tp, rows_cap, hidden]: whole rows to every rank, or
    with `two_shot` to each rank the columns it owns.  Raises ValueError where a two-shot split
    does not divide the columns.
    """
    partial = product(gated, o_proj).bfloat16()
    if not dcp:
        out.copy_(partial)
        return
    partial = clear_negative_zero(partial)
    place = (o_mail.rank, slice(0, partial.shape[0]))
    for peer in range(o_mail.ranks):
        if two_shot:
            columns = owned_columns(partial.shape[1], peer, o_mail.ranks)
            o_mail.store(peer, (*place, columns), partial[:, columns])
        else:
            o_mail.store(peer, place, partial)
