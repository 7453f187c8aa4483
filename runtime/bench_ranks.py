"""`kpipe bench` for ranks that exchange words, on one GPU: peer stores do not leave it.

All ranks' mailboxes lie on this GPU.  First every rank runs its layers, in lockstep, so that no
poll waits; of rank 0 the words are kept that had come ahead of each poll.  Then rank 0 is timed
alone, with the GPU to itself and its launches whole, as on a GPU of its own: every layer of a
graph has mailboxes of its own, and the kept words come into them ahead of each replay, outside
the time, as the kernels re-arm what they have read.  What it sends goes into the other ranks'
mailboxes, which nobody reads.  So a poll finds its words at once, as dsa_tp's launches find their
inputs, and what is missing from the times is the way over NVLink and ranks that are late.

Last the ranks in lockstep, captured: all ranks' launches one behind the other, divided by the
ranks.  It bounds a rank's work from above: a launch that sends and polls is made in two there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kpipe.runtime.bench_inputs import TimedLayer, make_inputs, prepared
from kpipe.runtime.comm.device_ranks import DeviceComm, DeviceRanks
from kpipe.runtime.comm.mailbox import MailboxSpec
from kpipe.runtime.layer import Layer
from kpipe.runtime.memory import Scratch
from kpipe.runtime.sharding import Shard

NOTE = "peer stores stay on this GPU: no NVLink in these times, and no rank is late"
LOCKSTEP = "lockstep"
"""What the time of all ranks in lockstep, divided by the ranks, is called among the times."""
PARITIES = 2


class Box(Protocol):
    """One parity of a mailbox of a rank, on a device or on the host."""

    name: str
    spec: MailboxSpec
    local: Tensor


class Witness:
    """Keeps the words that one rank finds ahead of its polls, by mailbox.

    Of a mailbox the fullest state counts: it fills until it is polled, and is then armed again.
    """

    def __init__(self, comm: DeviceComm) -> None:
        self.words: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        self._comm = comm
        self._hand_on = comm.before_poll

    def __enter__(self) -> Witness:
        self._comm.before_poll = self._before_poll  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        del self._comm.before_poll

    def _before_poll(self) -> None:
        self._hand_on()
        for box in self._comm.boxes.values():
            words = box.local.view(torch.int32)
            missing = int((words == box.spec.signed_sentinel).sum())
            if missing < self._missing.get(box.name, words.numel()):
                self._missing[box.name] = missing
                self.words[box.name] = words.clone()


def bring(words: Mapping[str, Tensor], boxes: Iterable[Box], rows: int) -> None:
    """The first `rows` rows of `words` come into every one of these mailboxes, in stream order."""
    for box in boxes:
        if box.name in words:
            axis = box.spec.rows_axis
            target = box.local.view(torch.int32).narrow(axis, 0, rows)
            target.copy_(words[box.name].narrow(axis, 0, rows))


def alone(group: DeviceRanks) -> DeviceComm:
    """Rank 0 of a group, driven as if it had this GPU to itself: its launches are whole."""
    comm = group.rank(0)
    comm.in_halves = False
    return comm


@dataclass(frozen=True)
class RankLayers:
    """One rank alone: `layers` have mailboxes of their own; `bring_words` fills them all."""

    layers: tuple[TimedLayer, ...]
    bring_words: Callable[[], None]


class RankBench:
    """The ranks of a layer class on one device, ready to be timed at one number of rows after the
    other; `layers` of them in a graph, an even number so that parities come out even."""

    def __init__(
        self, layer_class: type[Layer], arch: str, layers: int, device: str = "cuda"
    ) -> None:
        self.layer_class, self.arch, self.count = layer_class, arch, layers
        self.device = device
        self.ranks = layer_class.RANKS
        self._together = DeviceRanks(self.ranks, device)
        self._rooms: list[DeviceRanks] = []

    def ready(self, rows: int, q: int, context: int) -> list[list[TimedLayer]]:
        """The layers of every rank, by rank, on mailboxes that they share."""
        self._together.arm()
        return [
            list(self._layers_of(rank, rows, q, context, Scratch(self.device)))
            for rank in range(self.ranks)
        ]

    def _layers_of(
        self, rank: int, rows: int, q: int, context: int, scratch: Scratch
    ) -> Iterator[TimedLayer]:
        generator = torch.Generator(self.device).manual_seed(rank)
        shard = Shard(rank, self.ranks, self.layer_class.INTERLEAVE)
        comm = self._together.rank(rank)
        for number in range(self.count):
            inputs = make_inputs(self.layer_class, rows, q, context, generator, shard)
            yield prepared(self.layer_class, inputs, self.arch, number, scratch, comm)

    def in_lockstep(self, ready: list[list[TimedLayer]]) -> Callable[[], None]:
        """What launches every layer of every rank once, in lockstep."""

        def launch(comm: DeviceComm) -> None:
            for one in ready[comm.rank]:
                one.run()

        return lambda: self._together.run(launch) and None

    def words(self, ready: list[list[TimedLayer]]) -> dict[str, Tensor]:
        """Runs the ranks in lockstep; the words that rank 0 has found, int32, by mailbox."""
        with Witness(self._together.rank(0)) as witness:
            self.in_lockstep(ready)()
        self._together.synchronize()
        return witness.words

    def alone(
        self, ready: list[list[TimedLayer]], words: Mapping[str, Tensor], repeat: int
    ) -> RankLayers:
        """Rank 0 on the same weights and caches; `repeat` times its layers, as many mailboxes."""
        scratch, layers, comms = Scratch(self.device), [], []
        rows = ready[0][0].layer.declared_rows(ready[0][0].step)
        for turn in range(repeat):
            for number, one in enumerate(ready[0]):
                room, parity = divmod(turn * self.count + number, PARITIES)
                comm = alone(self._room(room))
                layers.append(
                    prepared(self.layer_class, one.inputs, self.arch, parity, scratch, comm)
                )
                comms.append(comm)

        def bring_words() -> None:
            for comm in dict.fromkeys(comms):
                bring(words, comm.boxes.values(), rows)

        return RankLayers(tuple(layers), bring_words)

    def _room(self, number: int) -> DeviceRanks:
        while len(self._rooms) <= number:
            self._rooms.append(DeviceRanks(self.ranks, self.device))
        return self._rooms[number]

    def synchronize(self) -> None:
        """Waits for the device; raises MailboxTimeout where a poll has given up."""
        for group in (self._together, *self._rooms):
            group.synchronize()
