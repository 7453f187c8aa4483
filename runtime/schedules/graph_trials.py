"""What else happens to graphs: graphs within graphs, and graphs put in each other's place.

The checker knows nothing of either.  These trials say what this machine does; no finding cites
them.  A writes late, C reads; see `rows.py` for the words of a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kpipe.runtime.host.driver import DriverError
from kpipe.runtime.host.graph import read_graph
from kpipe.runtime.schedules.execute import Machine, Running, Seen
from kpipe.runtime.schedules.form import Segment
from kpipe.runtime.schedules.memory import Layout, lay_out, long_launches
from kpipe.runtime.schedules.rows import LATE_US, Experiment

# sentence, chain, launches inside the child graph
CHILDREN = (
    ("child graph of A(trig); pdl C(no wait)", "A(trig); C(pdl)", (0,)),
    ("child graph of A(trig); pdl C(wait)", "A(trig); C(pdl wait)", (0,)),
    ("A(trig); child graph of pdl C(no wait)", "A(trig); C(pdl)", (1,)),
    ("child graph of A(trig), pdl C(no wait)", "A(trig); C(pdl)", (0, 1)),
)
# sentence, chain of the executable graph, chain that is put in its place
UPDATES = (
    ("A(trig); plain C becomes pdl C(no wait)", "A(trig); C", "A(trig); C(pdl)"),
    ("A(trig); pdl C(no wait) becomes plain C", "A(trig); C(pdl)", "A(trig); C"),
    ("A(trig); pdl C(no wait) becomes pdl C(wait)", "A(trig); C(pdl)", "A(trig); C(pdl wait)"),
    ("A(trig); pdl C(wait) becomes itself", "A(trig); C(pdl wait)", "A(trig); C(pdl wait)"),
)


@dataclass(frozen=True)
class GraphTrial:
    """What one trial saw.  `update` is the driver's answer, empty for child graphs; `early` and
    `stale` count repetitions in which C saw old data in front of its wait, and behind it."""

    sentence: str
    update: str
    repetitions: int
    early: int
    stale: int
    edges: tuple[tuple[int, int], ...]  # type and from port


def graph_trials(machine: Machine, repetitions: int) -> list[dict[str, Any]]:
    """Every trial, as plain data."""
    trials: list[GraphTrial] = []
    for run, listed in ((_child, CHILDREN), (_update, UPDATES)):
        for sentence, *rest in listed:
            try:
                trials.append(run(machine, sentence, *rest, repetitions))
            except DriverError as error:
                trials.append(GraphTrial(sentence, f"refused: {error}", 0, 0, 0, ()))
    return [asdict(trial) for trial in trials]


class _Child(Running):
    """A chain some of whose launches stand in a child graph."""

    def __init__(self, machine: Machine, chain: str, inside: tuple[int, ...]) -> None:
        self.inside = inside
        super().__init__(machine, Experiment("child", chain).schedule("eager"), _layout(chain))

    def _segments(self) -> list[Callable[[], None]]:
        stream = self.machine.stream(0).cuda_stream
        launches = self.schedule.launches
        child = self.capture(Segment(tuple(launches[i] for i in self.inside)), self.inside[0])
        driver, made = self.driver, {}
        driver.begin_capture(stream)
        try:
            for position in range(len(launches)):
                if position in self.inside[1:]:
                    continue
                if position in self.inside:
                    state = driver.capture_state(stream)
                    driver.depend_on(stream, driver.add_child(state.graph, state.front, child))
                else:
                    self.launchers[position]()
                made[driver.newest(stream)] = position
        finally:
            graph = driver.end_capture(stream)
            self.graphs.append((graph, 0))
        self.read = [read_graph(driver, graph, made)]
        executable = self.instantiate(graph)
        return [lambda: driver.launch_graph(executable, stream)]


def _child(
    machine: Machine, sentence: str, chain: str, inside: tuple[int, ...], repetitions: int
) -> GraphTrial:
    running = _Child(machine, chain, inside)
    try:
        return _trial(sentence, "", running.repeat(repetitions))
    finally:
        running.close()


def _update(
    machine: Machine, sentence: str, before: str, behind: str, repetitions: int
) -> GraphTrial:
    """The chain `behind` runs in the executable graph of `before`, if the driver agrees; else
    that graph runs as it was."""
    first, second = (
        Running(machine, Experiment("update", chain).schedule("captured"), _layout(chain))
        for chain in (before, behind)
    )
    try:
        executable = first.graphs[-1][1]
        said = machine.driver.update(executable, second.graphs[0][0])
        running = second if said == "applied" else first
        stream = machine.stream(0).cuda_stream
        running.issues = [lambda: machine.driver.launch_graph(executable, stream)]
        return _trial(sentence, said, running.repeat(repetitions))
    finally:
        first.close()
        second.close()


def _layout(chain: str) -> Layout:
    schedule = Experiment("", chain).schedule("eager")
    return lay_out(schedule, long_launches(schedule, ("A",), LATE_US))


def _trial(sentence: str, update: str, seen: Seen) -> GraphTrial:
    early, stale = early_and_stale(seen)
    edges = tuple((edge.type, edge.from_port) for graph in seen.graphs for edge in graph.edges)
    return GraphTrial(sentence, update, seen.repetitions, early, stale, edges)


def early_and_stale(seen: Seen) -> tuple[int, int]:
    """Repetitions in which a chain's reader saw old data as it started, and behind its wait."""
    counts = {look.early: wrong for look, wrong in zip(seen.looks, seen.wrong, strict=True)}
    stale = counts.get(False, 0)
    return counts.get(True, stale), stale
