"""Whether a mailbox protocol loses, tears or mistakes a word, or stops for ever.

Exploring everything at once is only needed to show an error.  A proof goes by parts: leaving
words out, with the polls that wait for them, only adds behaviour to the rest.  So a mailbox that
is safe alone, or together with one other, is safe in the whole; and once no word can go wrong,
all orders of the steps end alike, so that one run decides whether any of them stops.

More than three ranks have too many interleavings to visit.  There a proof by order is tried first
(`causal`), and the search is left for what it does not prove.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from kpipe.codegen.proof.mailbox.causal import always_alike
from kpipe.codegen.proof.mailbox.describe import describe
from kpipe.codegen.proof.mailbox.protocol import Protocol
from kpipe.codegen.proof.mailbox.search import Words, run_once, search
from kpipe.codegen.proof.mailbox.unrolled import Bounds, Unrolled, unroll
from kpipe.codegen.proof.mailbox.verdict import Verdict

LIMIT = 1_000_000  # states of one search
SMALL = 2  # ranks
SEARCHED = 3  # ranks; for more, a proof by order is tried before the search


def bounds_to_check(protocol: Protocol, ranks: int) -> tuple[Bounds, ...]:
    """The two layer counts that show every reuse: one long step, and replays of an odd one.

    The replays begin with parity 0 each, so that the last and the first layer share a parity.
    """
    layers = protocol.parities + 2
    odd = layers if layers % 2 else layers - 1
    return (Bounds(ranks, layers, 1), Bounds(ranks, odd, 2))


def explore(
    protocol: Protocol,
    bounds: Bounds,
    *,
    init_barrier: bool = True,
    forgeable: frozenset[str] = frozenset(),
    limit: int = LIMIT,
) -> Verdict:
    """The verdict over all interleavings of `bounds.ranks` ranks.

    Without `init_barrier` a rank may publish before its peers have armed their words.
    `forgeable` names mailboxes whose payload may equal the sentinel.  Exact: a proof covers every
    interleaving within the bounds, and the counterexample is the shortest.  A proof by order
    counts the states of the one run that it looks at.  Raises ValueError for bounds too small to
    reuse every parity or another number of ranks than 2 to 4.
    """
    program = unroll(protocol, bounds, init_barrier=init_barrier)
    if bounds.ranks > SEARCHED and not forgeable and always_alike(program):
        steps = sum(len(steps) for steps in program.ranks)
        return Verdict(True, steps + 1, None, _proof_text(bounds))
    own = _settled(protocol, program, forgeable)
    names = tuple(box.name for box in protocol.boxes)
    few = program
    if bounds.ranks != SMALL:
        few = unroll(protocol, replace(bounds, ranks=SMALL), init_barrier=init_barrier)
    groups, states = _groups(protocol, few, forgeable, limit)
    proved = set[str]()
    for group in groups if bounds.ranks > SMALL else ():
        found = search(_part(program, group, own), forgeable=forgeable, limit=limit)
        states += found.states
        if found.kind:
            break
        proved.update(group)
    if bounds.ranks <= SMALL:
        proved.update(*groups)
    if proved.issuperset(names) and run_once(program):
        return Verdict(True, states, None, _proof_text(bounds))
    whole = _part(program, names, own)
    found = search(whole, forgeable=forgeable, limit=limit)
    states += found.states
    if not found.kind:
        return Verdict(True, states, None, _proof_text(bounds))
    verdict = describe(protocol, bounds, whole, found, states)
    return replace(verdict, left_out=tuple(sorted(own)))


def _settled(protocol: Protocol, program: Unrolled, forgeable: frozenset[str]) -> frozenset[str]:
    """Mailboxes in which a rank's words to itself need no exploring."""
    return frozenset(
        box.name
        for box in protocol.boxes
        if box.name not in forgeable and _own_words_in_order(program, box.name)
    )


def _groups(
    protocol: Protocol, program: Unrolled, forgeable: frozenset[str], limit: int
) -> tuple[tuple[tuple[str, ...], ...], int]:
    """Mailboxes, alone or in pairs, that are safe for two ranks, the cheapest cover first.

    `program` is the protocol of two ranks, which are explored in no time, so they choose what is
    explored for more.  Also returns the states that it took.
    """
    own = _settled(protocol, program, forgeable)
    names = tuple(box.name for box in protocol.boxes)
    cost: dict[tuple[str, ...], int] = {}
    states, alone = 0, set[str]()
    for group in (*combinations(names, 1), *combinations(names, 2)):
        if alone.issuperset(group):
            continue
        found = search(_part(program, group, own), forgeable=forgeable, limit=limit)
        states += found.states
        if not found.kind:
            cost[group] = found.states
            alone.update(group if len(group) == 1 else ())
    chosen: list[tuple[str, ...]] = []
    missing = set(names)
    while candidates := [group for group in cost if missing.intersection(group)]:
        best = min(candidates, key=lambda g: (cost[g] ** 2 / len(missing.intersection(g)), g))
        chosen.append(best)
        missing.difference_update(best)
    return tuple(chosen), states


def _part(program: Unrolled, group: tuple[str, ...], own: frozenset[str]) -> Unrolled:
    """The words of some mailboxes, without a rank's words to itself where those are settled."""
    return program.select(
        lambda word: word.box in group and not (word.box in own and word.owner == word.source)
    )


def _own_words_in_order(program: Unrolled, box: str) -> bool:
    """Whether the words of a rank to itself are safe by the order of its own launches alone.

    Nobody else touches them, so it is enough that their steps are totally ordered and that this
    one order is right.  All ranks run the same program.
    """
    part = program.select(lambda word: word.box == box and word.owner == word.source == 0)
    steps, tool = part.ranks[0], Words(part)
    state = ((0,) * len(part.ranks), 0, False)
    for _ in steps:
        ready = part.ready(0, state[0][0])
        if len(ready) != 1:
            return False
        bit, step = ready[0]
        result = tool.apply(step, state)
        if isinstance(result, str) or result < 0:
            return False
        state = ((state[0][0] | bit, *state[0][1:]), result, False)
    return state[1] == 0


def _proof_text(bounds: Bounds) -> str:
    counted = "counted on" if bounds.carry_parity else "from parity 0"
    return (
        f"safe for {bounds.ranks} ranks, {bounds.layers} layers in {bounds.steps} steps "
        f"({counted} in each step), whatever the skew"
    )
