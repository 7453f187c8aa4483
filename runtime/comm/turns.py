"""Threads of one process that take turns: only one runs, and hands on where it says so."""

from __future__ import annotations

import threading


class TurnAborted(RuntimeError):
    """Another thread has failed; nobody will hand the turn on any more."""


class Turns:
    """A baton that goes round `count` threads in the order of their numbers.

    `pass_on` returns when the baton has been all round.  So what every thread does ahead of its
    n-th `pass_on` comes ahead of what any thread does behind it, and no two threads ever run at
    once.  A thread that has ended is left out from then on.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._present = set(range(count))
        self._at = 0
        self._failed = False
        self._changed = threading.Condition()

    def begin(self, number: int) -> None:
        """Waits for the first turn of a thread."""
        self._wait(number)

    def pass_on(self, number: int) -> None:
        """Hands the baton on and waits for the next turn; TurnAborted when a thread has failed."""
        self._hand_on(number)
        self._wait(number)

    def end(self, number: int, *, failed: bool = False) -> None:
        """Hands the baton on for good; with `failed` all others stop."""
        with self._changed:
            self._present.discard(number)
            self._failed = self._failed or failed
        self._hand_on(number)

    def _hand_on(self, number: int) -> None:
        with self._changed:
            after = [(number + step) % self._count for step in range(1, self._count + 1)]
            self._at = next((other for other in after if other in self._present), number)
            self._changed.notify_all()

    def _wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._at == number)
            if self._failed:
                raise TurnAborted(f"thread {number} stopped: another one has failed")
