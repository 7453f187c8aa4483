"""Why one op of a step is ordered before another, or what is missing.

The question is asked in the middle of a step, where layers stand in front and behind, about the
schedule as it was decided: is the first op over before the second may touch its data?
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kpipe.codegen.diagnostics import Diagnostic, SpecError, did_you_mean
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.proof.instants import Letter, Point
from kpipe.codegen.proof.lower import lower
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Program

ASKED_LAYER = 1  # the first layer of a step has no predecessor and is no steady state
_SUFFIX = re.compile(r"#(\d+)")
_WORDS: dict[Letter, str] = {
    "S": "start",
    "W": "wait",
    "T": "trigger",
    "X": "exit",
    "E": "completion",
}


@dataclass(frozen=True)
class Link:
    """One edge of the chain: the instant that it leads to, its rule, the reason."""

    instant: str
    rule: str
    reason: str


@dataclass(frozen=True)
class Answer:
    """The order of two ops, eagerly or captured.

    `chain` leads from the completion of `first` to the start of `second`, or only to its wait
    (`from_wait`); it is empty where they are not ordered, and `missing` says why.  `in_time`: it
    rests on a trigger behind a wait, which orders the moments; that a read then sees what was
    written is promised only behind a release fence.  `shared` is the memory over which the two
    conflict, so that the order is needed.
    """

    first: str
    second: str
    captured: bool
    next_layer: bool
    from_wait: bool = False
    in_time: bool = False
    chain: tuple[Link, ...] = ()
    missing: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def ordered(self) -> bool:
        """`first` is over before `second` starts, or before its wait returns."""
        return bool(self.chain)


def check_op(steps: Sequence[StepPlan], word: str) -> None:
    """Make sure that one of the steps launches the op.

    Raises SpecError KP808, with what they do launch, where none does.
    """
    if any(_places(step, word) for step in steps):
        return
    names = dict.fromkeys(launch.name for step in steps for launch in step.launches)
    near = did_you_mean(word, names)
    raise SpecError(
        [
            Diagnostic(
                "KP808",
                f"no selected step launches `{word}`",
                None,
                allowed=tuple(names),
                help=f"did you mean `{near}`?" if near else "",
            )
        ]
    )


def why(
    pipeline: PipelinePlan, step: StepPlan, first: str, second: str, *, captured: bool
) -> Answer | None:
    """Whether `first` is over before `second` of the same layer touches its data.

    Where `second` is issued ahead of `first`, or is the same op, it is that of the next layer.  A
    slot stands for the op in it; of several, for the last as `first`, for the first as `second`.
    None where the step launches only one of them or none.
    """
    here = max(_places(step, first), default=-1)
    there = min(_places(step, second), default=-1)
    if -1 in (here, there):
        return None
    names = (step.launches[here].name, step.launches[there].name)
    layer = len(step.launches) + 1  # its ops, and what runs between two layers
    start = 1 + ASKED_LAYER * layer  # behind the engine's writes of step inputs
    next_layer = there <= here
    here, there = start + here, start + there + (layer if next_layer else 0)
    program = lower(pipeline, step, captured=captured)
    say = _Names(start, layer)
    asked = Answer(*names, captured, next_layer, shared=_shared(program, here, there))
    for fences in (True, False):  # what needs no fence is the better reason
        order = Order(program, fences=fences)
        for begin in ("S", "W"):
            if order.ordered((here, "E"), (there, begin)):
                chain = _chain(order, (here, "E"), (there, begin), say)
                return replace(asked, chain=chain, from_wait=begin == "W", in_time=not fences)
    gap = order.missing((here, "E"), (there, "W"))
    return replace(asked, missing=tuple(map(say, gap.text.split("; "))) if gap else ())


def _places(step: StepPlan, word: str) -> list[int]:
    """Where the step launches an op, or what stands in a slot of that name."""
    named = [i for i, launch in enumerate(step.launches) if launch.name == word]
    return named or [i for i, launch in enumerate(step.launches) if launch.word == word]


def _chain(order: Order, first: Point, second: Point, say: _Names) -> tuple[Link, ...]:
    return tuple(
        Link(
            f"{_WORDS[edge.second[1]]} of {say(order.name(edge.second[0]))}",
            edge.rule,
            say(edge.text),
        )
        for edge in order.chain(first, second)
    )


class _Names:
    """Turns `name#position` into a name and, where it is not the asked layer's, its layer."""

    def __init__(self, start: int, layer: int) -> None:
        self.start = start
        self.layer = layer

    def __call__(self, text: str) -> str:
        """The text with every position said in words."""
        return _SUFFIX.sub(lambda found: self._layer(int(found[1])), text)

    def _layer(self, position: int) -> str:
        distance = (position - self.start) // self.layer
        if distance == 0:
            return ""
        return " (next layer)" if distance > 0 else " (previous layer)"


def _shared(program: Program, first: int, second: int) -> tuple[str, ...]:
    """Memory over which two launches conflict, without its parity and layer."""
    ours, theirs = (program.launches[position].node.accesses for position in (first, second))
    found = [a.buffer for a in ours if any(a.conflicts(b) for b in theirs)]
    return tuple(dict.fromkeys(re.sub(r"@\d+| of layer \d+", "", name) for name in found))
