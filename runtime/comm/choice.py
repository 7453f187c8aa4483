"""Which end of which group a layer works with: given, or made where it is alone."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kpipe.runtime.comm.device_comm import DeviceComm
from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.comm.virtual_ranks import SingleRank
from kpipe.runtime.metadata import LayerError


class Exchanging(Protocol):
    """What is asked of a layer."""

    NAME: str
    RANKS: int
    CONTEXT_PARALLEL: bool
    backend: str


class Alone:
    """The group of a layer without mailboxes."""

    rank, ranks, stage = 0, 1, ""

    def agree(self, layer: Exchanging, number: int) -> None:
        """Nothing: there is nobody to agree with."""

    def barrier(self, topic: str) -> None:
        """Nothing: there is nobody to wait for."""


def comm_for(layer: Exchanging, comm: Any, device: torch.device) -> Any:
    """The layer's comm: `comm` where it is given and fits, else one for a rank alone.

    Raises LayerError where the group has another number of ranks, where a layer that exchanges
    words has none, and where its mailboxes do not lie where the layer's backend runs.
    """
    if comm is not None and comm.ranks != layer.RANKS:
        raise LayerError(
            f"{layer.NAME} is generated for {layer.RANKS} ranks, the group has {comm.ranks}"
        )
    if not layer.CONTEXT_PARALLEL:
        return comm or Alone()
    on_device = layer.backend == "cuda"
    group = "DeviceRanks" if on_device else "VirtualRanks"
    processes = f"{'Device' if on_device else 'Host'}Processes(Processes.join()).comm"
    example = f"{group}({layer.RANKS}).rank(0)"
    if comm is None and layer.RANKS > 1:
        raise LayerError(
            f"{layer.NAME} runs on {layer.RANKS} ranks: prepare() needs `comm`, for example "
            f"{example}, or {processes} where each rank is a process"
        )
    if comm is None:
        return DeviceRanks(1, device).rank(0) if on_device else SingleRank()
    if on_device != isinstance(comm, DeviceComm):
        where = "device" if on_device else "host"
        raise LayerError(
            f"{layer.NAME}: the backend {layer.backend} needs mailboxes in memory of the {where}: "
            f"give `comm` as {example}"
        )
    return comm
