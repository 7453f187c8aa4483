"""Faults in a mailbox protocol, put from outside into layers that are prepared.

Kernels stay as they are.  A parity too few: the group gives every layer the same copy of a
mailbox.  A re-arm left out: behind the launch that re-arms, words come back that are not the
sentinel.  A re-arm that is late: the words come back, and are re-armed once the others have had
their time.  An op left out: nothing is launched in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.comm.mailbox import MailboxSpec
from kpipe.runtime.late import HoldUp, replace_op
from kpipe.runtime.prepared import Prepared, RankRun

LATE_CYCLES = 200_000_000
"""About 0.1 s of an H200: longer than a host takes to launch a few layers, and far below the two
seconds that a poll waits."""


@dataclass(frozen=True)
class Unarmed:
    """A mailbox that `op` does not re-arm.

    With `saved` the words that `op` finds come back behind it.  Without, words that say nothing:
    `op` polls the mailbox itself, so from outside nobody sees them between poll and re-arm.
    """

    box: str
    op: str
    saved: bool


@dataclass(frozen=True)
class Late:
    """Who is late: `rank` in `layer`, ahead of `op`; with `box` the re-arm of that mailbox by `op`
    is, which otherwise lands in time."""

    rank: int
    layer: int
    op: str
    box: str = ""


@dataclass(frozen=True)
class Fault:
    """What is wrong with the protocol; nothing by default.

    `parities` are copies of mailboxes; `left_out` ops are not launched; `given` ops are not
    either, the step's output is that of the right run: a collective of somebody else stands in.
    """

    parities: Mapping[str, int] = field(default_factory=dict)
    unarmed: tuple[Unarmed, ...] = ()
    left_out: tuple[str, ...] = ()
    given: tuple[str, ...] = ()


def fewer_parities(comm: Any, parities: Mapping[str, int]) -> None:
    """The comm gives fewer copies of the named mailboxes than their declarations say."""
    inner = comm.mailbox

    def mailbox(spec: MailboxSpec, parity: int) -> Any:
        return inner(spec, parity % parities.get(spec.name, spec.parities))

    comm.mailbox = mailbox


def install(
    ready: Sequence[Sequence[Prepared]],
    right: Sequence[Sequence[RankRun]],
    fault: Fault,
    late: Late,
    hold_up: HoldUp,
) -> None:
    """Put a fault and a delay into prepared layers [rank][layer]; `right` is the run without."""
    for rank, of_rank in enumerate(ready):
        for number, one in enumerate(of_rank):
            for name in fault.left_out:
                replace_op(one.layer, name, lambda inner: _nothing)
            for name in fault.given:
                replace_op(one.layer, name, _giving(one, right[rank][number].out))
            for unarmed in fault.unarmed:
                replace_op(one.layer, unarmed.op, _not_rearming(one, unarmed))
    one = ready[late.rank][late.layer]

    def hold() -> None:
        hold_up(late.rank, LATE_CYCLES)

    around = _rearming_late(one, late.box, hold) if late.box else _ahead(hold)
    replace_op(one.layer, late.op, around)


Around = Callable[[Callable[..., None]], Callable[..., None]]


def _nothing(*operands: Any, **named: Any) -> None:
    pass


def _giving(one: Prepared, out: Tensor) -> Around:
    kept = out.to(one.step.out.device)

    def around(inner: Callable[..., None]) -> Callable[..., None]:
        def call(*operands: Any, **named: Any) -> None:
            one.step.out.copy_(kept)

        return call

    return around


def _ahead(hold: Callable[[], None]) -> Around:
    def around(inner: Callable[..., None]) -> Callable[..., None]:
        def call(*operands: Any, **named: Any) -> None:
            hold()
            inner(*operands, **named)

        return call

    return around


def _not_rearming(one: Prepared, unarmed: Unarmed) -> Around:
    words, spec = _words(one, unarmed.box)
    kept = torch.full_like(words, spec.silent_word)

    def around(inner: Callable[..., None]) -> Callable[..., None]:
        def call(*operands: Any, **named: Any) -> None:
            if unarmed.saved:
                kept.copy_(words)
            inner(*operands, **named)
            words.copy_(kept)

        return call

    return around


def _rearming_late(one: Prepared, box: str, hold: Callable[[], None]) -> Around:
    words, spec = _words(one, box)
    kept = torch.empty_like(words)  # had now: while a poll waits there may be no memory to be had

    def around(inner: Callable[..., None]) -> Callable[..., None]:
        def call(*operands: Any, **named: Any) -> None:
            kept.copy_(words)
            inner(*operands, **named)
            words.copy_(kept)
            hold()
            words.fill_(spec.signed_sentinel)

        return call

    return around


def _words(one: Prepared, box: str) -> tuple[Tensor, MailboxSpec]:
    """The int32 words of a layer's own copy of a mailbox."""
    mailbox = one.layer._mailboxes[box]
    return mailbox.local.view(torch.int32), mailbox.spec
