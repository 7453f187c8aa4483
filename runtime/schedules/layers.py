"""Captures two layers of a generated class into one graph, and says which op made which node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kpipe.runtime.bench_inputs import TimedLayer, build
from kpipe.runtime.host.compile import compile_kernel
from kpipe.runtime.host.graph import graph_json, read_graph
from kpipe.runtime.layer import Layer
from kpipe.runtime.schedules.execute import Machine, stand_in
from kpipe.runtime.schedules.form import Launch, from_json
from kpipe.runtime.schedules.kernel import operands

Use = tuple[str, int, int]  # arch, q, rows
LAYERS = 2
CONTEXT = 4096  # keys of a request; what a graph looks like does not depend on it


def selected(plan: Mapping[str, Any], arch: str) -> list[tuple[Mapping[str, Any], Use]]:
    """The planned lists that the layer's table selects on `arch`, each with a step that does."""
    here = ((one, [use for use in one["selected"] if use[0] == arch]) for one in plan["lists"])
    return [(one, (arch, *uses[0][1:])) for one, uses in here if uses]


def capture_list(
    machine: Machine, layer_class: type[Layer], one: Mapping[str, Any], use: Use
) -> dict[str, Any]:
    """The graph of a planned list that the layer takes for the step `use`.

    Raises LayerError where the layer lacks a kernel.
    """
    arch, q, rows = use
    timed = build(layer_class, arch=arch, rows=rows, q=q, context=CONTEXT, count=LAYERS)
    capture = LayerCapture(machine, timed, from_json(one["schedule"]).launches)
    return {
        "key": one["key"],
        "sha256": one["sha256"],
        "layer": True,
        "method": capture.method,
        "graphs": [capture.graph()],
    }


class LayerCapture:
    """Layers in a row with what runs between them, captured on one stream."""

    def __init__(
        self, machine: Machine, timed: list[TimedLayer], launches: tuple[Launch, ...]
    ) -> None:
        self.machine = machine
        self.timed = timed
        self.made: dict[int, int] = {}
        self.position = 1  # the engine's copy of the step inputs stands in front of the graph
        self.stream = machine.stream(0)
        self.words = torch.zeros(32, dtype=torch.int32, device=machine.device)
        self.rows = torch.zeros((1, 8), dtype=torch.int32, device=machine.device)
        self.between = compile_kernel(stand_in(launches[-1]), operands(), machine.arch)
        self.method = self._issue()  # everything is loaded before the capture
        torch.cuda.synchronize()
        for one in timed:
            for op in type(one.layer).OPS:
                setattr(one.layer, op.name, self._traced(getattr(one.layer, op.name)))

    def graph(self) -> dict[str, Any]:
        """The captured graph, as plain data."""
        stream, driver = self.stream.cuda_stream, self.machine.driver
        driver.begin_capture(stream)
        try:
            self._issue(self._note)
        finally:
            graph = driver.end_capture(stream)
        try:
            return graph_json(read_graph(driver, graph, self.made))
        finally:
            driver.destroy(graph)

    def _issue(self, note: Callable[[], None] = lambda: None) -> str:
        method = ""
        with torch.cuda.stream(self.stream):
            for one in self.timed:
                method = one.run()
                self.between(self.rows, self.rows, self.words, self.words)
                note()
        return method

    def _traced(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*operands: Any, **named: Any) -> None:
            launch(*operands, **named)
            self._note()

        return traced

    def _note(self) -> None:
        """The current stream's newest node belongs to the launch that has just been issued."""
        current = torch.cuda.current_stream().cuda_stream
        front = self.machine.driver.capture_state(current).front
        if len(front) == 1 and front[0] not in self.made:
            self.made[front[0]] = self.position
        self.position += 1
