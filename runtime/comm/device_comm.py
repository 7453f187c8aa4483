"""One rank's end of a group whose mailboxes lie in memory of devices, whatever the ranks are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kpipe.runtime.comm.device_mailbox import DeviceMailbox, TimeoutRecord, peer_table
from kpipe.runtime.comm.mailbox import MailboxError, MailboxSpec

if TYPE_CHECKING:
    from kpipe.runtime.layer import Layer

SMS_PER_GPC = 16
"""Multiprocessors of the smallest GPC of an H200 (some have 18); a cluster lies within one."""


class DeviceGroup(Protocol):
    """What a rank asks of its group: streams of one device, or processes on several."""

    ranks: int
    device: torch.device
    lockstep: bool
    resident: int
    widest_cluster: int

    def place(self, spec: MailboxSpec, parity: int, rank: int) -> tuple[torch.Tensor, list[int]]:
        """One rank's int32 words of one parity, armed, and the addresses of all ranks' words."""

    def barrier(self, topic: str) -> None:
        """Returns once every rank that is a process has come here."""

    def agree(self, layer: Layer, number: int) -> None:
        """Raises LayerError on every rank where they do not prepare the same layer."""

    def before_poll(self, rank: int) -> None:
        """Called ahead of every launch that polls."""


class DeviceComm:
    """One rank's view of its group: `rank`, `ranks`, its mailboxes, and how it is driven.

    `in_halves`: launches that publish and then poll are made in two, so that every rank's first
    half is ahead of any rank's second.  `resident`: CTAs, one a multiprocessor, that this rank can
    count on to run at the same time; `widest_cluster`: CTAs of a cluster that has room beside what
    other ranks have waiting on its device.  `key` tells its streams from other ranks'.
    """

    def __init__(self, group: DeviceGroup, rank: int) -> None:
        self.rank = rank
        self.ranks = group.ranks
        self.stage = ""
        self.in_halves = group.lockstep
        self.resident = group.resident
        self.widest_cluster = group.widest_cluster
        self.key = 0 if group.lockstep else rank
        self.record = TimeoutRecord(rank, group.device)
        self.boxes: dict[tuple[str, int], DeviceMailbox] = {}
        self._group = group

    def mailbox(self, spec: MailboxSpec, parity: int) -> DeviceMailbox:
        """This rank's end of one parity of `spec`; MailboxError for a parity that does not exist,
        and where the name is known with another declaration."""
        if not 0 <= parity < spec.parities:
            raise MailboxError(
                f"mailbox {spec.name}: no parity {parity} among {spec.parities}, rank {self.rank}"
            )
        words, bases = self._group.place(spec, parity, self.rank)
        key = (spec.name, parity)
        if key not in self.boxes:
            self.boxes[key] = DeviceMailbox(
                spec,
                parity,
                self.rank,
                self.ranks,
                words.view(spec.dtype).view(spec.shape),
                peer_table(spec, self.rank, bases, self._group.device),
                self.record.fault,
            )
        return self.boxes[key]

    def agree(self, layer: Layer, number: int) -> None:
        """Raises LayerError on every rank where they do not prepare the same layer."""
        self._group.agree(layer, number)

    def barrier(self, topic: str) -> None:
        """Returns once every rank that is a process has come here."""
        self._group.barrier(topic)

    def before_poll(self) -> None:
        """Called ahead of every launch that polls; in lockstep the other ranks go first."""
        self._group.before_poll(self.rank)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for the host."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
