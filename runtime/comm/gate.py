"""The place where the ranks of one process wait for each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class RankAborted(RuntimeError):
    """Another rank failed; this rank stopped because nobody will answer it any more."""


class Gate:
    """One lock, a clock of writes, and the set of ranks that wait.

    Every write advances the clock.  A rank is blocked when it looked at its words at the present
    clock and found some missing; when every running rank is blocked, no word can ever arrive and
    waiting ends at once instead of at the time-out.  Only the thread of a rank may wait.
    """

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.failure: tuple[int, BaseException] | None = None
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # Its own condition: pollers that report themselves blocked must not wake other pollers.
        self._blocked = threading.Condition(lock)
        self._clock = 0
        self._waiting: dict[int, int] = {}
        self._running: set[int] = set()

    @contextmanager
    def holding(self, rank: int) -> Iterator[None]:
        """Excludes all other ranks; raises RankAborted if one of them has failed."""
        with self._changed:
            self._raise_if_aborted(rank)
            yield

    @contextmanager
    def writing(self, rank: int) -> Iterator[None]:
        """Like `holding`, and wakes every waiting rank after the block."""
        with self.holding(rank):
            yield
            self._clock += 1
            self._changed.notify_all()

    def wait(
        self, rank: int, ready: Callable[[], bool], explain: Callable[[str], Exception]
    ) -> None:
        """Blocks `rank` until `ready()`, which is called with the lock held.

        Raises `explain(reason)` at the deadline or when no rank is left that could write, and
        RankAborted when another rank fails.
        """
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            try:
                while True:
                    self._raise_if_aborted(rank)
                    if ready():
                        return
                    self._waiting[rank] = self._clock
                    self._blocked.notify_all()
                    if self._stuck():
                        raise explain("every rank waits or has ended")
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise explain(f"after {self.timeout_s:g} s")
                    self._changed.wait(left)
            finally:
                self._waiting.pop(rank, None)

    def wait_until_blocked(self, rank: int, others: Iterable[int]) -> None:
        """Holds `rank` back until each of `others` is blocked in a poll or has ended.

        Raises TimeoutError at the deadline, RankAborted when another rank fails.
        """
        others = tuple(others)
        with self._blocked:
            done = self._blocked.wait_for(
                lambda: self.failure is not None or not self._busy(others), self.timeout_s
            )
            self._raise_if_aborted(rank)
            if not done:
                raise TimeoutError(
                    f"rank {rank}: ranks {self._busy(others)} neither wait nor have ended "
                    f"after {self.timeout_s:g} s"
                )

    def start(self, ranks: Iterable[int]) -> None:
        """Declares the ranks that run from now on; only they can still write."""
        with self._changed:
            self._running = set(ranks)

    def end(self, rank: int) -> None:
        """Declares that `rank` will not write any more."""
        with self._changed:
            self._running.discard(rank)
            self._changed.notify_all()
            self._blocked.notify_all()

    def abort(self, rank: int, error: BaseException) -> None:
        """Records the first failure and wakes everybody."""
        with self._changed:
            if self.failure is None:
                self.failure = (rank, error)
            self.end(rank)

    def _busy(self, ranks: tuple[int, ...]) -> list[int]:
        """Those of `ranks` that run and are not known to be blocked at the present clock."""
        return [
            rank
            for rank in ranks
            if rank in self._running and self._waiting.get(rank) != self._clock
        ]

    def _stuck(self) -> bool:
        return bool(self._running) and not self._busy(tuple(self._running))

    def _raise_if_aborted(self, rank: int) -> None:
        if self.failure is not None:
            failed, error = self.failure
            raise RankAborted(
                f"rank {rank} stopped: rank {failed} failed with {type(error).__name__}: {error}"
            )
