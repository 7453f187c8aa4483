"""`kpipe bench` for ranks that exchange words, on one GPU: peer stores do not leave it.

First rank 0 alone, with the GPU to itself and its launches whole, as on a GPU of its own.  No other
rank is compiled or runs: what peers would have sent is made up for every layer, see bench_peers.py,
and comes ahead of each replay, outside the time, as the kernels re-arm what they have read.  So a
poll finds its words at once, as dsa_tp's launches find their inputs, and what is missing from the
times is the way over NVLink and ranks that are late.

Then all ranks in lockstep, captured: their launches one behind the other, divided by the ranks.  It
bounds a rank's work from above: a launch that sends and polls is made in two there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kpipe.runtime.bench_inputs import TimedLayer, make_inputs, prepared
from kpipe.runtime.bench_peers import Peers
from kpipe.runtime.comm.device_ranks import DeviceComm, DeviceRanks
from kpipe.runtime.comm.mailbox import MailboxTimeout
from kpipe.runtime.layer import Layer
from kpipe.runtime.memory import Scratch
from kpipe.runtime.sharding import Shard

LOCKSTEP = "lockstep"
"""What the time of all ranks in lockstep, divided by the ranks, is called among the times."""


class AloneBench:
    """Rank 0 of a layer class, ready to be timed at one number of rows after the other.

    `layers` of them have inputs of their own, and each is there `repeat` times: with mailboxes of
    its own, so that a launch that polls can be chained with itself.  `backend` as of
    `Layer.prepare`.
    """

    def __init__(
        self,
        layer_class: type[Layer],
        arch: str,
        layers: int,
        repeat: int = 1,
        device: str = "cuda",
        backend: str = "cuda",
    ) -> None:
        self.layer_class, self.arch, self.count, self.repeat = layer_class, arch, layers, repeat
        self.device, self.backend = device, backend
        self.peers = Peers(layer_class, layers * repeat, device, backend)

    def ready(self, rows: int, q: int, context: int) -> list[TimedLayer]:
        """`layers` layers, and behind them the same ones again; what was ready before is not."""
        self.peers.forget()
        generator = torch.Generator(self.device).manual_seed(0)
        shard, scratch = self.peers.shard, Scratch(self.device)
        inputs = [
            make_inputs(self.layer_class, rows, q, context, generator, shard)
            for _ in range(self.count)
        ]
        return [
            prepared(
                *(self.layer_class, made, self.arch, number, scratch),
                comm=self.peers.comm(number),
                backend=self.backend,
            )
            for number, made in enumerate(inputs * self.repeat)
        ]


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

    def timeouts(self) -> list[MailboxTimeout]:
        """What is known of polls that have given up."""
        return self._together.timeouts()
