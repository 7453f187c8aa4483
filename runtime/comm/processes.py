"""A group of processes, one rank each, and what they tell each other by way of the host.

Started by torchrun, or by `launcher`.  What hosts exchange goes over gloo; that a rank has failed
or is no more is seen in the roster, so that nobody waits for it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from kpipe.runtime.comm.gate import RankAborted
from kpipe.runtime.comm.process_gate import Pause, processes_of, raise_if_aborted
from kpipe.runtime.comm.roster import Roster
from kpipe.runtime.metadata import LayerError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
EXCHANGE_S = 600.0
"""How long a rank waits for the others where hosts meet; they may compile, or judge results."""
JOIN_S = 60.0
_LAST_WORDS_S = 2.0  # a connection may break a moment before its process is seen to be gone


class Processes:
    """This process's place in the group: `rank` of `ranks`, `local_rank` on its machine.

    `join` makes one.  A context: an error that leaves it is told to the others, whose next or
    pending wait then ends with RankAborted.
    """

    def __init__(self, rank: int, ranks: int, local_rank: int, exchange_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.local_rank = local_rank
        self.exchange_s = exchange_s
        self.folder = Path()
        self.roster: Roster | None = None

    @classmethod
    def join(cls, *, join_s: float = JOIN_S, exchange_s: float = EXCHANGE_S) -> Processes:
        """Joins the group that the environment describes; returns once all ranks are there.

        Raises LayerError where torchrun's variables are missing, where a rank does not come within
        `join_s` seconds, and where the ranks do not share a machine.
        """
        missing = [name for name in VARIABLES if name not in os.environ]
        if missing:
            raise LayerError(
                f"this process is no rank of a group: {', '.join(missing)} not set; start it with "
                "torchrun --nproc-per-node N"
            )
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        _meet(rank, ranks, join_s, exchange_s)
        made = cls(rank, ranks, local_rank, exchange_s)
        made._share_folder()
        return made

    def _share_folder(self) -> None:
        """Rank 0 makes a folder; all enter the roster there."""
        mine = tempfile.mkdtemp(prefix="kpipe-group-") if self.rank == 0 else ""
        self.folder = Path(self.exchange("folder", mine)[0])
        roster = Roster(self.folder, self.rank, self.ranks)
        there = self.folder.is_dir()
        if there:
            roster.enter()
        seen = self.exchange("roster entered", there)
        if not all(seen):
            self.leave()
            blind = ", ".join(str(rank) for rank, found in enumerate(seen) if not found)
            raise LayerError(
                f"rank {blind} does not see the folder of rank 0, {self.folder}: the ranks of a "
                "group run on one machine"
            )
        roster.see()
        self.exchange("roster seen")
        self.roster = roster

    # -- telling each other ----------------------------------------------------------------------

    def exchange(self, topic: str, value: Any = None) -> list[Any]:
        """What every rank says about `topic`, in rank order; a value is what JSON can hold.

        All ranks take part, each with the same topic.  Raises RankAborted where another one has
        failed, is no more, does not come within `exchange_s` seconds, or has come to another
        topic.
        """
        said = json.dumps([topic, value]).encode()
        sizes = self._gathered(topic, torch.tensor([len(said)]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        texts = self._gathered(topic, padded)
        found = [
            json.loads(bytes(text[: int(size)].tolist()))
            for text, size in zip(texts, sizes, strict=True)
        ]
        if any(theirs != topic for theirs, _ in found):
            places = ", ".join(f"rank {r} at `{theirs}`" for r, (theirs, _) in enumerate(found))
            raise RankAborted(f"the ranks have come to different places: {places}")
        return [value for _, value in found]

    def _gathered(self, topic: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        out = [torch.empty_like(tensor) for _ in range(self.ranks)]
        if self.roster is not None:
            self.roster.enter_exchange()
        try:
            work = dist.all_gather(out, tensor, async_op=True)
            self._watch(work.is_completed, topic)
            work.wait()
        except RankAborted:
            raise
        except RuntimeError as error:  # gloo: a connection broke
            raise self._lost(topic, error) from error
        finally:
            if self.roster is not None:
                self.roster.leave_exchange()
        return out

    def _watch(self, completed: Callable[[], bool], topic: str) -> None:
        deadline, pause = time.monotonic() + self.exchange_s, Pause()
        while not completed():
            if self.roster is not None:
                raise_if_aborted(self.roster, self.rank)
                if (gone := self.roster.gone()) and not completed():
                    raise self._aborted(f"{processes_of(gone)} no more", topic)
            if time.monotonic() >= deadline:
                raise self._aborted(f"not all others came within {self.exchange_s:g} s", topic)
            pause()

    def _lost(self, topic: str, error: RuntimeError) -> RankAborted:
        """Why a connection broke: by what the roster says, once it says something."""
        deadline, pause = time.monotonic() + _LAST_WORDS_S, Pause()
        while self.roster is not None and time.monotonic() < deadline:
            raise_if_aborted(self.roster, self.rank)
            if gone := self.roster.gone():
                return self._aborted(f"{processes_of(gone)} no more", topic)
            pause()
        return self._aborted(f"gloo: {str(error).splitlines()[0]}", topic)

    def _aborted(self, reason: str, topic: str) -> RankAborted:
        return RankAborted(f"rank {self.rank} stopped at `{topic}`: {reason}")

    def barrier(self, topic: str) -> None:
        """Returns once every rank has come here; raises as `exchange` does."""
        self.exchange(topic)

    # -- the end ---------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank has failed, and how; where it stops because another one
        has, that one's own words are enough."""
        if self.roster is not None and not isinstance(error, RankAborted):
            text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            self.roster.fail(text)

    def leave(self) -> None:
        """Ends this rank's part: nobody waits for it any more.  Collective only in that the last
        one to leave takes the shared folder along."""
        if self.roster is not None:
            if self.roster.running:
                self.roster.end()
            alone = not self.roster.others_running()
            self.roster.close()
            self.roster = None
            if alone:
                shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group()

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        self.leave()


def _meet(rank: int, ranks: int, join_s: float, exchange_s: float) -> None:
    """Makes torch's default group, over gloo, once every rank has come to the store."""
    came = "kpipe/came"
    try:
        store = next(dist.rendezvous("env://", rank, ranks, timeout=timedelta(seconds=join_s)))[0]
        if store.add(came, 1) == ranks:
            store.set(f"{came}/all", "")
        store.wait([f"{came}/all"], timedelta(seconds=join_s))
    except (RuntimeError, ValueError) as error:  # torch's errors of stores are RuntimeErrors
        raise LayerError(
            f"rank {rank}: not all of {ranks} ranks have joined within {join_s:g} s: "
            f"{str(error).splitlines()[0]}"
        ) from error
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=exchange_s)
    )
