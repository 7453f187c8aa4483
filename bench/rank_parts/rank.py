"""What every part of bench/ranks.py is handed: this rank, its group, and layers to run on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kpipe.runtime.bench import middle
from kpipe.runtime.bench_inputs import TimedLayer, make_inputs, prepared
from kpipe.runtime.comm.device_processes import DeviceProcesses
from kpipe.runtime.comm.host_processes import HostProcesses
from kpipe.runtime.comm.processes import Processes
from kpipe.runtime.layer import Layer
from kpipe.runtime.memory import Scratch
from kpipe.runtime.sharding import Shard


@dataclass
class Rank:
    """This process: its place in the group, and what is measured.

    `quick` sizes are for a machine without GPUs, where only the protocol can be tried.
    """

    processes: Processes
    group: HostProcesses | DeviceProcesses
    layer_class: type[Layer]
    arch: str
    out: Path
    quick: bool

    @property
    def number(self) -> int:
        """Which rank this is."""
        return self.processes.rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.processes.ranks

    @property
    def device(self) -> torch.device:
        """Where this rank's layers run."""
        return self.group.device if isinstance(self.group, DeviceProcesses) else torch.device("cpu")

    @property
    def on_gpus(self) -> bool:
        """Whether every rank has a GPU."""
        return isinstance(self.group, DeviceProcesses)

    @property
    def cuda(self) -> DeviceProcesses:
        """The group as one of devices; TypeError on the CPU."""
        if not isinstance(self.group, DeviceProcesses):
            raise TypeError("this part needs GPUs")
        return self.group

    def told(self, topic: str, value: Any) -> list[Any]:
        """What every rank says, in rank order."""
        return self.processes.exchange(topic, value)

    def synchronize(self) -> None:
        """Waits for this rank's device; raises MailboxTimeout where a poll has given up."""
        if isinstance(self.group, DeviceProcesses):
            self.group.synchronize()

    def barrier(self, topic: str) -> None:
        """Returns once every rank's device is idle and every rank has come here."""
        self.synchronize()
        self.processes.barrier(topic)

    def save(self, part: str, found: dict[str, Any]) -> None:
        """Writes what a part has found so far; rank 0 alone does."""
        if not self.number:
            text = json.dumps({"part": part, **found}, indent=1)
            (self.out / f"{part}.json").write_text(text + "\n")

    def layers(self, rows: int, q: int, context: int, count: int) -> list[TimedLayer]:
        """`count` layers with weights and caches of their own on this rank's share of contexts.

        Only what steps of `rows` rows launch is compiled.  All ranks call together.
        """
        generator = torch.Generator(self.device).manual_seed(1000 + self.number)
        shard = Shard(self.number, self.ranks, self.layer_class.INTERLEAVE)
        scratch = Scratch(self.device)
        made = []
        for number in range(count):
            inputs = make_inputs(self.layer_class, rows, q, context, generator, shard)
            made.append(
                prepared(
                    self.layer_class,
                    inputs,
                    self.arch,
                    number,
                    scratch,
                    self.group.comm,
                    "cuda" if self.on_gpus else "reference",
                )
            )
        return made

    def warm(self, runs: Sequence[Callable[[], object]]) -> None:
        """Every run once on full mailboxes, so that nothing is loaded while a poll waits."""
        group = self.cuda
        group.barrier("warm")
        for run in runs:
            group.fill()
            run()
        group.synchronize()
        group.arm()

    def captured(self, runs: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
        """All of `runs` in one graph that has been replayed once; every rank has come so far."""
        self.warm(runs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            for run in runs:
                run()
        self.barrier("captured")
        graph.replay()
        self.barrier("replayed")
        return graph

    def replay_us(self, graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
        """Microseconds of each of so many replays, back to back, on this rank."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        self.barrier("replays")
        graph.replay()
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        self.synchronize()
        return [a.elapsed_time(b) * 1e3 for a, b in zip(events, events[1:], strict=False)]

    def slowest_us(self, graph: torch.cuda.CUDAGraph, replays: int) -> dict[str, Any]:
        """Of every replay the slowest rank's time; their median, and each rank's own."""
        by_rank = self.told("times", self.replay_us(graph, replays))
        slowest = [max(times) for times in zip(*by_rank, strict=True)]
        return {"us": middle(slowest), "us_by_rank": [middle(times) for times in by_rank]}
