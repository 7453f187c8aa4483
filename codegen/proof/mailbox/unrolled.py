"""A protocol written out: the steps of every rank over several layers and repetitions.

A step is atomic: one publish into one peer, one poll or re-arm of one source's word, the begin or
the end of a read.  Each rank's steps are a partial order, held as a bit mask of the steps that
come first; any order that keeps it, interleaved in any way with the other ranks, may happen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kpipe.codegen.proof.mailbox.protocol import Act, Merge, Op, Protocol, Split, Use

ALL_SOURCES = -1
FILL, READ_END = "fill", "end of read"


@dataclass(frozen=True)
class Bounds:
    """How far a protocol is written out.

    `steps` replays of `layers` layers each.  With `carry_parity` the layers are counted on across
    replays, otherwise each replay begins with parity 0, as a captured graph does.
    """

    ranks: int = 2
    layers: int = 4
    steps: int = 1
    carry_parity: bool = False

    def parity(self, copy: int, parities: int) -> int:
        """The parity of a mailbox in the layer with this running number."""
        return (copy if self.carry_parity else copy % self.layers) % parities

    def check(self, parities: int) -> None:
        """ValueError where the bounds are too small to show every reuse of a copy."""
        if not 2 <= self.ranks <= 4:
            raise ValueError(f"{self.ranks} ranks; 2 to 4 are explored")
        needed = parities + 2
        if self.layers < 1 or self.steps < 1 or self.layers * self.steps < needed:
            raise ValueError(
                f"{self.layers} layers in {self.steps} steps; {needed} layers are needed to reuse "
                f"{parities} parities"
            )


@dataclass(frozen=True)
class Word:
    """One source's place in one copy of a mailbox."""

    owner: int
    box: str
    parity: int
    source: int


@dataclass(frozen=True)
class Step:
    """One atomic step; `words` are positions in the program's words, `before` a mask of steps."""

    rank: int
    copy: int  # running number of the layer
    op: str
    act: str
    box: str
    parity: int
    peer: int  # target of a publish, source of a poll or re-arm, ALL_SOURCES for a read
    words: tuple[int, ...]
    before: int

    def moved(self, words: tuple[int, ...], before: int) -> Step:
        """The same step in other words, behind other steps."""
        names = self.rank, self.copy, self.op, self.act, self.box, self.parity, self.peer
        return Step(*names, words, before)


