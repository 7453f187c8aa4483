"""Ranks as threads of one process: the transport of tests and of the reference backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from kpipe.runtime.comm.gate import Gate, RankAborted
from kpipe.runtime.comm.mailbox import Mailbox, MailboxError, MailboxSpec, check_sources

if TYPE_CHECKING:
    from kpipe.runtime.comm.process_gate import ProcessGate
    from kpipe.runtime.layer import Layer

__all__ = ["RankAborted", "RankComm", "SingleRank", "VirtualRanks"]

T = TypeVar("T")


class HostGroup(Protocol):
    """What a rank asks of its group: threads, or processes that share memory."""

    ranks: int
    refuse_overwrite: bool

    @property
    def gate(self) -> Gate | ProcessGate:
        """Where ranks wait for each other."""

    def words(self, spec: MailboxSpec) -> list[list[torch.Tensor]]:
        """The int32 buffers of a mailbox, by parity and rank, armed."""

    def barrier(self, topic: str) -> None:
        """Returns once every rank that is a process has come here."""

    def agree(self, layer: Layer, number: int) -> None:
        """Raises LayerError on every rank where they do not prepare the same layer."""


class RankComm:
    """One rank's view of its group: `rank`, `ranks`, and the mailboxes.

    `stage` names what the rank is doing; errors of its mailboxes quote it.
    """

    def __init__(self, group: HostGroup, rank: int) -> None:
        self.rank = rank
        self.ranks = group.ranks
        self.stage = ""
        self._group = group

    def mailbox(self, spec: MailboxSpec, parity: int) -> Mailbox:
        """This rank's end of one parity of `spec`; all ends share their memory.

        Raises MailboxError for a parity that does not exist, and where the name is known with
        another declaration.
        """
        words = self._group.words(spec)
        if not 0 <= parity < spec.parities:
            raise MailboxError(
                f"mailbox {spec.name}: no parity {parity} among {spec.parities}, rank {self.rank}"
            )
        return Mailbox(
            spec,
            parity,
            self.rank,
            words[parity],
            self._group.gate,
            stage=lambda: self.stage,
            refuse_overwrite=self._group.refuse_overwrite,
        )

    def agree(self, layer: Layer, number: int) -> None:
        """Raises LayerError on every rank where they do not prepare the same layer."""
        self._group.agree(layer, number)

    def barrier(self, topic: str) -> None:
        """Returns once every rank that is a process has come here."""
        self._group.barrier(topic)

    @contextmanager
    def in_stage(self, stage: str) -> Iterator[None]:
        """Names the stage for the duration of the block."""
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before

    def wait_until_blocked(self, others: Iterable[int]) -> None:
        """Holds this rank back until each of `others` is blocked in a poll or has ended.

        Makes the worst interleaving of a protocol reproducible without sleeping.  Raises
        TimeoutError at the group's deadline, RankAborted when another rank fails.
        """
        self._group.gate.wait_until_blocked(self.rank, others)


class VirtualRanks:
    """A group of `ranks` threads with mailboxes between them.

    A poll that waits longer than `timeout_s` seconds raises MailboxTimeout.  With
    `refuse_overwrite` (the default) a store onto a word that its reader has not re-armed is an
    error instead of a lost word.  A group whose run failed cannot run again: its mailboxes hold
    whatever the failure left behind.
    """

    def __init__(
        self, ranks: int, timeout_s: float = 20.0, *, refuse_overwrite: bool = True
    ) -> None:
        if ranks < 1:
            raise ValueError(f"a group has at least one rank, not {ranks}")
        self.ranks = ranks
        self.refuse_overwrite = refuse_overwrite
        self.gate = Gate(ranks, timeout_s)
        self._boxes: dict[str, tuple[MailboxSpec, list[list[torch.Tensor]]]] = {}
        self._boxes_lock = threading.Lock()
        self._comms = [RankComm(self, rank) for rank in range(ranks)]

    def rank(self, rank: int) -> RankComm:
        """The comm of one rank, always the same object."""
        return self._comms[rank]

    def words(self, spec: MailboxSpec) -> list[list[torch.Tensor]]:
        """The int32 buffers of a mailbox, by parity and rank.

        The first call allocates and arms them for all ranks in one step, so no rank can store
        into a buffer that is not armed yet (on a device this takes a barrier).  Raises
        MailboxError where the declaration differs from the first or does not fit the group.
        """
        with self._boxes_lock:
            if spec.name not in self._boxes:
                check_sources(spec, self.ranks)
                armed = [
                    [spec.armed_words() for _ in range(self.ranks)] for _ in range(spec.parities)
                ]
                self._boxes[spec.name] = (spec, armed)
            known, words = self._boxes[spec.name]
        if known != spec:
            raise MailboxError(f"mailbox {spec.name} is declared twice: {known} and {spec}")
        return words

    def agree(self, layer: Layer, number: int) -> None:
        """Nothing: the ranks of one process share its code."""

    def barrier(self, topic: str) -> None:
        """Nothing: a poll of a thread waits as long as it takes the others to come."""

    def run(self, function: Callable[[RankComm], T]) -> list[T]:
        """Calls `function` once per rank, each in its own thread; results in rank order.

        The first exception ends the run: every other rank's next or pending mailbox call raises
        RankAborted, and the caller sees the original exception with a note that names its rank.
        Autograd is off inside, and torch uses one thread per rank.
        """
        if self.gate.failure is not None:
            raise RankAborted(f"rank {self.gate.failure[0]} of this group failed; make a new group")
        results: list = [None] * self.ranks

        def body(rank: int) -> None:
            try:
                with torch.no_grad():
                    results[rank] = function(self._comms[rank])
                self.gate.end(rank)
            except BaseException as error:  # noqa: BLE001 - handed to the caller below
                self.gate.abort(rank, error)

        self.gate.start(range(self.ranks))
        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.ranks)
        ]
        with _one_torch_thread():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self.gate.failure is not None:
            rank, error = self.gate.failure
            error.add_note(f"raised by rank {rank} of {self.ranks}")
            raise error
        return results


class SingleRank(RankComm):
    """Rank 0 of 1: what it publishes it reads itself.

    A poll for a word that it has not stored fails at once, because nobody else can store it.
    """

    def __init__(self) -> None:
        group = VirtualRanks(1)
        group.gate.start((0,))
        super().__init__(group, 0)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """New threads take over torch's thread count, so one per rank has to be set outside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
