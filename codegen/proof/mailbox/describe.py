"""An error of the search in words."""

from __future__ import annotations

from dataclasses import dataclass

from kpipe.codegen.proof.mailbox.protocol import Act, Protocol
from kpipe.codegen.proof.mailbox.search import Found, Words
from kpipe.codegen.proof.mailbox.unrolled import Bounds, Step, Unrolled
from kpipe.codegen.proof.mailbox.verdict import Event, Kind, Verdict

_STEP_TEXTS: dict[str, str] = {
    "lost": "rank {rank}: `{op}` publishes `{box}` of {when} into rank {peer} a second time",
    "reused": "rank {rank}: `{op}` publishes `{box}` of {when} into rank {peer} over the word of "
    "{held}, which rank {peer} has not re-armed yet",
    "never_rearmed": "rank {rank}: `{op}` publishes `{box}` of {when} into rank {peer} over the "
    "word of {held}; no op re-arms `{box}`",
    "stale": "rank {rank}: `{op}` of {when} takes the word of {held} in `{box}` for its own",
    "unarrived": "rank {rank}: `{op}` of {when} reads `{box}` before every word has arrived, and "
    "nothing ahead of it polls them",
    "torn": "rank {rank}: `{box}` changes while `{op}` of {when} reads it",
    "rearm": "rank {rank}: `{op}` of {when} re-arms a word of {held} in `{box}`, which nobody has "
    "read",
    "init": "rank {rank}: the first fill erases words that its peers have already published",
}
_READ_AFTER_REARM = (
    "rank {rank}: `{op}` of {when} reads `{box}` after a word of it has been re-armed"
)


@dataclass(frozen=True)
class _Wait:
    """A rank's next step that cannot be made."""

    step: Step
    came: bool  # the word had been published

    def text(self, bounds: Bounds) -> str:
        step = self.step
        return (
            f"rank {step.rank} waits in `{step.op}` of {_when(step.copy, bounds)} for `{step.box}` "
            f"from rank {step.peer}"
        )


def describe(
    protocol: Protocol, bounds: Bounds, program: Unrolled, found: Found, states: int
) -> Verdict:
    """The verdict for a search that has found an error or met its limit."""
    if found.kind == "undecided":
        text = f"not decided within {states} states of {bounds.ranks} ranks"
        return Verdict(False, states, None, text, "undecided")
    events = _events(bounds, program, found)
    if found.stuck:
        return _stuck(bounds, program, found, events, states)
    last = found.moves[-1].step
    box, kind = last.box, found.kind
    if kind == "init":
        box = next(program.words[w].box for w in last.words if _value(program, found, w))
    elif kind == "lost" and _value(program, found, last.words[0]) != last.copy + 1:
        kind = "reused" if Act.REARM in protocol.acts(box) else "never_rearmed"
    text = _STEP_TEXTS[kind]
    if kind == "rearm" and last.act != "rearm":
        text = _READ_AFTER_REARM
    what = text.format(
        rank=last.rank,
        op=last.op,
        box=box,
        when=_when(last.copy, bounds),
        peer=last.peer,
        held=events[-1].held,
    )
    return Verdict(False, states, events, what, kind, box, last.op)


def _stuck(
    bounds: Bounds, program: Unrolled, found: Found, events: tuple[Event, ...], states: int
) -> Verdict:
    if found.kind == "never_rearmed":
        left = [w for i, w in enumerate(program.words) if _value(program, found, i)]
        box = left[0].box
        what = f"`{box}` still holds {len(left)} words after the last layer: not all are re-armed"
        return Verdict(False, states, events, what, found.kind, box)
    waits = _waits(program, found)
    kind: Kind = found.kind
    first = waits[0].step
    if kind == "sentinel":
        forged = next(event for event in events if event.forged)
        what = (
            f"rank {forged.rank}: the payload of `{forged.op}` in `{forged.box}` equals the "
            f"sentinel, so rank {forged.peer} waits for ever"
        )
        return Verdict(False, states, events, what, kind, forged.box, forged.op)
    firsts = {wait.step.rank: wait for wait in reversed(waits)}
    what = f"no rank can go on: {'; '.join(firsts[rank].text(bounds) for rank in sorted(firsts))}"
    if kind == "rearm":
        erased = next(wait for wait in waits if wait.came)
        first = erased.step
        what = f"a word is re-armed before it is polled: {erased.text(bounds)} for ever"
    return Verdict(False, states, events, what, kind, first.box, first.op)


def _waits(program: Unrolled, found: Found) -> list[_Wait]:
    """The first polls of every rank on which it stands still."""
    tool = Words(program)
    return [
        _Wait(step, tool.was_published(found.last, step.words[0], step.copy))
        for rank, done in enumerate(found.last[0])
        for _, step in program.ready(rank, done)
    ]


def _events(bounds: Bounds, program: Unrolled, found: Found) -> tuple[Event, ...]:
    tool = Words(program)
    events = []
    for move in found.moves:
        step = move.step
        values = dict.fromkeys(tool.value(move.words, word) for word in step.words)
        held = ", ".join(_when(v - 1, bounds) if v else "sentinel" for v in values)
        place = divmod(step.copy, bounds.layers)
        events.append(
            Event(
                step.rank, *place, step.op, step.act, step.box, step.parity, step.peer, held,
                move.forged,
            )
        )  # fmt: skip
    return tuple(events)


def _value(program: Unrolled, found: Found, word: int) -> int:
    return Words(program).value(found.last[1], word)


def _when(copy: int, bounds: Bounds) -> str:
    """A layer's place; the step is named where there are several."""
    step, layer = divmod(copy, bounds.layers)
    return f"step {step} layer {layer}" if bounds.steps > 1 else f"layer {layer}"
