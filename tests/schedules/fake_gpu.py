"""A driver and a GPU without either: every call works at once, in the host's order.

The library has the C functions that `Driver` calls and fills the same out-parameters.  A capture
follows the rule of the documents: a kernel with the attribute depends programmatically on every
kernel of its stream's front, anything else depends in full.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kpipe.runtime.host import compile as compile_module
from kpipe.runtime.host.driver import Driver
from kpipe.runtime.schedules import execute
from kpipe.runtime.schedules.work import READ, WRITE

KERNEL, MEMCPY, MEMSET, CHILD = 0, 1, 2, 4


def void(_: object) -> None:
    pass


@dataclass
class Graph:
    nodes: list[int] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)  # from, to, programmatic


@dataclass
class Node:
    type: int
    run: Callable[[], None]
    name: str = ""


class FakeLibrary:
    """What `libcuda` is to `Driver`; handles are numbers from a counter."""

    def __init__(self) -> None:
        self.count = 0x1000
        self.graphs: dict[int, Graph] = {}
        self.nodes: dict[int, Node] = {}
        self.fronts: dict[int, list[int]] = {}  # stream -> front, while it is captured
        self.capturing: dict[int, int] = {}  # stream -> graph
        self.events: dict[int, tuple[int, list[int]] | None] = {}
        self.executables: dict[int, int] = {}
        self.names: list[bytes] = []
        self.fail = ""

    def handle(self) -> int:
        self.count += 0x10
        return self.count

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and object.__getattribute__(self, "fail") == name:
            return lambda *_: 999
        return object.__getattribute__(self, name)

    def issue(self, stream: int, node: Node, pdl: bool = False) -> None:
        """What a launch does: it runs, or becomes a node."""
        if stream not in self.capturing:
            node.run()
            return
        graph = self.graphs[self.capturing[stream]]
        handle = self.handle()
        self.nodes[handle] = node
        graph.nodes.append(handle)
        for parent in self.fronts[stream]:
            kernels = self.nodes[parent].type == node.type == KERNEL
            graph.edges.append((parent, handle, int(pdl and kernels)))
        self.fronts[stream] = [handle]

    # -- the C functions ----------------------------------------------------------------------

    def cuGetErrorString(self, status: int, text: Any) -> int:
        self._text(text, b"a made-up error")
        return 0

    def _text(self, target: Any, value: bytes) -> None:
        self.names.append(value)
        target._obj.value = value

    def cuStreamBeginCapture_v2(self, stream: Any, mode: Any) -> int:
        assert mode.value == 2
        graph = self.handle()
        self.graphs[graph] = Graph()
        self.capturing[stream.value], self.fronts[stream.value] = graph, []
        return 0

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> int:
        graph._obj.value = self.capturing[stream.value]
        self.capturing.clear()
        self.fronts.clear()
        return 0

    def cuStreamGetCaptureInfo_v3(
        self, stream: Any, status: Any, _: Any, graph: Any, front: Any, __: Any, count: Any
    ) -> int:
        if stream.value not in self.capturing:
            status._obj.value = 0
            return 0
        status._obj.value = 1
        graph._obj.value = self.capturing[stream.value]
        import ctypes

        handles = self.fronts[stream.value]
        self.kept = (ctypes.c_void_p * max(1, len(handles)))(*handles)
        front._obj.contents = ctypes.cast(self.kept, type(front._obj)).contents
        count._obj.value = len(handles)
        return 0

    def cuStreamUpdateCaptureDependencies_v2(
        self, stream: Any, nodes: Any, _: Any, count: Any, flags: Any
    ) -> int:
        assert flags.value == 1
        self.fronts[stream.value] = [nodes[i] for i in range(count.value)]
        return 0

    def cuGraphAddChildGraphNode(
        self, node: Any, graph: Any, front: Any, count: Any, child: Any
    ) -> int:
        handle, inner = self.handle(), child.value
        self.nodes[handle] = Node(CHILD, lambda: self._replay(inner))
        self.graphs[graph.value].nodes.append(handle)
        for number in range(count.value):
            self.graphs[graph.value].edges.append((front[number], handle, 0))
        node._obj.value = handle
        return 0

    def cuGraphInstantiateWithFlags(self, made: Any, graph: Any, flags: Any) -> int:
        made._obj.value = self.handle()
        self.executables[made._obj.value] = graph.value
        return 0

    def _replay(self, graph: int) -> None:
        for node in self.graphs[graph].nodes:
            self.nodes[node].run()

    def cuGraphLaunch(self, executable: Any, stream: Any) -> int:
        self._replay(self.executables[executable.value])
        return 0

    def cuGraphExecUpdate_v2(self, executable: Any, graph: Any, info: Any) -> int:
        before, behind = (
            [n for n in self.graphs[g].edges]
            for g in (self.executables[executable.value], graph.value)
        )
        if [kind for *_, kind in before] != [kind for *_, kind in behind]:
            info._obj.result = 2
            return 910
        self.executables[executable.value] = graph.value
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        return 0

    cuGraphExecDestroy = cuEventDestroy_v2 = cuGraphDestroy

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        handles = self.graphs[graph.value].nodes
        for number in range(len(handles) if hasattr(nodes, "_length_") else 0):
            nodes[number] = handles[number]
        count._obj.value = len(handles)
        return 0

    def cuGraphGetEdges_v2(self, graph: Any, heads: Any, tails: Any, data: Any, count: Any) -> int:
        edges = self.graphs[graph.value].edges
        if not edges:
            return 1
        for number, (source, target, kind) in enumerate(
            edges if hasattr(heads, "_length_") else ()
        ):
            heads[number], tails[number] = source, target
            data[number].type = data[number].from_port = kind
        count._obj.value = len(edges)
        return 0

    def cuGraphGetRootNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        found = self.graphs[graph.value]
        count._obj.value = len(set(found.nodes) - {target for _, target, _ in found.edges})
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.nodes[node.value].type
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, parameters: Any) -> int:
        parameters._obj.kern = node.value  # as a library's kernel: `func` stays empty
        return 0

    def cuKernelGetName(self, name: Any, kernel: Any) -> int:
        self._text(name, self.nodes[kernel.value].name.encode())
        return 0

    def cuEventCreate(self, made: Any, flags: Any) -> int:
        made._obj.value = self.handle()
        self.events[made._obj.value] = None
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        if stream.value in self.capturing:
            graph = self.capturing[stream.value]
            self.events[event.value] = graph, list(self.fronts[stream.value])
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: Any) -> int:
        recorded = self.events[event.value]
        if recorded is not None:
            graph, nodes = recorded
            self.capturing[stream.value] = graph
            front = self.fronts.setdefault(stream.value, [])
            front += [node for node in nodes if node not in front]
        return 0

    def cuMemsetD32Async(self, address: Any, value: Any, words: Any, stream: Any) -> int:
        target = self.at(address.value, words.value)
        self.issue(stream.value, Node(MEMSET, lambda: void(target.fill_(value.value))))
        return 0

    def cuMemcpyDtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        to, of = (self.at(place.value, size.value // 4) for place in (target, source))
        self.issue(stream.value, Node(MEMCPY, lambda: void(to.copy_(of))))
        return 0

    arena: torch.Tensor

    def at(self, address: int, words: int) -> torch.Tensor:
        start = (address - self.arena.data_ptr()) // 4
        return self.arena[start : start + words]


class FakeMachine(execute.Machine):
    """A machine whose kernels run in Python; `library` is its driver's."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.arch = "sm_90a"
        self.library = FakeLibrary()
        self.driver = Driver(self.library)
        self.streams: list[Any] = []

    def stream(self, number: int) -> Any:
        while len(self.streams) <= number:
            self.streams.append(SimpleNamespace(cuda_stream=1 + len(self.streams)))
        return self.streams[number]


