"""Where a long run on a device is: a line as each part is done, and an end where it stands still.

The runtime says what it has done through `logging`, which an engine that uses it may listen to or
not.  `watched` is what the programs do with it.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

STILL_S = 120.0
"""Seconds between two lines, at most: to prepare a layer may mean to compile its kernels."""


class Watch(logging.Handler):
    """Prints records to stderr with the seconds since it was made.

    Where no further one comes for `still_s` seconds, says what every thread is at and ends the
    process with code 1.  That is done by a thread of its own that needs no interpreter, so that
    it works while a call of the driver does not return.
    """

    def __init__(self, still_s: float) -> None:
        super().__init__(logging.INFO)
        self._still_s = still_s
        self._started = time.monotonic()
        self._wind()

    def emit(self, record: logging.LogRecord) -> None:
        """One line, and the time that may pass until the next one begins anew."""
        seconds = time.monotonic() - self._started
        print(f"{seconds:6.1f} s  {record.getMessage()}", file=sys.stderr, flush=True)
        self._wind()

    def close(self) -> None:
        """Nothing is waited for any more."""
        faulthandler.cancel_dump_traceback_later()
        super().close()

    def _wind(self) -> None:
        faulthandler.dump_traceback_later(self._still_s, exit=True, file=sys.__stderr__)


@contextmanager
def watched(still_s: float = STILL_S) -> Iterator[None]:
    """Inside, this process says what the runtime has done, and ends where it stands still."""
    logger, watch = logging.getLogger("kpipe.runtime"), Watch(still_s)
    before = logger.level
    logger.addHandler(watch)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(watch)
        watch.close()
