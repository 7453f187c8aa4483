"""The driver's functions that torch does not offer: capture, graphs, events, copies.

Through ctypes on libcuda alone, so that it works wherever a kernel can be launched.  Handles are
plain integers.  `Driver` takes the library as an argument: tests hand in their own.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

LIBRARY = "libcuda.so.1"
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: other calls of this thread do not end the capture
SET_DEPENDENCIES = 1
TIMING_OFF = 2  # CU_EVENT_DISABLE_TIMING
UPDATE_FAILED = 910  # CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
UPDATE_RESULTS = (
    *("applied", "failed", "refused: topology changed", "refused: a node's type changed"),
    *("refused: a function changed", "refused: parameters changed", "refused: not supported"),
    *("refused: a function changed", "refused: attributes changed"),
)


class DriverError(RuntimeError):
    """A call of the driver failed; the text names it and the driver's own words."""


class EdgeData(Structure):
    """CUgraphEdgeData."""

    _fields_ = (("from_port", c_ubyte), ("to_port", c_ubyte), ("type", c_ubyte)) + (
        ("reserved", c_ubyte * 5),
    )


class KernelParams(Structure):
    """CUDA_KERNEL_NODE_PARAMS, version 2."""

    _fields_ = (
        ("func", c_void_p),
        *((name, c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("parameters", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("context", c_void_p),
    )


class UpdateInfo(Structure):
    """CUgraphExecUpdateResultInfo."""

    _fields_ = (("result", c_int), ("node", c_void_p), ("origin", c_void_p))


@dataclass(frozen=True)
class CaptureState:
    """A capturing stream: its graph and the nodes on which its next node depends."""

    graph: int
    front: tuple[int, ...]


class Driver:
    """Checked calls; every method raises DriverError where the driver says no."""

    def __init__(self, library: Any = None) -> None:
        self.library = ctypes.CDLL(LIBRARY) if library is None else library

    def call(self, name: str, *arguments: Any) -> None:
        """One function of the library by its exported name."""
        self._check(name, self._status(name, *arguments))

    def _status(self, name: str, *arguments: Any) -> int:
        return getattr(self.library, name)(*arguments)

    def _check(self, name: str, status: int) -> None:
        if status:
            text = c_char_p()
            self.library.cuGetErrorString(status, byref(text))
            said = (text.value or b"unknown error").decode()
            raise DriverError(f"{name}: {said} ({status})")

    # -- capture ----------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        """Starts a capture on a stream."""
        self.call("cuStreamBeginCapture_v2", c_void_p(stream), c_int(RELAXED))

    def end_capture(self, stream: int) -> int:
        """Ends the capture that began on a stream; the graph."""
        graph = c_void_p()
        self.call("cuStreamEndCapture", c_void_p(stream), byref(graph))
        return graph.value or 0

    def capture_state(self, stream: int) -> CaptureState:
        """Where a capture stands on a stream; DriverError for a stream that is not captured."""
        status, identity = c_int(), ctypes.c_ulonglong()
        graph, front, edges, count = c_void_p(), POINTER(c_void_p)(), c_void_p(), c_size_t()
        self.call(
            "cuStreamGetCaptureInfo_v3",
            c_void_p(stream),
            *(byref(x) for x in (status, identity, graph, front, edges, count)),
        )
        if status.value != 1:
            raise DriverError(f"cuStreamGetCaptureInfo_v3: no capture here (status {status.value})")
        return CaptureState(graph.value or 0, tuple(front[i] or 0 for i in range(count.value)))

    def newest(self, stream: int) -> int:
        """The node that the last call on a capturing stream made.  DriverError where several
        nodes or none stand in front of the stream's next node."""
        front = self.capture_state(stream).front
        if len(front) != 1:
            raise DriverError(f"{len(front)} nodes in front of the stream's next node, not one")
        return front[0]

    def depend_on(self, stream: int, node: int) -> None:
        """The stream's next node depends on `node` alone."""
        nodes = (c_void_p * 1)(node)
        self.call(
            "cuStreamUpdateCaptureDependencies_v2",
            *(c_void_p(stream), nodes, c_void_p(), c_size_t(1), c_uint(SET_DEPENDENCIES)),
        )

    def add_child(self, graph: int, front: tuple[int, ...], child: int) -> int:
        """A node of `graph` behind `front` that runs another graph."""
        node, nodes = c_void_p(), (c_void_p * max(1, len(front)))(*front)
        self.call(
            "cuGraphAddChildGraphNode",
            *(byref(node), c_void_p(graph), nodes, c_size_t(len(front)), c_void_p(child)),
        )
        return node.value or 0

    # -- graphs -----------------------------------------------------------------------------

    def instantiate(self, graph: int) -> int:
        """An executable graph."""
        made = c_void_p()
        self.call(
            "cuGraphInstantiateWithFlags", byref(made), c_void_p(graph), ctypes.c_ulonglong(0)
        )
        return made.value or 0

    def launch_graph(self, executable: int, stream: int) -> None:
        """Launches an executable graph."""
        self.call("cuGraphLaunch", c_void_p(executable), c_void_p(stream))

    def update(self, executable: int, graph: int) -> str:
        """Puts another graph in the place of an executable one: `applied`, or why it is not."""
        info = UpdateInfo()
        name = "cuGraphExecUpdate_v2"
        status = self._status(name, c_void_p(executable), c_void_p(graph), byref(info))
        if status not in (0, UPDATE_FAILED):
            self._check(name, status)
        known = 0 <= info.result < len(UPDATE_RESULTS)
        return UPDATE_RESULTS[info.result] if known else f"refused: reason {info.result}"

    def destroy(self, graph: int = 0, executable: int = 0) -> None:
        """Gives graphs back."""
        if executable:
            self.call("cuGraphExecDestroy", c_void_p(executable))
        if graph:
            self.call("cuGraphDestroy", c_void_p(graph))

    def nodes(self, graph: int) -> tuple[int, ...]:
        """The nodes of a graph, in the driver's order."""
        count = c_size_t()
        self.call("cuGraphGetNodes", c_void_p(graph), c_void_p(), byref(count))
        found = (c_void_p * max(1, count.value))()
        self.call("cuGraphGetNodes", c_void_p(graph), found, byref(count))
        return tuple(found[i] or 0 for i in range(count.value))

    def edges(self, graph: int) -> tuple[tuple[int, int, int, int, int], ...]:
        """The edges of a graph: from, to, from port, to port, type.

        The driver calls it an invalid argument to ask a graph without edges for them, so they are
        asked for only where a node is no root.
        """
        count, roots, null = c_size_t(), c_size_t(), c_void_p()
        self.call("cuGraphGetNodes", c_void_p(graph), null, byref(count))
        self.call("cuGraphGetRootNodes", c_void_p(graph), null, byref(roots))
        if roots.value == count.value:
            return ()
        self.call("cuGraphGetEdges_v2", c_void_p(graph), null, null, null, byref(count))
        size = max(1, count.value)
        heads, tails, data = (c_void_p * size)(), (c_void_p * size)(), (EdgeData * size)()
        self.call("cuGraphGetEdges_v2", c_void_p(graph), heads, tails, data, byref(count))
        return tuple(
            (heads[i] or 0, tails[i] or 0, data[i].from_port, data[i].to_port, data[i].type)
            for i in range(count.value)
        )

    def node_type(self, node: int) -> int:
        """CUgraphNodeType."""
        kind = c_int()
        self.call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        return kind.value

    def kernel_name(self, node: int) -> str:
        """The function's name of a kernel node, as the compiler spelled it; empty where the
        driver has none for it."""
        parameters, name = KernelParams(), c_char_p()
        self.call("cuGraphKernelNodeGetParams_v2", c_void_p(node), byref(parameters))
        handles = ("cuFuncGetName", parameters.func), ("cuKernelGetName", parameters.kern)
        for function, handle in handles:
            if handle and not self._status(function, byref(name), c_void_p(handle)) and name.value:
                return name.value.decode()
        return ""

    # -- events and copies ------------------------------------------------------------------

    def event(self) -> int:
        """A new event without timing."""
        made = c_void_p()
        self.call("cuEventCreate", byref(made), c_uint(TIMING_OFF))
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        """Binds the event to what the stream holds now."""
        self.call("cuEventRecord", c_void_p(event), c_void_p(stream))

    def wait(self, stream: int, event: int) -> None:
        """The stream waits for the event's latest record."""
        self.call("cuStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint(0))

    def forget(self, event: int) -> None:
        """Gives an event back."""
        self.call("cuEventDestroy_v2", c_void_p(event))

    def fill(self, address: int, value: int, words: int, stream: int) -> None:
        """A memset of 32-bit words."""
        arguments = c_void_p(address), c_uint(value), c_size_t(words), c_void_p(stream)
        self.call("cuMemsetD32Async", *arguments)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """A memcpy of `size` bytes within the device."""
        arguments = c_void_p(target), c_void_p(source), c_size_t(size), c_void_p(stream)
        self.call("cuMemcpyDtoDAsync_v2", *arguments)

    def version(self) -> int:
        """The newest CUDA that the driver serves, for example 13000."""
        found = c_int()
        self.call("cuDriverGetVersion", byref(found))
        return found.value
