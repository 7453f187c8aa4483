"""Protocols to explore: the shipped modes, a layer without all-reduce, and changes to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from spec_project import plan_edited

from kpipe.codegen.plan.model import PipelinePlan
from kpipe.codegen.proof.mailbox.protocol import Act, Box, Op, Protocol, Use, protocol_of

MODES = ("serial", "fork", "front", "wait")
ROWS = {"one_shot": 32, "two_shot": 64}
_TABLE = 'sm_90a:  {q1: {"1-4": wait, "5-64": fork}, q4: {"4-64": fork}}'


@cache
def planned(mode: str) -> PipelinePlan:
    """dsa_dcp with one mode for all rows of sm_90a."""
    with TemporaryDirectory() as folder:
        table = f'sm_90a:  {{q1: {{"1-64": {mode}}}, q4: {{"4-64": {mode}}}}}'
        return plan_edited(Path(folder), "dsa_dcp", (_TABLE, table))


@cache
def shipped(mode: str, reduce: str = "one_shot") -> Protocol:
    """The protocol of a shipped mode."""
    pipeline = planned(mode)
    plan = next(
        plan
        for plan in pipeline.plans
        if (plan.arch, plan.q, plan.rows, plan.mode) == ("sm_90a", 1, ROWS[reduce], mode)
    )
    return protocol_of(plan, pipeline)


def chain(*acts: tuple[Act, str]) -> tuple[Use, ...]:
    """Uses one after the other."""
    return tuple(
        Use(act, box, after=(place - 1,) if place else ()) for place, (act, box) in enumerate(acts)
    )


def dense(q_parities: int = 2, partial_parities: int = 2) -> Protocol:
    """Dense attention over sharded contexts without an all-reduce behind it.

    The heads are gathered, the core reads them, the value op re-arms them and exchanges partials.
    """
    value = (
        Use(Act.REARM, "q_mail"),
        Use(Act.PUBLISH, "partial_mail"),
        Use(Act.POLL, "partial_mail", after=(1,)),
        Use(Act.REARM, "partial_mail", after=(2,)),
    )
    return Protocol(
        (Box("q_mail", q_parities), Box("partial_mail", partial_parities)),
        (
            Op("mla_query", "main", chain((Act.PUBLISH, "q_mail"), (Act.POLL, "q_mail"))),
            Op("core", "main", (Use(Act.READ, "q_mail"),)),
            Op("dcp_value", "main", value),
        ),
    )


def one_box(parities: int) -> Protocol:
    """A single gather in each layer."""
    acts = chain((Act.PUBLISH, "m"), (Act.POLL, "m"), (Act.REARM, "m"))
    return Protocol((Box("m", parities),), (Op("gather", "main", acts),))


def without(protocol: Protocol, *names: str) -> Protocol:
    """The protocol without some ops, and without the mailboxes that nobody then uses."""
    return _rebuilt(protocol, lambda op: None if op.name in names else op)


def without_rearm(protocol: Protocol, box: str) -> Protocol:
    """Nobody re-arms the mailbox."""
    return _rebuilt(protocol, lambda op: _drop(op, Act.REARM, box))


def rearm_moved(protocol: Protocol, box: str, to: str) -> Protocol:
    """Another op re-arms the mailbox."""

    def change(op: Op) -> Op:
        op = _drop(op, Act.REARM, box) or replace(op, uses=())
        return replace(op, uses=(*op.uses, Use(Act.REARM, box))) if op.name == to else op

    return _rebuilt(protocol, change)


def _drop(op: Op, act: Act, box: str) -> Op | None:
    """The op without a use; the uses behind it move up."""
    kept = [place for place, use in enumerate(op.uses) if (use.act, use.box) != (act, box)]
    numbers = {old: new for new, old in enumerate(kept)}
    uses = tuple(
        replace(
            op.uses[place], after=tuple(numbers[a] for a in op.uses[place].after if a in numbers)
        )
        for place in kept
    )
    return replace(op, uses=uses) if uses else None


def _rebuilt(protocol: Protocol, change: Callable[[Op], Op | None]) -> Protocol:
    items = [change(item) if isinstance(item, Op) else item for item in protocol.items]
    kept = tuple(item for item in items if item is not None)
    used = {use.box for item in kept if isinstance(item, Op) for use in item.uses}
    return Protocol(tuple(box for box in protocol.boxes if box.name in used), kept)