def run_rows(rows: torch.Tensor, words: torch.Tensor, seen: torch.Tensor) -> None:
    """What the stand-in's `_work` does, at once."""
    for kind, first, count, value, slot, *_ in rows.tolist():
        if kind == WRITE:
            words[first : first + count] = value
        if kind == READ:
            seen[slot] += int((words[first : first + count] != value).sum())


@contextlib.contextmanager
def fake_gpu(patch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    """`execute.Machine()` is a fake one; torch's stream context only remembers the stream."""
    machine = FakeMachine()
    current = [machine.stream(0)]

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def compiled(kernel: Any, specs: Any, arch: str) -> Callable[..., None]:
        def launch(early: Any, body: Any, words: torch.Tensor, seen: torch.Tensor) -> None:
            machine.library.arena = words

            def run() -> None:
                for rows in (early, body):
                    run_rows(rows, words, seen)

            name = f"{kernel.name}_kernel_cutlass_stand_in_tensorptri32"
            machine.library.issue(current[-1].cuda_stream, Node(KERNEL, run, name), kernel.pdl)

        return launch

    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "stream", on)
    patch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(execute, "compile_kernel", compiled)
    patch.setattr(execute, "Machine", lambda: machine)
    assert compile_module  # the real compiler stays out of these tests
    yield machine
