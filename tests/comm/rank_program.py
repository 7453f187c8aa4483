"""What the processes of tests/comm/test_processes.py run: `rank_program.py PART FOLDER...`.

Every rank writes what it found, as JSON, into the file rank-N.json of the last folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from layer_inputs import engine_inputs

from kpipe.runtime.comm import peer_memory
from kpipe.runtime.comm.device_processes import DeviceProcesses
from kpipe.runtime.comm.host_processes import HostProcesses
from kpipe.runtime.comm.mailbox import MailboxSpec
from kpipe.runtime.comm.processes import Processes
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.layer import Layer

SPEC = MailboxSpec("rows", (2, 3, 4), torch.int32, 0xFFFFFFFF, source_axis=0)
LENGTHS = (70, 3)


def raised(function) -> list[str]:  # type: ignore[no-untyped-def]
    """Type and text of what a call raises, with its further attributes where it has some."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - told to the test
        more = [str(getattr(error, name)) for name in ("mailbox", "stage") if hasattr(error, name)]
        return [type(error).__name__, str(error), *more]
    return []


def prepared(layer_class: type[Layer], comm) -> tuple[Layer, object]:  # type: ignore[no-untyped-def]
    inputs = engine_inputs(layer_class, LENGTHS, rank=comm.rank)
    return inputs.prepared(layer_class, arch="sm_90a", comm=comm), inputs.step


def unlike(processes: Processes, folders: list[str]) -> dict[str, list[str]]:
    """Rank 1 has other files and another table; later the ranks declare a mailbox differently."""
    group = HostProcesses(processes)
    layer_class = load_layer(folders[processes.rank])
    found = {"prepare": raised(lambda: prepared(layer_class, group.comm))}
    rows = (2, 3 + processes.rank, 4)
    other = MailboxSpec("other", rows, torch.int32, 0xFFFFFFFF, source_axis=0)
    found["mailbox"] = raised(lambda: group.comm.mailbox(other, 0))
    topic = f"topic {processes.rank}"
    found["topic"] = raised(lambda: processes.exchange(topic))
    return found | {"device": on_device(processes)}


def on_device(processes: Processes) -> list[str]:
    """A group of devices whose memory is the host's, in place of GPUs that see each other."""

    def broken(processes, count, device):  # type: ignore[no-untyped-def]
        raise RuntimeError("no such memory\nat all")

    def files(processes, count, device):  # type: ignore[no-untyped-def]
        views = []
        for rank in range(processes.ranks):
            path = str(processes.folder / f"memory-{count}-{rank}")
            views.append(torch.from_file(path, shared=True, size=count, dtype=torch.int32))
        return peer_memory.PeerMemory(tuple(views), None)

    peer_memory.TRANSPORTS = {"broken": broken, "files": files}
    import kpipe.runtime.comm.device_processes as module

    module.TRANSPORTS = peer_memory.TRANSPORTS
    group = DeviceProcesses(processes, device=torch.device("cpu"))
    box = group.comm.mailbox(SPEC, 1)
    armed = bool((box.local == -1).all())
    own = box.local[processes.rank].data_ptr()  # where this rank's words lie at home
    processes.barrier("looked")
    mine = box.local.data_ptr() - group.place(SPEC, 0, processes.rank)[0].data_ptr()
    theirs = group._boxes["rows"][1].views[1 - processes.rank].view(2, 2, 3, 4)
    right = int(box.peers[1 - processes.rank]) == theirs[1, processes.rank].data_ptr()
    theirs[1, processes.rank] = 7 + processes.rank  # what a kernel does by way of the table
    processes.barrier("stored")
    come = box.local[1 - processes.rank].unique().tolist()
    group.fill()
    full = bool((box.local == -(1 << 31)).all())
    group.arm()
    again = bool((box.local == -1).all())
    flags = [
        armed,
        int(box.peers[processes.rank]) == own,
        mine == 2 * 3 * 4 * 4,
        right,
        full,
        again,
    ]
    return [group.transport, group.left_out, str(flags), str(come)]


def killed(processes: Processes, folders: list[str]) -> dict[str, list[str]]:
    """Rank 1 is gone in the middle of its second step; then the others meet."""
    group = HostProcesses(processes)
    layer, step = prepared(load_layer(folders[0]), group.comm)
    layer.run(step)
    if processes.rank == 1:
        publish = layer.topk_local

        def end(*operands, **named) -> None:  # type: ignore[no-untyped-def]
            os.kill(os.getpid(), signal.SIGKILL)
            publish(*operands, **named)

        layer.topk_local = end
    found = {"step": raised(lambda: layer.run(step))}
    return found | {"meeting": raised(lambda: processes.barrier("behind the step"))}


def failed(processes: Processes, folders: list[str]) -> dict[str, list[str]]:
    """Rank 1 raises in the middle of a step, told to the group by the context that it leaves."""
    group = HostProcesses(processes)
    layer, step = prepared(load_layer(folders[0]), group.comm)
    if processes.rank == 1:

        def end(*operands, **named) -> None:  # type: ignore[no-untyped-def]
            raise ValueError("broken on purpose")

        layer.topk_local = end
    return {"step": raised(lambda: group.run(lambda comm: layer.run(step)))}


def main() -> None:
    part, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    with Processes.join() as processes:
        found = {"unlike": unlike, "killed": killed, "failed": failed}[part](processes, folders)
        path = Path(folders[-1]) / f"rank-{processes.rank}.json"
        path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
