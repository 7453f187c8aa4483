"""Runs a schedule on the GPU of this machine and counts the wrong values that it saw.

Every kernel is bounded, so a run ends whatever the order.  Between two repetitions the device is
idle and the memory is zero again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.host.compile import compile_kernel, ptx_of
from kpipe.runtime.host.driver import Driver
from kpipe.runtime.host.graph import Graph, read_graph
from kpipe.runtime.schedules.form import Launch, Record, Schedule, Segment
from kpipe.runtime.schedules.kernel import StandIn, operands
from kpipe.runtime.schedules.memory import Copying, Layout, Look, lay_out

WORD = 4  # bytes


@dataclass(frozen=True)
class Seen:
    """What `repetitions` of a schedule saw.

    `wrong[i]` of them found wrong words at `looks[i]`, `words[i]` words altogether; `final` of
    them left wrong words behind; `any` of them did one or the other.  `graphs` are its captured
    segments.
    """

    repetitions: int
    looks: tuple[Look, ...]
    wrong: tuple[int, ...]
    words: tuple[int, ...]
    final: int
    any: int
    graphs: tuple[Graph, ...]


def stand_in(launch: Launch) -> StandIn:
    """The kernel object that stands in for a launch; its name is made fit for a symbol."""
    name = "".join(letter if letter.isalnum() else "_" for letter in launch.name)
    return StandIn(name, launch.pdl, launch.waits, launch.trigger, launch.ctas)


def check_kernels(schedules: list[Schedule], arch: str) -> int:
    """Compile every stand-in without a GPU and look for its wait and its trigger in the PTX.

    Returns how many there are.  Raises ValueError that names one whose PTX is another.
    """
    kernels = {
        stand_in(launch): launch
        for schedule in schedules
        for launch in schedule.launches
        if launch.kind == "kernel"
    }
    for kernel, launch in kernels.items():
        ptx = ptx_of(compile_kernel(kernel, operands(), arch, keep_ptx=True))
        waits, triggers = ptx.count("griddepcontrol.wait"), ptx.count("griddepcontrol.launch")
        if (waits, triggers) != (int(launch.waits), int(launch.trigger != "never")):
            raise ValueError(
                f"the stand-in for {launch.name} has {waits} waits and {triggers} triggers"
            )
    return len(kernels)


class Machine:
    """The GPU, its driver and the streams that schedules run on; one per process will do."""

    def __init__(self, device: str = "cuda") -> None:
        from kpipe.runtime.host.launch import arch_of

        self.device = torch.device(device)
        torch.cuda.init()
        torch.zeros(1, device=self.device)  # makes the context that the driver's calls need
        self.arch = arch_of(self.device)
        self.driver = Driver()
        self.streams: list[torch.cuda.Stream] = []

    def stream(self, number: int) -> torch.cuda.Stream:
        """The stream of that number, the same for all schedules."""
        while len(self.streams) <= number:
            self.streams.append(torch.cuda.Stream(self.device))
        return self.streams[number]

    def run(
        self,
        schedule: Schedule,
        repetitions: int,
        delays: Mapping[tuple[int, bool], int],
        holds: Mapping[int, int] = MappingProxyType({}),
    ) -> Seen:
        """Run a schedule that often.

        Raises ValueError for what `lay_out` refuses, DriverError for what the driver refuses.
        """
        running = Running(self, schedule, lay_out(schedule, delays, holds))
        try:
            return running.repeat(repetitions)
        finally:
            running.close()


class Running:
    """One schedule, ready to run: its memory, its kernels, its events, its graphs."""

    def __init__(self, machine: Machine, schedule: Schedule, layout: Layout) -> None:
        self.machine = machine
        self.driver = machine.driver
        self.schedule = schedule
        self.layout = layout
        device = machine.device
        self.words = torch.zeros(layout.size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(max(1, len(layout.looks)), dtype=torch.int32, device=device)
        self.expected = torch.zeros_like(self.words)
        self.checked = torch.zeros_like(self.words, dtype=torch.bool)
        for final in layout.finals:
            self.expected[final.first : final.end] = final.value
            self.checked[final.first : final.end] = True
        self.events: list[int] = []
        self.graphs: list[tuple[int, int]] = []
        self.read: list[Graph] = []
        self.launchers = {
            position: self._launcher(position, launch)
            for position, launch in enumerate(schedule.launches)
        }
        torch.cuda.synchronize()
        self.issues = self._segments()

    def repeat(self, repetitions: int) -> Seen:
        """Run it and count."""
        wrong = torch.zeros_like(self.seen)
        words = torch.zeros_like(self.seen, dtype=torch.int64)
        final, bad = torch.zeros_like(wrong[:1]), torch.zeros_like(wrong[:1])
        for _ in range(repetitions):
            self.words.zero_()
            self.seen.zero_()
            torch.cuda.synchronize()
            for issue in self.issues:
                issue()
            torch.cuda.synchronize()
            left = ((self.words != self.expected) & self.checked).any()
            wrong += self.seen != 0
            words += self.seen
            final += left
            bad += left | (self.seen != 0).any()
        count = len(self.layout.looks)
        return Seen(
            repetitions,
            self.layout.looks,
            tuple(wrong.tolist()[:count]),
            tuple(words.tolist()[:count]),
            int(final.item()),
            int(bad.item()),
            tuple(self.read),
        )

    def close(self) -> None:
        """Gives graphs and events back."""
        torch.cuda.synchronize()
        for graph, executable in self.graphs:
            self.driver.destroy(graph, executable)
        for event in self.events:
            self.driver.forget(event)
        self.events, self.graphs = [], []

    # -- what is issued ---------------------------------------------------------------------

    def _launcher(self, position: int, launch: Launch) -> Callable[[], None]:
        stream = self.machine.stream(launch.stream)
        if launch.kind != "kernel":
            return self._copier(self.layout.copies[position], launch, stream.cuda_stream)
        kernel = compile_kernel(stand_in(launch), operands(), self.machine.arch)
        nothing = torch.zeros((1, 8), dtype=torch.int32, device=self.machine.device)
        with torch.cuda.stream(stream):  # loads the kernel, which must not happen in a capture
            kernel(nothing, nothing, self.words, self.seen)
        early, body = (self._rows(rows) for rows in self.layout.work[position])

        def launch_it() -> None:
            with torch.cuda.stream(stream):
                kernel(early, body, self.words, self.seen)

        return launch_it

    def _rows(self, rows: tuple[Any, ...]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=self.machine.device)

    def _copier(self, copying: Copying, launch: Launch, stream: int) -> Callable[[], None]:
        base, count = self.words.data_ptr(), copying.end - copying.first
        source = base + WORD * copying.first
        if copying.target < 0:
            return lambda: self.driver.fill(source, copying.value, count, stream)
        target = base + WORD * copying.target
        return lambda: self.driver.copy(target, source, WORD * count, stream)

    def _segments(self) -> list[Callable[[], None]]:
        issues: list[Callable[[], None]] = []
        events: dict[int, int] = {}
        position = 0
        for segment in self.schedule.segments:
            count = sum(isinstance(action, Launch) for action in segment.actions)
            if segment.captured:
                issues.append(self._graph(segment, position))
            else:
                issues += self._actions(segment, position, events)
            position += count
        return issues

    def _actions(
        self, segment: Segment, position: int, events: dict[int, int]
    ) -> list[Callable[[], None]]:
        issues: list[Callable[[], None]] = []
        for action in segment.actions:
            if isinstance(action, Launch):
                issues.append(self.launchers[position])
                position += 1
                continue
            if action.event not in events:
                events[action.event] = self._event()
            event, stream = events[action.event], self.machine.stream(action.stream).cuda_stream
            issues.append(
                (lambda e=event, s=stream: self.driver.record(e, s))
                if isinstance(action, Record)
                else (lambda e=event, s=stream: self.driver.wait(s, e))
            )
        return issues

    def _event(self) -> int:
        self.events.append(self.driver.event())
        return self.events[-1]

    def _graph(self, segment: Segment, position: int) -> Callable[[], None]:
        graph = self.capture(segment, position)
        executable = self.instantiate(graph)
        origin = self.machine.stream(segment.stream).cuda_stream
        return lambda: self.driver.launch_graph(executable, origin)

    def instantiate(self, graph: int) -> int:
        """An executable graph that lives as long as this does."""
        self.graphs.append((0, self.driver.instantiate(graph)))
        return self.graphs[-1][1]

    def capture(self, segment: Segment, position: int) -> int:
        """The graph of a segment whose first launch has that position; it is read as well.

        All its streams are forked in front of the first action, where there is nothing to depend
        on, and joined behind the last, where nothing follows.
        """
        origin = self.machine.stream(segment.stream).cuda_stream
        numbers = {action.stream for action in segment.actions} - {segment.stream}
        others = [self.machine.stream(number).cuda_stream for number in sorted(numbers)]
        made: dict[int, int] = {}
        self.driver.begin_capture(origin)
        try:
            for stream in others:
                self._join(origin, stream)
            issues = self._actions(segment, position, {})
            for action, issue in zip(segment.actions, issues, strict=True):
                issue()
                if isinstance(action, Launch):
                    stream = self.machine.stream(action.stream).cuda_stream
                    made[self.driver.newest(stream)] = position
                    position += 1
            for stream in others:
                self._join(stream, origin)
        finally:
            graph = self.driver.end_capture(origin)
            self.graphs.append((graph, 0))
        self.read.append(read_graph(self.driver, graph, made))
        return graph

    def _join(self, source: int, target: int) -> None:
        event = self._event()
        self.driver.record(event, source)
        self.driver.wait(target, event)