@dataclass(frozen=True)
class Unrolled:
    """Steps of every rank; the bit of a step is its position in its rank's tuple."""

    ranks: tuple[tuple[Step, ...], ...]
    words: tuple[Word, ...]
    copies: int
    filled: bool  # the words are armed before the first step
    _ready: dict[tuple[int, int], tuple[tuple[int, Step], ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def shape(self, marked: frozenset[str]) -> tuple:
        """All of the steps but names: equal shapes behave alike.  `marked`: mailboxes to tell
        from the others."""
        return (
            self.copies,
            *(
                tuple((s.act, s.copy, s.words, s.before, s.box in marked) for s in steps)
                for steps in self.ranks
            ),
        )

    def ready(self, rank: int, done: int) -> tuple[tuple[int, Step], ...]:
        """Steps of a rank, with their bits, whose predecessors are all in `done`."""
        key = (rank, done)
        found = self._ready.get(key)
        if found is None:
            steps = self.ranks[rank]
            found = tuple(
                (1 << i, step)
                for i, step in enumerate(steps)
                if not done >> i & 1 and step.before & done == step.before
            )
            self._ready[key] = found
        return found

    def select(self, keep: Callable[[Word], bool]) -> Unrolled:
        """The program without the words that `keep` refuses, and without their steps.

        What is left keeps its order, so everything that the full program can do to the kept
        words can be done here too.
        """
        numbers = {old: new for new, old in enumerate(_kept(self.words, keep))}
        ranks = tuple(_select_steps(steps, numbers) for steps in self.ranks)
        words = tuple(self.words[old] for old in numbers)
        return Unrolled(ranks, words, self.copies, self.filled)


def _kept(words: tuple[Word, ...], keep: Callable[[Word], bool]) -> list[int]:
    return [i for i, word in enumerate(words) if keep(word)]


def _select_steps(steps: tuple[Step, ...], numbers: dict[int, int]) -> tuple[Step, ...]:
    kept: list[tuple[Step, tuple[int, ...]]] = []
    places: list[int] = []
    for place, step in enumerate(steps):
        words = tuple([numbers[word] for word in step.words if word in numbers])
        if words:
            kept.append((step, words))
            places.append(place)
    return tuple(
        step.moved(words, _gathered(step.before, len(steps), places)) for step, words in kept
    )


def _gathered(mask: int, size: int, places: list[int]) -> int:
    """The bits of a mask of `size` bits at some places, moved together."""
    digits = f"{mask:0{size}b}"
    return int("".join([digits[size - 1 - place] for place in reversed(places)]), 2)


def unroll(protocol: Protocol, bounds: Bounds, *, init_barrier: bool = True) -> Unrolled:
    """Every step of every rank.

    Without `init_barrier` each rank fills its own words with the sentinel as its first step, and
    its peers may publish ahead of that.  Raises ValueError for bounds that are too small.
    """
    bounds.check(protocol.parities)
    words = tuple(
        Word(owner, box.name, parity, source)
        for owner in range(bounds.ranks)
        for box in protocol.boxes
        for parity in range(box.parities)
        for source in range(bounds.ranks)
    )
    writer = _Writer(protocol, bounds, {word: i for i, word in enumerate(words)})
    ranks = tuple(writer.rank(rank, fill=not init_barrier) for rank in range(bounds.ranks))
    return Unrolled(ranks, words, bounds.layers * bounds.steps, init_barrier)


@dataclass(frozen=True)
class _Writer:
    protocol: Protocol
    bounds: Bounds
    numbers: dict[Word, int]

    def rank(self, rank: int, *, fill: bool) -> tuple[Step, ...]:
        steps: list[Step] = []
        done: dict[str, int] = {}
        begin = 0
        if fill:
            own = tuple(i for word, i in self.numbers.items() if word.owner == rank)
            steps.append(Step(rank, 0, FILL, FILL, "", 0, ALL_SOURCES, own, 0))
            begin = 1
        for copy in range(self.bounds.layers * self.bounds.steps):
            for item in self.protocol.items:
                if isinstance(item, Op):
                    ahead = done.get(item.stream, begin)
                    first = len(steps)
                    steps.extend(self._op(rank, copy, item, ahead, first))
                    done[item.stream] = ahead | (1 << len(steps)) - (1 << first)
                elif isinstance(item, Split):
                    source = done.get(item.origin, begin)
                    done[item.stream] = done.get(item.stream, begin) | source
                elif isinstance(item, Merge):
                    source = done.get(item.stream, begin)
                    done[item.target] = done.get(item.target, begin) | source
        return tuple(steps)

    def _op(self, rank: int, copy: int, op: Op, ahead: int, first: int) -> list[Step]:
        """The steps of one launch; `ahead` is a mask, `first` the position of its first step."""
        steps: list[Step] = []
        places: list[range] = []
        for use in op.uses:
            start = first + len(steps)
            steps.extend(self._use(rank, copy, op.name, use))
            places.append(range(start, first + len(steps)))
        inner = [0] * len(steps)
        for position, use in enumerate(op.uses):
            for earlier in use.after:
                source_by_source = (
                    use.act is Act.REARM
                    and op.uses[earlier].act is Act.POLL
                    and op.uses[earlier].box == use.box
                )
                for k, place in enumerate(places[position]):
                    chosen = places[earlier][k : k + 1] if source_by_source else places[earlier]
                    inner[place - first] |= sum(1 << i for i in chosen)
            if use.act is Act.READ:
                inner[places[position][1] - first] |= 1 << places[position][0]
        _close(inner, first)
        return [
            step.moved(step.words, ahead | mask) for step, mask in zip(steps, inner, strict=True)
        ]

    def _use(self, rank: int, copy: int, op: str, use: Use) -> list[Step]:
        box = next(box for box in self.protocol.boxes if box.name == use.box)
        parity = self.bounds.parity(copy, box.parities)
        everyone = range(self.bounds.ranks)
        peers = everyone if use.peers == "every" else (rank,)

        def step(act: str, peer: int, *pairs: tuple[int, int]) -> Step:
            words = tuple(
                self.numbers[Word(owner, box.name, parity, source)] for owner, source in pairs
            )
            return Step(rank, copy, op, act, box.name, parity, peer, words, 0)

        if use.act is Act.PUBLISH:
            return [step("publish", peer, (peer, rank)) for peer in peers]
        if use.act is Act.READ:
            pairs = tuple((rank, source) for source in peers)
            return [step(act, ALL_SOURCES, *pairs) for act in ("read", READ_END)]
        return [step(use.act.value, source, (rank, source)) for source in peers]


def _close(masks: list[int], first: int) -> None:
    """Transitive closure in place; bits count from the rank's first step."""
    changed = True
    while changed:
        changed = False
        for place, mask in enumerate(masks):
            wider = mask
            for other, behind in enumerate(masks):
                if mask >> (first + other) & 1:
                    wider |= behind
            if wider != mask:
                masks[place], changed = wider, True
