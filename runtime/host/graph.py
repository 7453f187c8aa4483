"""A captured CUDA graph as data: its nodes, their kernels, and its edges with ports and types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kpipe.runtime.host.driver import Driver, DriverError

NODE_TYPES = (
    *("kernel", "memcpy", "memset", "host", "child graph", "empty", "event wait", "event record"),
    *("semaphore signal", "semaphore wait", "allocation", "free", "batch of memory operations"),
    "conditional",
)
OPERANDS = "_tensorptr"


@dataclass(frozen=True)
class Node:
    """A node; `launch` is the position of the launch that made it, -1 where none is known.

    `kernel` is the function's name of a kernel node, without the operand types that CuTe DSL puts
    behind it; else empty.
    """

    launch: int
    type: str
    kernel: str = ""


@dataclass(frozen=True)
class GraphEdge:
    """Node `target` depends on node `source`; both are positions in the list of nodes.

    Type 1 is programmatic: its start hangs on the port (1: the trigger, 2: the start of the
    source) and not on the source's completion.
    """

    source: int
    target: int
    from_port: int = 0
    to_port: int = 0
    type: int = 0


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of their launches (those of none behind), edges sorted."""

    nodes: tuple[Node, ...]
    edges: tuple[GraphEdge, ...]


def read_graph(driver: Driver, graph: int, launches: Mapping[int, int]) -> Graph:
    """A graph of the driver; `launches` says which launch made a node, where that is known.

    Raises DriverError that lists the graph's nodes where the driver cannot say.
    """
    handles = driver.nodes(graph)
    last = 1 + max(launches.values(), default=0)
    ordered = sorted(handles, key=lambda handle: launches.get(handle, last))
    place = {handle: number for number, handle in enumerate(ordered)}
    nodes = []
    for handle in ordered:
        number = driver.node_type(handle)
        kind = NODE_TYPES[number] if number < len(NODE_TYPES) else f"type {number}"
        name = driver.kernel_name(handle).partition(OPERANDS)[0] if kind == "kernel" else ""
        nodes.append(Node(launches.get(handle, -1), kind, name))
    try:
        found = driver.edges(graph)
    except DriverError as error:
        listed = ", ".join(node.kernel or node.type for node in nodes)
        raise DriverError(f"the edges of the graph of {listed}: {error}") from None
    edges = (GraphEdge(place[source], place[target], *data) for source, target, *data in found)
    key = lambda edge: (edge.target, edge.source, edge.type)  # noqa: E731
    return Graph(tuple(nodes), tuple(sorted(edges, key=key)))


def graph_json(graph: Graph) -> dict[str, Any]:
    """The graph as plain data."""
    return {
        "nodes": [asdict(node) for node in graph.nodes],
        "edges": [asdict(edge) for edge in graph.edges],
    }
