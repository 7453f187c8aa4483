"""Ranks as streams of one device: the transport of tests on a GPU.

Two ways to drive them.  In lockstep one thread at a time launches, all on the same streams, and
hands on ahead of every launch that polls: by then every rank's words have been sent by launches
that are ahead in the stream, so no poll ever waits, whatever the grids.  Concurrently every rank
has streams of its own and polls do wait; then everything that polls must fit on the device at
once, so a rank may count on its share of the multiprocessors only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from kpipe.runtime.comm.device_comm import SMS_PER_GPC, DeviceComm, multiprocessors
from kpipe.runtime.comm.mailbox import MailboxError, MailboxSpec, MailboxTimeout, check_sources
from kpipe.runtime.comm.turns import TurnAborted, Turns

if TYPE_CHECKING:
    from kpipe.runtime.layer import Layer

T = TypeVar("T")

GPCS = 8  # of an H200
POLLING_SMS = 96
"""Multiprocessors that the polls of ranks which run at once may hold; the rest is for launches
that the polls wait for, and those come as clusters, so it counts how much of one GPC is left."""


def room_at_once(ranks: int, multiprocessors: int) -> tuple[int, int]:
    """What each of `ranks` that share a device can count on: CTAs that run at the same time, one
    a multiprocessor, and CTAs of a cluster beside what the other ranks have waiting."""
    resident = min(multiprocessors, POLLING_SMS) // ranks
    return resident, max(SMS_PER_GPC - -(-resident * (ranks - 1) // GPCS), 1)


class DeviceRanks:
    """A group of `ranks` on one device.

    Mailboxes are allocated for all ranks and both parities at once and filled with the sentinel
    before anybody gets one.  Raises ValueError for a group without ranks.
    """

    def __init__(
        self, ranks: int, device: torch.device | str = "cuda", *, lockstep: bool = True
    ) -> None:
        if ranks < 1:
            raise ValueError(f"a group has at least one rank, not {ranks}")
        self.ranks = ranks
        self.device = torch.device(device)
        self.lockstep = lockstep
        count = multiprocessors(self.device)
        alone = lockstep or ranks == 1
        room = (count, SMS_PER_GPC) if alone else room_at_once(ranks, count)
        self.resident, self.widest_cluster = room
        self._buffers: dict[str, tuple[MailboxSpec, list[list[torch.Tensor]]]] = {}
        self._lock = threading.Lock()
        self._turns: Turns | None = None
        self._streams: list[torch.cuda.Stream] = []
        self._comms = [DeviceComm(self, rank) for rank in range(ranks)]

    def rank(self, rank: int) -> DeviceComm:
        """The comm of one rank, always the same object."""
        return self._comms[rank]

    @property
    def here(self) -> range:
        """The ranks that this process drives: all of them."""
        return range(self.ranks)

    def agree(self, layer: Layer, number: int) -> None:
        """Nothing: the ranks of one process share its code."""

    def barrier(self, topic: str) -> None:
        """Nothing: the ranks of one process are driven together."""

    def place(self, spec: MailboxSpec, parity: int, rank: int) -> tuple[torch.Tensor, list[int]]:
        """One rank's words of one parity, and the addresses of all ranks' words."""
        buffers = self.buffers(spec)[parity]
        return buffers[rank], [buffer.data_ptr() for buffer in buffers]

    def buffers(self, spec: MailboxSpec) -> list[list[torch.Tensor]]:
        """The int32 buffers of a mailbox, by parity and rank, armed.

        Raises MailboxError where the declaration differs from the first or does not fit the group.
        """
        with self._lock:
            if spec.name not in self._buffers:
                check_sources(spec, self.ranks)
                armed = [
                    [spec.armed_words().to(self.device) for _ in range(self.ranks)]
                    for _ in range(spec.parities)
                ]
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # the barrier: armed before anybody stores
                self._buffers[spec.name] = (spec, armed)
            known, buffers = self._buffers[spec.name]
        if known != spec:
            raise MailboxError(f"mailbox {spec.name} is declared twice: {known} and {spec}")
        return buffers

    def fill(self) -> None:
        """Words that say nothing come into every mailbox, in the order of the current stream."""
        for spec, by_parity in self._buffers.values():
            for words in (words for of_ranks in by_parity for words in of_ranks):
                words.fill_(spec.silent_word)

    def arm(self) -> None:
        """Every word of every mailbox is the sentinel again, and the device is idle."""
        for spec, by_parity in self._buffers.values():
            for words in (words for of_ranks in by_parity for words in of_ranks):
                words.fill_(spec.signed_sentinel)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def before_poll(self, rank: int) -> None:
        """In lockstep returns once every other rank has come to its next poll, or has ended."""
        if self._turns is not None:
            self._turns.pass_on(rank)

    def run(self, function: Callable[[DeviceComm], T]) -> list[T]:
        """Calls `function` once a rank, each in its own thread; results in rank order.

        In lockstep all of them launch on the caller's current stream, otherwise each on one of its
        own that begins behind the caller's and that the caller's waits for.  The first exception
        ends the run and is raised with a note that names its rank.
        """
        results: list = [None] * self.ranks
        errors: list[tuple[int, BaseException]] = []
        self._turns = Turns(self.ranks) if self.lockstep else None
        here = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        apart = here is not None and not self.lockstep
        if apart:
            self._make_streams()
            for stream in self._streams:  # all of them, before any has anything to wait for
                stream.wait_stream(here)

        def body(rank: int) -> None:
            failed = True
            try:
                if self._turns is not None:
                    self._turns.begin(rank)
                with torch.no_grad(), self._on_stream(rank, here):
                    results[rank] = function(self._comms[rank])
                failed = False
            except TurnAborted:
                pass
            except BaseException as error:  # noqa: BLE001 - handed to the caller below
                errors.append((rank, error))
            finally:
                if self._turns is not None:
                    self._turns.end(rank, failed=failed)

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._turns = None
        if apart:
            for stream in self._streams:
                here.wait_stream(stream)
        if errors:
            rank, error = errors[0]
            for timeout in self.timeouts() if isinstance(error, RuntimeError) else ():
                raise timeout from error
            error.add_note(f"raised by rank {rank} of {self.ranks}")
            raise error
        return results

    def synchronize(self) -> None:
        """Waits for the device; raises MailboxTimeout where a poll has given up."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            for timeout in self.timeouts():
                raise timeout from error
            raise

    def timeouts(self) -> list[MailboxTimeout]:
        """What the ranks' records say of polls that have given up."""
        found = [comm.record.error(comm.boxes.values()) for comm in self._comms]
        return [error for error in found if error is not None]

    def _make_streams(self) -> None:
        """One a rank, all of them before the first rank may wait for another one's words."""
        while len(self._streams) < self.ranks:
            self._streams.append(torch.cuda.Stream(self.device))

    @contextmanager
    def _on_stream(self, rank: int, here: torch.cuda.Stream | None) -> Iterator[None]:
        """The stream that a rank's thread launches on."""
        if here is None:
            yield
            return
        stream = here if self.lockstep else self._streams[rank]
        with torch.cuda.stream(stream):
            # Makes the device's context this thread's own; launches of the driver need one.
            torch.cuda.Event().record(stream)
            yield
