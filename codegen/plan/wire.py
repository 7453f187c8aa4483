"""What travels between the ranks in one layer: bytes of every mailbox, launches, collectives.

Ranks do the same, so a rank receives as much as it sends.  A word that a rank leaves in its own
mailbox does not travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kpipe.codegen.ops.contract import Kind
from kpipe.codegen.plan.flags import polled_operands, sends
from kpipe.codegen.plan.memory import DTYPE_BYTES
from kpipe.codegen.plan.model import Launch, MailboxPlan, PipelinePlan, StepPlan

# What a library would call the exchange that a mailbox of the contracts stands for.
_COLLECTIVES = {
    "q_mail": "all-gather of the query",
    "candidates": "all-gather of the candidates",
    "partial_mail": "all-to-all of the partial rows",
    "lse_mail": "all-gather of the LSE",
    "o_mail": "all-reduce of the output",
    "o_gather": "all-reduce of the output",
}


@dataclass(frozen=True)
class Post:
    """What one launch sends through one mailbox.

    `writer` and `pollers` are positions among the step's launches; `to_peer` are the bytes of a
    token row that go to one of `peers` peers.  `scattered`: of its last axis a peer gets only what
    it owns.
    """

    mailbox: str
    operand: str
    dtype: str
    writer: int
    pollers: tuple[int, ...]
    to_peer: int
    peers: int
    scattered: bool

    @property
    def sent(self) -> int:
        """Bytes of a token row that a rank sends to all its peers, and that it receives."""
        return self.to_peer * self.peers


@dataclass(frozen=True)
class Alternative:
    """Another way to send something: bytes of a token row, from one rank to all its peers."""

    what: str
    sent: int


@dataclass(frozen=True)
class Count:
    """Launches and streams of a step beside those of the same kernels with a library's collectives
    in place of mailboxes; `waiting` are the launches that only wait, or only sum what has come."""

    launches: int
    streams: int
    waiting: tuple[str, ...]
    collectives: tuple[str, ...]

    @property
    def collective_form(self) -> int:
        """Launches of that other form, a collective counted as one; copies and casts that it needs
        besides are not counted."""
        return self.launches - len(self.waiting) + len(self.collectives)


def ranks_of(pipeline: PipelinePlan) -> int:
    """How many ranks exchange words: those that share a context; 1 where it is not sharded."""
    return int(pipeline.parallel["dcp"] or 1)


def posts(pipeline: PipelinePlan, step: StepPlan) -> tuple[Post, ...]:
    """Everything that a rank sends in one layer of a step, in host order of the senders."""
    boxes = {box.name: box for box in pipeline.mailboxes}
    polled = [_polled(launch) for launch in step.launches]
    ranks = ranks_of(pipeline)
    found = []
    for writer, launch in enumerate(step.launches):
        flags = dict(launch.flags)
        for binding in launch.bindings:
            operand = launch.contract.operand(binding.operand)
            box = boxes.get(binding.target)
            if box is None or operand is None or not sends(operand, launch.contract, flags):
                continue
            scattered = flags.get(operand.scattered, False)
            pollers = tuple(at for at, names in enumerate(polled) if box.name in names)
            found.append(
                Post(
                    box.name,
                    operand.name,
                    box.dtype,
                    writer,
                    pollers,
                    _row_bytes(box, pipeline.rows_cap) // ranks // (ranks if scattered else 1),
                    ranks - 1,
                    scattered,
                )
            )
    return tuple(found)


def _polled(launch: Launch) -> frozenset[str]:
    """Mailboxes on which a launch spins."""
    operands = polled_operands(launch.contract, dict(launch.flags))
    return frozenset(b.target for b in launch.bindings if b.operand in operands)


def _row_bytes(box: MailboxPlan, rows_cap: int) -> int:
    """Bytes of a token row in one rank's copy of one parity."""
    return box.bytes // box.parities // rows_cap


def count(pipeline: PipelinePlan, step: StepPlan) -> Count:
    """Launches and streams of one layer of a step, and what a library's form would need."""
    boxes = {box.name for box in pipeline.mailboxes}
    used = [post.operand for post in posts(pipeline, step)]
    named = (_COLLECTIVES.get(operand, f"exchange of `{operand}`") for operand in used)
    return Count(
        len(step.launches),
        len(step.streams),
        tuple(launch.name for launch in step.launches if _only_waits(launch, boxes)),
        tuple(dict.fromkeys(named)),
    )


def _only_waits(launch: Launch, boxes: set[str]) -> bool:
    """Touches nothing but mailboxes and what the step hands in to be written."""
    return bool(_polled(launch)) and all(
        binding.target in boxes or (binding.kind is Kind.STEP and binding.access.writes)
        for binding in launch.bindings
    )


def alternatives(pipeline: PipelinePlan, sent: Sequence[Post]) -> tuple[Alternative, ...]:
    """Other formats of what is sent, as comparison: computed, no op of the plan sends them so."""
    found: list[Alternative] = []
    ranks = ranks_of(pipeline)
    for post in {post.operand: post for post in sent}.values():
        size = DTYPE_BYTES[post.dtype]
        if post.operand == "q_mail":
            other = {"fp8": "bf16", "bf16": "fp8"}[post.dtype]
            bytes_there = post.sent // size * DTYPE_BYTES[other]
            found.append(Alternative(f"{post.mailbox} as {other}", bytes_there))
        if post.operand == "partial_mail":
            found.append(Alternative(f"{post.mailbox} as fp32", post.sent // size * 4))
            found.append(_other_side_of_w_uv(pipeline, post))
        if post.operand == "o_mail":
            whole = post.sent * ranks if post.scattered else post.sent
            found.append(Alternative("the output one-shot: every partial to every rank", whole))
            what = "the output two-shot, or as a ring all-reduce"
            found.append(Alternative(what, 2 * whole // ranks))
    return tuple(found)


def _other_side_of_w_uv(pipeline: PipelinePlan, post: Post) -> Alternative:
    """Partial rows travel ahead of W_UV, a head as kv_lora elements, or behind it, as v_dim."""
    latent, values = pipeline.dims["kv_lora"], pipeline.dims["v_dim"]
    width = next(box.shape[-1] for box in pipeline.mailboxes if box.name == post.mailbox)
    if width == latent:
        what = f"{post.mailbox} by dcp_value_projected: behind W_UV of all heads, {post.dtype}"
        return Alternative(what, post.sent // latent * values)
    what = f"{post.mailbox} by dcp_value: ahead of W_UV of own heads, {post.dtype}"
    return Alternative(what, post.sent // values * latent)
