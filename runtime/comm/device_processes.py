"""Ranks that are processes with a GPU each, mailboxes in memory that all of them store into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from kpipe.runtime.comm.agreement import agree, plan_of
from kpipe.runtime.comm.device_comm import SMS_PER_GPC, DeviceComm, multiprocessors
from kpipe.runtime.comm.gate import RankAborted
from kpipe.runtime.comm.host_processes import declared_alike
from kpipe.runtime.comm.mailbox import MailboxError, MailboxSpec, MailboxTimeout, check_sources
from kpipe.runtime.comm.peer_memory import TRANSPORTS, PeerMemory, working_transport
from kpipe.runtime.comm.process_gate import processes_of
from kpipe.runtime.comm.processes import Processes
from kpipe.runtime.metadata import LayerError

if TYPE_CHECKING:
    from kpipe.runtime.layer import Layer

T = TypeVar("T")


class DeviceProcesses:
    """This process's end of a group whose mailboxes lie in the memory of the ranks' GPUs.

    To a layer it is what `DeviceRanks` is to a stream; a rank has its GPU for itself, so it counts
    on all multiprocessors.  Mailboxes are made by all ranks in the same order, as layers that are
    prepared alike do.  `device` is the rank's own GPU by default.  `transport` is `auto` or one of
    TRANSPORTS; afterwards it names the one in use, and `left_out` says why those ahead of it are
    not.  Raises LayerError where there are fewer GPUs than ranks, and where no transport works.
    """

    lockstep = False

    def __init__(
        self, processes: Processes, transport: str = "auto", device: torch.device | None = None
    ) -> None:
        self.processes = processes
        self.ranks = processes.ranks
        self.device = device or own_device(processes)
        self.resident, self.widest_cluster = multiprocessors(self.device), SMS_PER_GPC
        self.transport, self.left_out = working_transport(processes, self.device, transport)
        self._boxes: dict[str, tuple[MailboxSpec, PeerMemory]] = {}
        self.comm = DeviceComm(self, processes.rank)

    def rank(self, rank: int) -> DeviceComm:
        """The comm of this process's rank; LayerError for another one."""
        if rank != self.processes.rank:
            raise LayerError(f"this process is rank {self.processes.rank}, not {rank}")
        return self.comm

    @property
    def here(self) -> range:
        """The ranks that this process drives: its own."""
        return range(self.processes.rank, self.processes.rank + 1)

    def place(self, spec: MailboxSpec, parity: int, rank: int) -> tuple[torch.Tensor, list[int]]:
        """This rank's words of one parity, and the addresses of all ranks' words.

        The first call for a mailbox is made by all ranks and makes it for both parities: filled
        with the sentinel, the device idle, and nobody goes on before all have done so.  Raises
        MailboxError on every rank where they declare it differently.
        """
        if spec.name not in self._boxes:
            check_sources(spec, self.ranks)
            declared_alike(self.processes, spec)
            count = spec.armed_words().numel() * spec.parities
            memory = TRANSPORTS[self.transport](self.processes, count, self.device)
            self._boxes[spec.name] = (spec, memory)
            self._fill(spec, memory, spec.signed_sentinel)
            self.barrier(f"mailbox {spec.name} armed")
        known, memory = self._boxes[spec.name]
        if known != spec:
            raise MailboxError(f"mailbox {spec.name} is declared twice: {known} and {spec}")
        words = self._words(spec, memory)
        skipped = parity * words[0].numel() * words.element_size()
        return words[parity], [base + skipped for base in memory.bases]

    def agree(self, layer: Layer, number: int) -> None:
        """Raises LayerError on every rank where they do not prepare the same layer."""
        agree(self.processes, plan_of(layer, number, self.resident))

    def before_poll(self, rank: int) -> None:
        """Nothing: every rank's launches run on a GPU of its own."""

    def barrier(self, topic: str) -> None:
        """Returns once this rank's device is idle and every rank has come here."""
        self.synchronize()
        self.processes.barrier(topic)

    def fill(self) -> None:
        """Words that say nothing come into this rank's mailboxes, in the order of the stream."""
        for spec, memory in self._boxes.values():
            self._fill(spec, memory, spec.silent_word)

    def arm(self) -> None:
        """Every word of every mailbox is the sentinel again, and all devices are idle."""
        self.barrier("idle")
        for spec, memory in self._boxes.values():
            self._fill(spec, memory, spec.signed_sentinel)
        self.barrier("armed")

    def run(self, function: Callable[[DeviceComm], T]) -> list[T]:
        """Calls `function` with this rank's comm, without autograd, on the current stream; the
        result alone in a list.  What it raises is told to the others, which then stop."""
        try:
            with torch.no_grad():
                return [function(self.comm)]
        except BaseException as error:
            told = self._told(error) if isinstance(error, RuntimeError) else error
            self.processes.fail(told)
            if told is error:
                raise
            raise told from error

    def synchronize(self) -> None:
        """Waits for this rank's device.

        Raises MailboxTimeout where a poll has given up, and RankAborted where the device has
        failed after the process of another rank had ended.
        """
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            told = self._told(error)
            self.processes.fail(told)
            if told is error:
                raise
            raise told from error

    def timeouts(self) -> list[MailboxTimeout]:
        """What this rank's record says of a poll that has given up."""
        error = self.comm.record.error(self.comm.boxes.values())
        return [] if error is None else [error]

    def _told(self, error: RuntimeError) -> RuntimeError:
        """An error of the device as what it came from, where that can be seen."""
        if isinstance(error, MailboxError | RankAborted):
            return error
        for timeout in self.timeouts():
            if gone := self._gone():
                timeout.add_note(f"{processes_of(gone)} no more")
            return timeout
        if gone := self._gone():
            first = str(error).splitlines()[0]
            return RankAborted(
                f"rank {self.processes.rank} stopped: {processes_of(gone)} no more ({first})"
            )
        return error

    def _gone(self) -> tuple[int, ...]:
        roster = self.processes.roster
        return roster.gone() if roster is not None else ()

    def _words(self, spec: MailboxSpec, memory: PeerMemory) -> torch.Tensor:
        mine = memory.views[self.processes.rank]
        return mine.view(spec.parities, *spec.word_shape)

    def _fill(self, spec: MailboxSpec, memory: PeerMemory, word: int) -> None:
        self._words(spec, memory).fill_(word)


def own_device(processes: Processes) -> torch.device:
    """This rank's GPU, made the current one; LayerError where the machine has too few of them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < processes.ranks:  # every rank sees the same, and none waits for another
        raise LayerError(too_few(processes.ranks, count))
    device = torch.device("cuda", processes.local_rank)
    torch.cuda.set_device(device)
    return device


def too_few(ranks: int, gpus: int) -> str:
    """What is said where ranks outnumber GPUs."""
    have = "no GPU" if not gpus else "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return (
        f"{ranks} ranks that are processes need a GPU each, this machine has {have}; "
        "--virtual-ranks runs them on one"
    )
