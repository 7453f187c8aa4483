"""The mailbox protocol played by threads of steps, written without the explorer's code.

One rank is a set of actors.  An actor is a small generator: it yields whether it may go on (a
poll that finds the sentinel may not), or what has gone wrong.  Actors of one launch run
concurrently, launches follow their stream, its forks and its joins.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from kpipe.codegen.proof.mailbox.protocol import Act, Op, Protocol, Split
from kpipe.codegen.proof.mailbox.unrolled import Bounds
from kpipe.codegen.proof.mailbox.verdict import Event

Key = tuple[int, int, str, int, str, str, int]  # rank, layer, op, use, box, act, peer


class Wrong(Exception):
    """A word was lost, mistaken, torn or erased."""


@dataclass
class Task:
    """One step and the steps that come first."""

    key: Key
    needs: set[Key] = field(default_factory=set)


class Simulator:
    """All ranks over all layers; `memory` maps (owner, box, parity, source) to a layer."""

    def __init__(
        self,
        protocol: Protocol,
        bounds: Bounds,
        *,
        barrier: bool = True,
        forged: Event | None = None,
        left_out: tuple[str, ...] = (),
    ) -> None:
        self.left_out = left_out
        self.protocol, self.bounds, self.forged = protocol, bounds, forged
        self.memory: dict[tuple[int, str, int, int], int] = {}
        self.parities = {box.name: box.parities for box in protocol.boxes}
        self.waiting: dict[Key, set[Key]] = {}  # steps to make, and which come first
        self.behind: dict[Key, list[Key]] = {}
        self.free: dict[Key, None] = {}  # steps with nothing ahead of them
        self.unfilled = set() if barrier else set(range(bounds.ranks))
        for rank in range(bounds.ranks):
            for task in self._tasks(rank):
                self.waiting[task.key] = task.needs
                for earlier in task.needs:
                    self.behind.setdefault(earlier, []).append(task.key)
                if not task.needs:
                    self.free[task.key] = None

    def _tasks(self, rank: int) -> Iterator[Task]:
        issued: dict[str, set[Key]] = {}
        for layer in range(self.bounds.layers * self.bounds.steps):
            for item in self.protocol.items:
                if isinstance(item, Op):
                    tasks = list(self._launch(rank, layer, item))
                    for task in tasks:
                        task.needs |= issued.get(item.stream, set())
                        yield task
                    if tasks:  # they come behind everything issued before
                        issued[item.stream] = {task.key for task in tasks}
                else:
                    into, source = (
                        (item.stream, item.origin)
                        if isinstance(item, Split)
                        else (item.target, item.stream)
                    )
                    issued[into] = issued.get(into, set()) | issued.get(source, set())

    def _launch(self, rank: int, layer: int, op: Op) -> Iterator[Task]:
        everyone = range(self.bounds.ranks)

        def keys(place: int) -> list[Key]:
            use = op.uses[place]
            start = (rank, layer, op.name, place, use.box)
            if use.act is Act.READ:
                return [(*start, "read", -1), (*start, "end of read", -1)]
            return [(*start, use.act.value, peer) for peer in everyone]

        for place, use in enumerate(op.uses):
            for number, key in enumerate(keys(place)):
                needs = {earlier for other in use.after for earlier in keys(other)}
                if use.act is Act.REARM:
                    needs = {
                        k for k in needs if k[5] != "poll" or k[4] != use.box or k[6] == key[6]
                    }
                if use.act is Act.READ and number:
                    needs.add(keys(place)[0])
                yield Task(key, needs)

    def runnable(self) -> list[Key]:
        """Steps whose predecessors are done and which do not spin."""
        return [
            key
            for key in self.free
            if key[0] not in self.unfilled
            and not (key[5] == "poll" and self._place(key) not in self.memory)
        ]

    def _place(self, key: Key) -> tuple[int, str, int, int]:
        rank, layer, _, _, box, act, peer = key
        within = layer if self.bounds.carry_parity else layer % self.bounds.layers
        owner, source = (peer, rank) if act == "publish" else (rank, peer)
        return (owner, box, within % self.parities[box], source)

    def fill(self, rank: int) -> None:
        """A rank arms its own words."""
        self.unfilled.remove(rank)
        if any(place[0] == rank for place in self.memory):
            raise Wrong("the fill erases a word")

    def make(self, key: Key) -> None:
        """One step; Wrong where it goes wrong."""
        del self.waiting[key], self.free[key]
        for later in self.behind.get(key, ()):
            self.waiting[later].remove(key)
            if not self.waiting[later]:
                self.free[later] = None
        layer, act, place = key[1], key[5], self._place(key)
        if act == "publish":
            if place in self.memory:
                raise Wrong("overwritten")
            if not self._is_forged(key):
                self.memory[place] = layer
        elif act == "poll" and self.memory[place] != layer:
            raise Wrong("another layer's word")
        elif act == "rearm":
            if self.memory.pop(place, layer) > layer:
                raise Wrong("a newer word is erased")
        elif act in ("read", "end of read"):
            for source in range(self.bounds.ranks):
                if self.memory.get((*place[:3], source)) != layer:
                    raise Wrong("a word is not there")

    def _is_forged(self, key: Key) -> bool:
        event = self.forged
        return event is not None and (key[0], key[1], key[2], key[4], key[5], key[6]) == (
            event.rank,
            event.step * self.bounds.layers + event.layer,
            event.op,
            event.box,
            event.act,
            event.peer,
        )

    def walk(self, draw: random.Random) -> None:
        """Random steps to the end; Wrong for an error, a standstill or a word left over.

        One rank is preferred for a while, then another: the skew grows as far as it can.
        """
        favourite = 0
        while self.waiting:
            ready = self.runnable()
            if not ready:
                raise Wrong("nobody can go on")
            if draw.random() < 0.15:
                favourite = draw.randrange(self.bounds.ranks)
            mine = [key for key in ready if key[0] == favourite]
            self.make(draw.choice(mine or ready))
        if self.memory:
            raise Wrong("words are left over")

    def replay(self, events: tuple[Event, ...]) -> str:
        """Plays a counterexample; returns what went wrong in its last step, or at its end.

        The steps that it leaves out are played as soon as they can be.
        Raises KeyError for a step that cannot be made here, and Wrong ahead of the last step.
        """
        for number, event in enumerate(events, 1):
            try:
                self._play(event)
            except Wrong as error:
                if number == len(events):
                    return str(error)
                raise
        self._own()
        if self.runnable():
            return ""
        return "nobody can go on" if self.waiting else "words are left over" * bool(self.memory)

    def _play(self, event: Event) -> None:
        if event.act == "fill":
            self.fill(event.rank)
            return
        self._own()
        layer = event.step * self.bounds.layers + event.layer
        for key in self.runnable():
            if (*key[:3], *key[4:]) == (
                event.rank, layer, event.op, event.box, event.act, event.peer,
            ):  # fmt: skip
                self.make(key)
                return
        raise KeyError(event)

    def _own(self) -> None:
        while own := [
            key for key in self.runnable() if key[0] == key[6] and key[4] in self.left_out
        ]:
            self.make(own[0])
