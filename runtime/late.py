"""Ranks that run at once, one of them late: held up ahead of a launch, on the device or the host.

A device is late by a spin on the stream that the launch goes to; nothing waits on the host.  A
thread of the CPU is late until every other rank waits for words, or has ended, so that the skew is
as large as the protocol lets it grow and no time is measured.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.comm.virtual_ranks import VirtualRanks
from kpipe.runtime.generated_folder import launches
from kpipe.runtime.prepared import Prepared, RankRun, launch_all, rehearse_blank

LOG = logging.getLogger(__name__)  # where a run is: see watch.py

Group = DeviceRanks | VirtualRanks
Left = list[list[tuple[str, SimpleNamespace]]]  # by rank and layer: the method, what it left

ROUNDS = 8
"""Runs with late ranks, behind the one that nobody is late in."""
MOST_CYCLES = 4_000_000
"""Of a random delay: about 2 ms of an H200, a hundred launches long."""


@dataclass
class HoldUp:
    """How a rank of a group is held up; one for the whole group."""

    group: Group
    _one: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if isinstance(self.group, DeviceRanks):  # loaded before a poll may stand in its way
            torch.cuda._sleep(1)
            torch.cuda.synchronize(self.group.device)

    def __call__(self, rank: int, cycles: int) -> None:
        """Holds up what `rank` does next: for device cycles, or until the others can do no more.

        Threads take turns: while one of them is late, another one passes by.
        """
        if isinstance(self.group, DeviceRanks):
            torch.cuda._sleep(cycles)
        elif self._one.acquire(blocking=False):
            try:
                others = [other for other in range(self.group.ranks) if other != rank]
                self.group.rank(rank).wait_until_blocked(others)
            finally:
                self._one.release()


def run_at_once(ready: Sequence[Sequence[Prepared]], group: Group) -> Left:
    """Every rank runs its layers; MailboxTimeout where words never come."""
    results = group.run(lambda comm: launch_all(ready[comm.rank]))
    if isinstance(group, DeviceRanks):
        group.synchronize()
    return results


def run_late(ready: Sequence[Sequence[Prepared]], group: Group, seed: int) -> list[list[RankRun]]:
    """One run that nobody is late in, then ROUNDS in which one rank of each layer is.

    Rank, launch and delay are drawn from `seed`.  The result is the first run's; `unstable` counts
    the rounds that left other bits in a layer of a rank.  Raises MailboxTimeout where a rank waits
    for ever.
    """
    late = _Late(HoldUp(group))
    late.install(ready)
    if isinstance(group, DeviceRanks):
        rehearse_blank(ready, group)
    runs = [
        [one.finished(*left) for one, left in zip(of_rank, found, strict=True)]
        for of_rank, found in zip(ready, run_at_once(ready, group), strict=True)
    ]
    LOG.info("run, nobody late")
    differing = [[0] * len(of_rank) for of_rank in ready]
    draw = random.Random(seed)
    for number in range(1, ROUNDS + 1):
        late.drawn(draw, ready)
        other = _count(run_at_once(ready, group), ready, runs, differing)
        bits = f"other bits in {other} layers" if other else "the same bits"
        LOG.info("round %d of %d: %s; late: %s", number, ROUNDS, bits, late)
    for of_rank, counts in zip(runs, differing, strict=True):
        for run, count in zip(of_rank, counts, strict=True):
            run.unstable = count
    return runs


def _count(
    found: Left,
    ready: Sequence[Sequence[Prepared]],
    runs: Sequence[Sequence[RankRun]],
    differing: list[list[int]],
) -> int:
    """Counts a round, and in how many layers of ranks it left other bits.

    No tensor of it outlives the call, so the next one needs no new memory.
    """
    other = 0
    for rank, of_rank in enumerate(found):
        for number, (_, views) in enumerate(of_rank):
            same = same_bits(views, ready[rank][number].step.out, runs[rank][number])
            differing[rank][number] += not same
            other += not same
    return other


def same_bits(views: SimpleNamespace, out: Tensor, kept: RankRun) -> bool:
    """Whether a run has left the bits of another one, in its output and in every buffer."""
    pairs = [(out, kept.out)]
    pairs += [(v, getattr(kept.views, n)) for n, v in vars(views).items() if isinstance(v, Tensor)]
    return all(torch.equal(_bytes(one), _bytes(other)) for one, other in pairs)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def replace_op(layer: Any, name: str, around: Callable[[Callable[..., None]], Any]) -> None:
    """`around` makes the callable of an op of a prepared layer out of the one that it has."""
    setattr(layer, name, around(getattr(layer, name)))


class _Late:
    """Which launches are held up in the present round."""

    def __init__(self, hold_up: HoldUp) -> None:
        self.hold_up = hold_up
        self.now: Mapping[tuple[int, int, str], int] = {}  # rank, layer, op -> cycles

    def install(self, ready: Sequence[Sequence[Prepared]]) -> None:
        """Every launch asks first whether it is late."""
        for rank, of_rank in enumerate(ready):
            for number, one in enumerate(of_rank):
                for name in dict.fromkeys(_ops(one)):
                    replace_op(one.layer, name, self._asking((rank, number, name)))

    def drawn(self, draw: random.Random, ready: Sequence[Sequence[Prepared]]) -> None:
        """Another rank, launch and delay for every layer."""
        now = {}
        for number, one in enumerate(ready[0]):
            place = (draw.randrange(len(ready)), number, draw.choice(_ops(one)))
            now[place] = draw.randrange(1, MOST_CYCLES)
        self.now = now

    def __str__(self) -> str:
        """Who is late in this round."""
        return ", ".join(
            f"rank {rank} at {op} of layer {number} by {cycles / 1e6:.1f} Mcycles"
            for (rank, number, op), cycles in self.now.items()
        )

    def _asking(self, place: tuple[int, int, str]) -> Callable[[Callable[..., None]], Any]:
        def around(inner: Callable[..., None]) -> Callable[..., None]:
            def call(*operands: Any, **named: Any) -> None:
                if cycles := self.now.get(place, 0):
                    self.hold_up(place[0], cycles)
                inner(*operands, **named)

            return call

        return around


def _ops(one: Prepared) -> list[str]:
    """Names of the ops that a step launches, in host order."""
    layer = one.layer
    method = layer.TABLE[(layer.arch, one.step.q)][layer.declared_rows(one.step)]
    return [op.name for op in launches(type(layer), method)]
