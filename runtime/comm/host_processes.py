"""Ranks that are processes, with mailboxes in memory of the host: the reference backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from kpipe.runtime.comm.agreement import agree, plan_of
from kpipe.runtime.comm.mailbox import MailboxError, MailboxSpec, check_sources
from kpipe.runtime.comm.process_gate import ProcessGate
from kpipe.runtime.comm.processes import Processes
from kpipe.runtime.comm.virtual_ranks import RankComm
from kpipe.runtime.comm.word_index import WORD_BYTES

if TYPE_CHECKING:
    from kpipe.runtime.layer import Layer

T = TypeVar("T")


class HostProcesses:
    """This process's end of a group whose mailboxes lie in files that all ranks map.

    To a layer it is what `VirtualRanks` is to a thread; `comm` is this rank's.  Mailboxes are made
    by all ranks in the same order, as layers that are prepared alike do.
    """

    def __init__(
        self, processes: Processes, timeout_s: float = 120.0, *, refuse_overwrite: bool = True
    ) -> None:
        if processes.roster is None:
            raise MailboxError(f"rank {processes.rank} has left its group")
        self.processes = processes
        self.ranks = processes.ranks
        self.refuse_overwrite = refuse_overwrite
        self.gate = ProcessGate(processes.roster, timeout_s)
        self._words: dict[str, tuple[MailboxSpec, list[list[torch.Tensor]]]] = {}
        self.comm = RankComm(self, processes.rank)

    def words(self, spec: MailboxSpec) -> list[list[torch.Tensor]]:
        """The int32 buffers of a mailbox, by parity and rank.

        The first call is made by all ranks: each arms its own buffers, and nobody goes on before
        all have.  Raises MailboxError on every rank where they declare it differently.
        """
        if spec.name not in self._words:
            check_sources(spec, self.ranks)
            self._words[spec.name] = (spec, self._made(spec))
        known, words = self._words[spec.name]
        if known != spec:
            raise MailboxError(f"mailbox {spec.name} is declared twice: {known} and {spec}")
        return words

    def agree(self, layer: Layer, number: int) -> None:
        """Raises LayerError on every rank where they do not prepare the same layer."""
        agree(self.processes, plan_of(layer, number, 0))

    def barrier(self, topic: str) -> None:
        """Returns once every rank has come here."""
        self.processes.barrier(topic)

    def run(self, function: Callable[[RankComm], T]) -> list[T]:
        """Calls `function` with this rank's comm, without autograd; the result alone in a list.

        What it raises is told to the others, which then stop.
        """
        try:
            with torch.no_grad():
                return [function(self.comm)]
        except BaseException as error:
            self.processes.fail(error)
            raise

    def _made(self, spec: MailboxSpec) -> list[list[torch.Tensor]]:
        folder, mine = self.processes.folder, self.processes.rank
        size = spec.armed_words().numel() * spec.parities
        paths = [folder / f"{spec.name}-{rank}" for rank in range(self.ranks)]
        with paths[mine].open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size * WORD_BYTES)  # a full disk is said here
        _mapped(spec, str(paths[mine]), size).fill_(spec.signed_sentinel)
        declared_alike(self.processes, spec)
        mapped = [_mapped(spec, str(path), size) for path in paths]
        self.processes.barrier(f"mailbox {spec.name} mapped")
        paths[mine].unlink()  # what is mapped stays; what comes later finds no old words
        return [[of_rank[parity] for of_rank in mapped] for parity in range(spec.parities)]


def _mapped(spec: MailboxSpec, path: str, size: int) -> torch.Tensor:
    """The words of one rank, [parities, *word_shape]."""
    words = torch.from_file(path, shared=True, size=size, dtype=torch.int32)
    return words.view(spec.parities, *spec.word_shape)


def declared_alike(processes: Processes, spec: MailboxSpec) -> None:
    """Returns once every rank has come here with the same declaration; MailboxError otherwise."""
    found = processes.exchange(f"mailbox {spec.name}", str(spec))
    other = next((rank for rank, text in enumerate(found) if text != found[0]), None)
    if other is not None:
        raise MailboxError(
            f"mailbox {spec.name}: rank 0 declares {found[0]}, rank {other} {found[other]}"
        )
