"""A machine on the CPU in the place of the GPU: random executions of what the documents allow.

It runs what the explorer's host side issued, so it tests the text form, the numbering of pairs and
the judge, with an answer for every order.  It never stands for a measurement.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from explorer.enqueue import Task, enqueue
from schedules import SOURCES, TARGETS, bit, observable, pairs

from kpipe.codegen.proof.program import Kernel, Program

DELAYS = (0, 0, 1, 4, 20, 90)


class Simulator:
    """Has the interface of the GPU's library."""

    name = "simulated"

    def run(self, program: Program, repetitions: int, seed: int) -> bytes:
        """Orders that random executions break: one byte per pair, see `schedules.pairs`."""
        rng = random.Random(seed)
        tasks = enqueue(program)
        broken = bytearray(len(pairs(len(tasks))))
        for _ in range(repetitions):
            moments = execute(tasks, rng)
            for at, (first, second) in enumerate(pairs(len(tasks))):
                a, b = moments[first], moments[second]
                late = sum(bit(s, t) for s in SOURCES for t in TARGETS if a[s] > b[t])
                broken[at] |= late & observable(program, first, second)
        return bytes(broken)


def execute(tasks: tuple[Task, ...], rng: random.Random) -> list[dict[str, int]]:
    """The moments S, W, T, X and E of each launch in one execution; every phase takes a random
    time, and nothing is later than its conditions and that time make it."""
    moments: list[dict[str, int]] = []
    for task in tasks:
        node = task.node

        def later(*conditions: int) -> int:
            return max(conditions, default=0) + rng.choice(DELAYS)

        flushed = [moments[number]["E"] for number in task.flushed]
        start = later(*flushed, *(moments[number]["T"] for number in task.parents))
        waits = isinstance(node, Kernel) and node.waits
        trigger = node.trigger if isinstance(node, Kernel) else "never"
        early = later(start) if trigger == "early" else start
        waited = later(early, *(moments[p]["E"] for p in task.parents)) if waits else start
        late = later(early, waited) if trigger == "after_wait" else early
        exited = later(early, waited, late)
        triggered = {"early": early, "after_wait": late, "never": exited}[trigger]
        moment = {"S": start, "W": waited, "T": triggered, "X": exited, "E": later(exited)}
        moments.append(moment)
    return moments
