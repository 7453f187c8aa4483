"""Starts the ranks of a group as processes of this machine, as torchrun would."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from kpipe.runtime.comm import multicast

GRACE_S = 30.0
"""How long ranks may take to end once one of them has not ended well."""
_LOOK_S = 0.02


@dataclass(frozen=True)
class Ended:
    """How the process of a rank has ended; `code` is negative for a signal."""

    rank: int
    code: int
    stopped: bool = False  # by the launcher, because it had not ended in time

    @property
    def text(self) -> str:
        """For people: `rank 1 ended by signal 9`."""
        how = f"by signal {-self.code}" if self.code < 0 else f"with code {self.code}"
        late = ", stopped because it did not end by itself" if self.stopped else ""
        return f"rank {self.rank} ended {how}{late}"


def started_here() -> bool:
    """Whether this process is a rank already: torchrun's variables are there."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
    output: Sequence[str] | None = None,
) -> list[Ended]:
    """Runs `command` (behind this Python) once a rank and waits for all; results in rank order.

    The ranks meet at a store that this process keeps.  `environment` comes on top of this
    process's.  Where a rank has not ended well the others have `grace_s` seconds; after
    `timeout_s` seconds all are stopped.  With `output` what a rank says goes into the file of that
    name, one a rank.  Files that ranks share vanish at the end.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    warnings = [f"-W{option}" for option in sys.warnoptions]
    with tempfile.TemporaryDirectory(prefix="kpipe-ranks-") as shared:
        started = []
        for rank in range(ranks):
            variables = _variables(rank, ranks, store.port, shared) | dict(environment or {})
            said = open(output[rank], "wb") if output else None  # noqa: SIM115 - closed below
            words = [sys.executable, *warnings, *command]
            started.append(
                subprocess.Popen(words, env=variables, stdout=said, stderr=said and said.fileno())
            )
            if said is not None:
                said.close()
        try:
            return _wait(started, timeout_s, grace_s)
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()


def _variables(rank: int, ranks: int, port: int, shared: str) -> dict[str, str]:
    """The environment of a rank."""
    found = dict(os.environ)
    multicast.turn_off(found)
    found.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; host names need not resolve
    found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    return found | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TMPDIR": shared,
    }


def _wait(
    started: Sequence[subprocess.Popen], timeout_s: float | None, grace_s: float
) -> list[Ended]:
    deadline = time.monotonic() + (inf if timeout_s is None else timeout_s)
    failed = False
    stopped: set[int] = set()
    while any(process.poll() is None for process in started):
        now = time.monotonic()
        if not failed and any(process.poll() for process in started):
            failed, deadline = True, min(deadline, now + grace_s)
        if now >= deadline:
            for rank, process in enumerate(started):
                if process.poll() is None:
                    stopped.add(rank)
                    process.kill()
        time.sleep(_LOOK_S)
    return [Ended(r, process.returncode, r in stopped) for r, process in enumerate(started)]
