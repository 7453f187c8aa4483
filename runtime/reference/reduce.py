"""Sum of the ranks' output projections through mailboxes."""

from __future__ import annotations

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
    two_shot: bool = False,
    add_prefix: bool = False,
) -> None:
    """out = BF16(sum of the ranks' partials in rank order, FP32), the same bits on every rank.

    o_mail [tp, rows_cap, hidden] BF16 holds the partial of rank s in place s and is re-armed;
    out [rows, hidden] BF16.  With `two_shot` this rank sums the columns it owns, publishes them
    into o_gather [rows_cap, hidden] of every rank, then consumes its own gathered rows.  With
    `add_prefix` out is BF16(prefix + that sum), prefix [rows, hidden] BF16.
    """
    reduced = _exchanged(o_mail, o_gather, out.shape) if two_shot else _whole(o_mail, out.shape)
    out.copy_(prefix.float() + reduced.float() if add_prefix else reduced)


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
