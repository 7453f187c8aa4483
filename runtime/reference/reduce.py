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
    o_mail: Mailbox, out: Tensor, *, o_gather: Mailbox | None = None, two_shot: bool = False
) -> None:
    """out = BF16(sum of the ranks' partials in rank order, FP32), the same bits on every rank.

    o_mail [tp, rows_cap, hidden] BF16 holds the partial of rank s in place s and is re-armed;
    out [rows, hidden] BF16.  With `two_shot` this rank sums the columns it owns, publishes them
    into o_gather [rows_cap, hidden] of every rank, then consumes its own gathered rows.
    """
    rows = slice(0, out.shape[0])
    if not two_shot:
        out.copy_(_summed(o_mail, rows, slice(0, out.shape[1])))
        return
    columns = owned_columns(out.shape[1], o_mail.rank, o_mail.ranks)
    owned = clear_negative_zero(_summed(o_mail, rows, columns))
    for peer in range(o_gather.ranks):
        o_gather.store(peer, (rows, columns), owned)
    out.copy_(o_gather.poll((rows,)))
    o_gather.rearm((rows,))


def _summed(o_mail: Mailbox, rows: slice, columns: slice) -> Tensor:
    """BF16 sum in rank order over the places of o_mail; re-arms what it has read."""
    total = None
    for source in range(o_mail.ranks):
        place = (source, rows, columns)
        partial = o_mail.poll(place).float()
        total = partial if total is None else total + partial
        o_mail.rearm(place)
    return total.bfloat16()
