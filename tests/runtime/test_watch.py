"""Where a run is, line by line; a process that stands still says at what, and ends."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

from kpipe.runtime.watch import watched

STILL = """
import threading
from kpipe.runtime.watch import watched

def waits_for_ever():
    threading.Event().wait()

with watched(0.05):
    waits_for_ever()
"""


def test_lines_as_parts_are_done(capsys):
    logger = logging.getLogger("kpipe.runtime.some_part")
    logger.info("ahead")
    with watched():
        logger.info("rank %d prepared", 3)
    logger.info("behind")
    assert re.fullmatch(r" +\d+\.\d s  rank 3 prepared\n", capsys.readouterr().err)
    assert not logging.getLogger("kpipe.runtime").handlers


def test_a_process_that_stands_still_ends_and_says_where():
    done = subprocess.run([sys.executable, "-c", STILL], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Timeout (0:00:00.050000)!" in done.stderr and "in waits_for_ever" in done.stderr
