"""What the processes of a group know of each other without asking: a small file that all map.

A rank says there whether it runs, has ended or has failed (and why), how often it has written into
a mailbox, and whether it waits.  A rank that is killed says nothing; but it holds a lock on a file
of its own, and the system gives that back whatever ends the process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path

RUNNING, ENDED, FAILED = 1, 2, 3
NOT_WAITING, IN_EXCHANGE = -1, -2
"""A rank waits at a count of writes, or for all others, or not at all.  In its n-th exchange, from
0, it is at IN_EXCHANGE - n: who has left that one knows that it will go on as well."""
_STATE, _WRITES, _WAITING, _LENGTH = range(4)
_WORD = 8
_TEXT_AT = 4 * _WORD
_ENTRY = 4096  # bytes of a rank; behind its four counters stands the text of its failure


class Roster:
    """The entry of `rank` and those of the others, in files of `folder`.

    `enter` comes first on every rank, then `see` once all have entered.  Every entry has one
    writer; a count is eight aligned bytes, so that nobody reads half of one.
    """

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._folder = folder
        self._files: list[int] = []
        self._locks: dict[int, int] = {}
        self._map: mmap.mmap | None = None
        self._exchanges = 0  # that this rank has left

    def enter(self) -> None:
        """Makes this rank's lock and, on rank 0, the file of all entries."""
        mine = os.open(self._folder / f"rank-{self.rank}", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(mine, fcntl.LOCK_EX)
        self._files.append(mine)
        if self.rank == 0:
            (self._folder / "roster").write_bytes(bytes(_ENTRY * self.ranks))

    def see(self) -> None:
        """Opens what the others have made; OSError where it is not there."""
        for other in range(self.ranks):
            if other != self.rank:
                self._locks[other] = os.open(self._folder / f"rank-{other}", os.O_RDWR)
        self._files += self._locks.values()
        with (self._folder / "roster").open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _ENTRY * self.ranks)
        self._put(_WAITING, NOT_WAITING)
        self._put(_STATE, RUNNING)

    def close(self) -> None:
        """Gives the files and this rank's lock back; the entries can no longer be read."""
        if self._map is not None:
            self._map.close()
            self._map = None
        for file in self._files:
            os.close(file)
        self._files, self._locks = [], {}

    # -- what this rank says ---------------------------------------------------------------------

    def wrote(self) -> None:
        """Words have been stored into a mailbox; called behind the store."""
        self._put(_WRITES, self._get(self.rank, _WRITES) + 1)

    def wait_at(self, writes: int) -> None:
        """This rank has looked at its words behind so many writes, and some were missing."""
        self._put(_WAITING, writes)

    def enter_exchange(self) -> None:
        """This rank waits for all others; exchanges come in the same order on all ranks."""
        self._put(_WAITING, IN_EXCHANGE - self._exchanges)

    def leave_exchange(self) -> None:
        """All others have come."""
        self._exchanges += 1
        self._put(_WAITING, NOT_WAITING)

    def end(self) -> None:
        """This rank will not write any more."""
        self._put(_STATE, ENDED)

    def fail(self, text: str) -> None:
        """This rank has failed; the text is cut to what fits."""
        data = text.encode()[: _ENTRY - _TEXT_AT]
        at = self.rank * _ENTRY
        self._mapped()[at + _TEXT_AT : at + _TEXT_AT + len(data)] = data
        self._put(_LENGTH, len(data))
        self._put(_STATE, FAILED)

    @property
    def running(self) -> bool:
        """Whether this rank has said neither that it has ended nor that it has failed."""
        return self._get(self.rank, _STATE) == RUNNING

    # -- what it sees of all ---------------------------------------------------------------------

    def writes(self) -> int:
        """Writes of all ranks so far."""
        return sum(self._get(rank, _WRITES) for rank in range(self.ranks))

    def failure(self) -> tuple[int, str] | None:
        """The first other rank that has failed, and what it said."""
        for rank in self._others():
            if self._get(rank, _STATE) == FAILED:
                at = rank * _ENTRY + _TEXT_AT
                data = self._mapped()[at : at + self._get(rank, _LENGTH)]
                return rank, data.decode(errors="replace")
        return None

    def gone(self) -> tuple[int, ...]:
        """Other ranks whose process is no more although they have not said that they end."""
        return tuple(r for r in self._others() if self._get(r, _STATE) == RUNNING and self._free(r))

    def others_running(self) -> bool:
        """Whether any other rank's process is there and has not said that it ends."""
        return any(self._get(r, _STATE) == RUNNING and not self._free(r) for r in self._others())

    def may_write(self) -> tuple[int, ...]:
        """Other ranks that run and are not known to wait at the present count of writes, or in an
        exchange that this rank has not left."""
        now, here = self.writes(), IN_EXCHANGE - self._exchanges
        waiting = {rank: self._get(rank, _WAITING) for rank in self._others()}
        return tuple(
            rank
            for rank, at in waiting.items()
            if self._get(rank, _STATE) == RUNNING and at != now and at > here
        )

    def _others(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.ranks) if rank != self.rank)

    def _free(self, rank: int) -> bool:
        """Whether nobody holds the lock of that rank."""
        with suppress(BlockingIOError):
            fcntl.flock(self._locks[rank], fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._locks[rank], fcntl.LOCK_UN)
            return True
        return False

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise RuntimeError(f"rank {self.rank} has left its group")
        return self._map

    def _get(self, rank: int, place: int) -> int:
        return struct.unpack_from("q", self._mapped(), rank * _ENTRY + place * _WORD)[0]

    def _put(self, place: int, value: int) -> None:
        struct.pack_into("q", self._mapped(), self.rank * _ENTRY + place * _WORD, value)
