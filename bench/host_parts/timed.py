"""Times of calls on the host, as a machine on which others work lets them be told."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS, QUEUED = 200, 16


@dataclass(frozen=True)
class Spread:
    """Microseconds of one call: the median of the rounds, and that which nine in ten exceed."""

    median: float
    low: float

    def told(self) -> dict[str, float]:
        """As it is written down."""
        return {"median": round(self.median, 2), "low": round(self.low, 2)}


def spread(times: list[float]) -> Spread:
    """Median and lowest decile of some times."""
    ordered = sorted(times)
    return Spread(ordered[len(ordered) // 2], ordered[len(ordered) // 10])


def host_us(
    run: Callable[[], object],
    between: Callable[[], object],
    queued: int = QUEUED,
    rounds: int = ROUNDS,
) -> Spread:
    """Microseconds that the calling thread spends on one `run`.

    `queued` of them are timed together; `between` comes ahead of each such round, outside of the
    time: it waits until the device is idle, so that no call finds a full queue.
    """
    found = []
    for _ in range(rounds):
        between()
        before = time.perf_counter()
        for _ in range(queued):
            run()
        found.append((time.perf_counter() - before) * 1e6 / queued)
    return spread(found)
