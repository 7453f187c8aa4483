"""The place where ranks that are processes wait for each other: they look, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kpipe.runtime.comm.gate import RankAborted
from kpipe.runtime.comm.roster import NOT_WAITING, Roster

_SOON_S, _LATE_S = 50e-6, 2e-3  # between two looks, at first and at last


class Pause:
    """A pause that grows from call to call, up to two milliseconds."""

    def __init__(self) -> None:
        self._next = _SOON_S

    def __call__(self) -> None:
        time.sleep(self._next)
        self._next = min(2 * self._next, _LATE_S)


class ProcessGate:
    """What `Gate` is to threads.  No lock: every word says itself whether it has come.

    A rank is blocked when it has looked at its words at the present count of writes and found some
    missing, or when it waits for all others.  When every running rank is blocked no word can
    arrive any more, and waiting ends at once.
    """

    def __init__(self, roster: Roster, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._roster = roster

    @contextmanager
    def holding(self, rank: int) -> Iterator[None]:
        """Raises RankAborted if another rank has failed."""
        self._raise_if_aborted(rank)
        yield

    @contextmanager
    def writing(self, rank: int) -> Iterator[None]:
        """Like `holding`; behind the block the count of writes goes up."""
        self._raise_if_aborted(rank)
        yield
        self._roster.wrote()

    def wait(
        self, rank: int, ready: Callable[[], bool], explain: Callable[[str], Exception]
    ) -> None:
        """Returns once `ready()`.

        Raises `explain(reason)` at the deadline, when no rank is left that could write, and when
        the process of another one is no more; RankAborted when another rank has failed.
        """
        deadline, pause = time.monotonic() + self.timeout_s, Pause()
        try:
            while True:
                writes = self._roster.writes()  # ahead of the look, which sees at least these
                if ready():
                    return
                self._raise_if_aborted(rank)
                self._roster.wait_at(writes)
                if reason := self._hopeless():
                    if ready():  # whoever is gone, or waits, may have written behind the look
                        return
                    raise explain(reason)
                if time.monotonic() >= deadline:
                    raise explain(f"after {self.timeout_s:g} s")
                pause()
        finally:
            self._roster.wait_at(NOT_WAITING)

    def _hopeless(self) -> str:
        """Why the missing words will not come; empty while they may."""
        if gone := self._roster.gone():
            return f"{processes_of(gone)} no more"
        return "" if self._roster.may_write() else "every rank waits or has ended"

    def _raise_if_aborted(self, rank: int) -> None:
        raise_if_aborted(self._roster, rank)


def raise_if_aborted(roster: Roster, rank: int) -> None:
    """Raises RankAborted, with what it said, where another rank has failed."""
    if failure := roster.failure():
        raise RankAborted(f"rank {rank} stopped: rank {failure[0]} failed with {failure[1]}")


def processes_of(ranks: tuple[int, ...]) -> str:
    """For people: `the process of rank 1 is`, `the processes of ranks 1, 2 are`."""
    if len(ranks) == 1:
        return f"the process of rank {ranks[0]} is"
    return f"the processes of ranks {', '.join(map(str, ranks))} are"
