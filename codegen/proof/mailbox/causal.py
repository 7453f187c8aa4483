"""A proof for any number of ranks without visiting their interleavings.

One run is made, and with it the order that no interleaving can change: a rank's own order, and
that a poll comes behind the publish whose word it takes.  If in that run every step is behind all
earlier steps that bear on what it finds in its word, every interleaving does the same.

Why: take another run, and in it the first step that goes differently.  Until then it has made
steps of the first run only, each with everything that is before it in the order.  What the step
finds in its word was left there by steps that the order puts in front of it, so they are done,
and by no other, as those come behind it.  A poll may come before its publish; then it finds what
the publish found, which is the sentinel, and goes on spinning.  For that, what came before the
publish has to be before the poll by the rank's own order, not by way of the publish.  So no step
goes differently, and none of them waits for ever, as the first run came to its end.

The reverse does not hold: a protocol that is not ordered like this may still be safe.
"""

from __future__ import annotations

from kpipe.codegen.proof.mailbox.search import BLOCKED, State, Words
from kpipe.codegen.proof.mailbox.unrolled import FILL, Step, Unrolled

_CHANGES = frozenset({"publish", "rearm", FILL})


def always_alike(program: Unrolled) -> bool:
    """Whether all interleavings do what one run does, and that run is right to its end.

    False where the run goes wrong, or where the order does not decide.
    """
    run = _run(program)
    if run is None:
        return False
    tool = _Past(program)
    return all(tool.decides(step, bit) for step, bit in run)


def _run(program: Unrolled) -> list[tuple[Step, int]] | None:
    """Steps, each with its bit, of one run that ends with all done and all words armed."""
    tool = Words(program)
    state: State = ((0,) * len(program.ranks), 0, False)
    run: list[tuple[Step, int]] = []
    moved = True
    while moved:
        moved = False
        for rank in range(len(program.ranks)):
            for bit, step in program.ready(rank, state[0][rank]):
                result = tool.apply(step, state)
                if isinstance(result, str):
                    return None
                if result == BLOCKED:
                    continue
                done = state[0]
                done = (*done[:rank], done[rank] | bit, *done[rank + 1 :])
                state, moved = (done, result, False), True
                run.append((step, bit))
    complete = len(run) == sum(len(steps) for steps in program.ranks)
    return run if complete and state[1] == 0 else None


class _Past:
    """What lies behind each step of a run, as one bit set over the steps of all ranks."""

    def __init__(self, program: Unrolled) -> None:
        self.program = program
        self.first = [0]  # where the steps of each rank begin in the bit sets
        for steps in program.ranks:
            self.first.append(self.first[-1] + len(steps))
        self.behind: list[int] = [0] * self.first[-1]  # by step; each step lies behind itself
        # By word: all its steps so far, those that changed it, and the latest one of these.
        self.touched: list[int] = [0] * len(program.words)
        self.changed: list[int] = [0] * len(program.words)
        self.latest: list[int] = [-1] * len(program.words)

    def decides(self, step: Step, bit: int) -> bool:
        """Add the next step of the run; whether the order decides what it finds."""
        number = self.first[step.rank] + bit.bit_length() - 1
        own = self._own(step)
        past = own | 1 << number
        changes = step.act in _CHANGES
        decided = True
        for word in step.words:
            earlier = self.touched[word] if changes else self.changed[word]
            if step.act == "poll":
                publish = self.latest[word]
                earlier &= ~(1 << publish)
                past |= self.behind[publish]
            decided &= earlier & ~own == 0
            self.touched[word] |= 1 << number
            if changes:
                self.changed[word] |= 1 << number
                self.latest[word] = number
        self.behind[number] = past
        return decided

    def _own(self, step: Step) -> int:
        """Everything behind the steps that its own rank makes first."""
        behind, before, first = 0, step.before, self.first[step.rank]
        while before:
            behind |= self.behind[first + (before & -before).bit_length() - 1]
            before &= before - 1
        return behind
