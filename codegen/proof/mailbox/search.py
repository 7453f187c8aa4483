"""Breadth-first search over the states of an unrolled protocol.

A state is the mask of finished steps of every rank and the words, packed into one integer: 0 is
the sentinel, n + 1 the word of layer n.  Unlimited skew: in every state every rank may go next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kpipe.codegen.proof.kept import Kept
from kpipe.codegen.proof.mailbox.unrolled import FILL, READ_END, Step, Unrolled
from kpipe.codegen.proof.mailbox.verdict import Kind

BLOCKED = -1
State = tuple[tuple[int, ...], int, bool]  # finished steps per rank, words, a payload was forged


@dataclass(frozen=True)
class Move:
    """One step of a trace and the words just before it."""

    step: Step
    words: int
    forged: bool


@dataclass(frozen=True)
class Found:
    """How a search ended; `kind` is empty where no state is wrong.

    `last` is the state in which it goes wrong: the last move is the wrong step, or, where it is
    `stuck`, no step is left to make.
    """

    states: int
    kind: Kind = ""
    moves: tuple[Move, ...] = ()
    last: State = ((), 0, False)
    stuck: bool = False


class Words:
    """Reads and writes the packed words of one unrolled protocol."""

    def __init__(self, program: Unrolled) -> None:
        self.width = (program.copies + 1).bit_length()
        self.mask = (1 << self.width) - 1
        self.program = program

    def value(self, words: int, word: int) -> int:
        """0 for the sentinel, n + 1 for the word of layer n."""
        return words >> word * self.width & self.mask

    def apply(self, step: Step, state: State) -> int | Kind:
        """The words after a step, BLOCKED for a poll that goes on spinning, or the error."""
        words, act = state[1], step.act
        wanted = step.copy + 1
        shift = step.words[0] * self.width if step.words else 0
        value = words >> shift & self.mask  # of its first word; those acts have no other
        if act == "publish":
            return "lost" if value else words | wanted << shift
        if act == "poll":
            return BLOCKED if not value else words if value == wanted else "stale"
        if act == "rearm":
            return "rearm" if value > wanted else words ^ value << shift
        if act == FILL:
            return "init" if any(self.value(words, word) for word in step.words) else words
        for word in step.words:
            value = self.value(words, word)
            if value != wanted:
                return self._bad_read(step, state, word, value)
        return words

    def _bad_read(self, step: Step, state: State, word: int, value: int) -> Kind:
        if step.act == READ_END:
            return "torn"
        if value:
            return "stale"
        return "rearm" if self.was_published(state, word, step.copy) else "unarrived"

    def was_published(self, state: State, word: int, copy: int) -> bool:
        """Whether the source has stored the word of this layer, whatever became of it."""
        source = self.program.words[word].source
        return any(
            step.act == "publish" and step.copy == copy and step.words == (word,)
            for i, step in enumerate(self.program.ranks[source])
            if state[0][source] >> i & 1
        )


# States of programs that were searched to the end and found right, by all that a search looks at:
# the modes of a pipeline, and every repair that is tried out, use most mailboxes in the same way.
_RIGHT: Kept[int] = Kept(1024)


def search(program: Unrolled, *, forgeable: frozenset[str] = frozenset(), limit: int) -> Found:
    """Explore every interleaving until an error, the shortest way to it first.

    In one publish into a mailbox of `forgeable` the payload may equal the sentinel.  Ends with
    "undecided" where more than `limit` states were met.  What was right once is not explored again.
    """
    key = (program.shape(forgeable), limit)
    if states := _RIGHT.get(key):
        return Found(states)
    found = _search(program, forgeable, limit)
    if not found.kind:
        _RIGHT.keep(key, found.states)
    return found


def _search(program: Unrolled, forgeable: frozenset[str], limit: int) -> Found:
    tool = Words(program)
    start: State = ((0,) * len(program.ranks), 0, False)
    finished = tuple((1 << len(steps)) - 1 for steps in program.ranks)
    parents: dict[State, tuple[State, Step] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        done, words, forged = state
        moved = False
        for rank, own in enumerate(done):
            for bit, step in program.ready(rank, own):
                result = tool.apply(step, state)
                if isinstance(result, str):
                    moves = (*_moves(parents, state), Move(step, words, False))
                    return Found(len(parents), result, moves, state)
                if result == BLOCKED:
                    continue
                moved = True
                after = (*done[:rank], own | bit, *done[rank + 1 :])
                met: list[State] = [(after, result, forged)]
                if step.act == "publish" and step.box in forgeable and not forged:
                    met.append((after, words, True))
                for one in met:
                    if one not in parents:
                        parents[one] = (state, step)
                        queue.append(one)
        if not moved and (kind := _stuck(tool, state, finished)):
            return Found(len(parents), kind, _moves(parents, state), state, stuck=True)
        if len(parents) > limit:
            return Found(len(parents), "undecided")
    return Found(len(parents))


def run_once(program: Unrolled) -> bool:
    """Whether one arbitrary order of the steps ends with all of them done and all words armed.

    Where no order can lose, tear or mistake a word, a poll that may go on stays so, and all
    orders end alike.
    """
    tool = Words(program)
    state: State = ((0,) * len(program.ranks), 0, False)
    moved = True
    while moved:
        moved = False
        for rank in range(len(program.ranks)):
            for bit, step in program.ready(rank, state[0][rank]):
                result = tool.apply(step, state)
                if isinstance(result, str):
                    return False
                if result != BLOCKED:
                    done = state[0]
                    done = (*done[:rank], done[rank] | bit, *done[rank + 1 :])
                    state, moved = (done, result, False), True
    finished = tuple((1 << len(steps)) - 1 for steps in program.ranks)
    return state[0] == finished and state[1] == 0


def _stuck(tool: Words, state: State, finished: tuple[int, ...]) -> Kind:
    """Why a state without a move is wrong; empty for the proper end."""
    done, words, forged = state
    if done == finished:
        return "never_rearmed" if words else ""
    if forged:
        return "sentinel"
    for rank in range(len(done)):
        for _, step in tool.program.ready(rank, done[rank]):
            if tool.was_published(state, step.words[0], step.copy):
                return "rearm"
    return "deadlock"


def _moves(parents: dict[State, tuple[State, Step] | None], state: State) -> tuple[Move, ...]:
    moves: list[Move] = []
    while (link := parents[state]) is not None:
        before, step = link
        moves.append(Move(step, before[1], state[2] and not before[2]))
        state = before
    return tuple(reversed(moves))
