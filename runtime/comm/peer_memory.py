"""Memory of this process's GPU that the kernels of the other ranks can store into, and theirs.

Two ways to it: torch's symmetric memory, and handles of CUDA's inter-process communication.
Either gives addresses of single peers; neither touches a multicast address.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kpipe.runtime.comm.gate import RankAborted
from kpipe.runtime.comm.processes import Processes
from kpipe.runtime.metadata import LayerError

_TRIED = (RuntimeError, OSError, ImportError, AttributeError, TypeError)
"""What a transport raises that this torch or this machine does not have."""


@dataclass(frozen=True)
class PeerMemory:
    """The same number of int32 words on every rank, in rank order, as this rank's GPU sees them.

    `views[rank]` is that rank's memory as a tensor of this rank's device; `held` keeps the
    mappings alive.
    """

    views: tuple[torch.Tensor, ...]
    held: Any = field(repr=False)

    @property
    def bases(self) -> list[int]:
        """The address of every rank's first word, for kernels of this rank."""
        return [view.data_ptr() for view in self.views]


def symmetric(processes: Processes, count: int, device: torch.device) -> PeerMemory:
    """`count` words by `torch.distributed._symmetric_memory`; all ranks call together."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    words = symm_mem.empty(count, dtype=torch.int32, device=device)
    handle = symm_mem.rendezvous(words, dist.group.WORLD)
    views = [
        words if rank == processes.rank else handle.get_buffer(rank, (count,), torch.int32)
        for rank in range(processes.ranks)
    ]
    found = [view.data_ptr() for view in views]
    if found != list(handle.buffer_ptrs):
        raise RuntimeError(f"buffers at {found}, the handle says {list(handle.buffer_ptrs)}")
    return PeerMemory(tuple(views), (words, handle))


def shared_by_handle(processes: Processes, count: int, device: torch.device) -> PeerMemory:
    """`count` words by handles of CUDA IPC; all ranks call together."""
    words = torch.empty(count, dtype=torch.int32, device=device)
    try:
        _, *parts = words.untyped_storage()._share_cuda_()
        said: Any = [
            [part.hex(), True] if isinstance(part, bytes) else [part, False] for part in parts
        ]
    except RuntimeError as error:
        said = str(error).splitlines()[0]
    views = []
    for rank, theirs in enumerate(processes.exchange("handles of memory", said)):
        if isinstance(theirs, str):
            raise RuntimeError(f"rank {rank}: {theirs}")
        if rank == processes.rank:
            views.append(words)
            continue
        values = [bytes.fromhex(value) if is_bytes else value for value, is_bytes in theirs]
        # Opened for this rank's own device: its kernels are the ones that store there.
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *values)
        views.append(torch.empty(0, dtype=torch.int32, device=device).set_(storage, 0, (count,)))
    return PeerMemory(tuple(views), words)


Maker = Callable[[Processes, int, torch.device], PeerMemory]
TRANSPORTS: dict[str, Maker] = {"symmetric": symmetric, "ipc": shared_by_handle}
"""By name; `auto` takes the first one that works on every rank."""


def working_transport(processes: Processes, device: torch.device, wanted: str) -> tuple[str, str]:
    """The name of the transport that all ranks can use, and why those ahead of it were left out.

    `wanted` is one of TRANSPORTS or `auto`.  Each is tried on a few words.  Raises LayerError for
    an unknown name, and on every rank where none works.
    """
    if wanted != "auto" and wanted not in TRANSPORTS:
        raise LayerError(f"transport {wanted!r}; choose from auto, {', '.join(TRANSPORTS)}")
    reasons: list[str] = []
    for name in TRANSPORTS if wanted == "auto" else (wanted,):
        problem = ""
        try:
            memory = TRANSPORTS[name](processes, 64 + processes.ranks, device)
        except RankAborted:
            raise
        except _TRIED as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        problems = processes.exchange(f"transport {name}", problem)
        if not any(problems):
            problems = processes.exchange(f"stores by {name}", _stored(processes, memory, device))
        failed = next(((rank, text) for rank, text in enumerate(problems) if text), None)
        if failed is None:
            return name, "; ".join(reasons)
        reasons.append(f"{name}, rank {failed[0]}: {failed[1]}")
    raise LayerError(f"the ranks cannot store into each other's memory: {'; '.join(reasons)}")


def _stored(processes: Processes, memory: PeerMemory, device: torch.device) -> str:
    """Every rank stores its number into every rank's memory; what is wrong with what has come."""
    mine, problem = memory.views[processes.rank], ""
    mine.fill_(-1)
    _synchronize(device)
    processes.barrier("memory filled")
    try:
        for view in memory.views:
            view[processes.rank] = processes.rank
        _synchronize(device)
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    problems = processes.exchange("memory stored", problem)
    if any(problems):
        return problem
    found, wanted = mine[: processes.ranks].tolist(), list(range(processes.ranks))
    return "" if found == wanted else f"words {found} have come, not {wanted}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
