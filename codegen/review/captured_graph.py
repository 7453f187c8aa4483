"""The CUDA graph that a capture of the layer is predicted to hold: its nodes, edges and ports.

The edges are the proof's own (`proof/edges.py`, captured), those of a layer in the middle of a
graph: the layer ahead of it is there, and what runs between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from kpipe.codegen.plan.model import MAIN, PipelinePlan, StepPlan
from kpipe.codegen.proof.edges import edges
from kpipe.codegen.proof.graph_edges import graph_edges
from kpipe.codegen.proof.lower import BETWEEN_LAYERS, lower
from kpipe.codegen.proof.program import Kernel
from kpipe.codegen.proof.replay import predicted_streams


@dataclass(frozen=True)
class Node:
    """One kernel node; `depth` is its longest way from the layer ahead.

    `pdl`: launched with programmatic stream serialisation.  `stage` is empty for what runs between
    two layers.  `ahead`: a node of the layer ahead, or what runs behind that one.
    """

    name: str
    stream: str
    stage: str
    pdl: bool
    depth: int
    ahead: bool

    @property
    def title(self) -> str:
        """Its name, told apart from the same op of this layer."""
        return f"{self.name} of layer ahead" if self.ahead and self.stage else self.name


@dataclass(frozen=True)
class NodeEdge:
    """Node `second` depends on node `first`; `kind` is full or programmatic."""

    first: int
    second: int
    kind: str


@dataclass(frozen=True)
class CapturedGraph:
    """One layer of the graph: what it depends on of the layer ahead, its launches, and what runs
    behind it.

    `replay_streams` is the number of streams on which a graph of 61 layers is predicted to be
    replayed.
    """

    nodes: tuple[Node, ...]
    edges: tuple[NodeEdge, ...]
    replay_streams: int

    def into(self, node: int) -> tuple[NodeEdge, ...]:
        """The edges into a node, by first node."""
        return tuple(edge for edge in self.edges if edge.second == node)

    def count(self, kind: str) -> int:
        """How many edges are of a kind."""
        return sum(edge.kind == kind for edge in self.edges)


def captured_graph(plan: PipelinePlan, step: StepPlan) -> CapturedGraph:
    """The graph of one layer of a step whose overlap is decided."""
    found = edges(lower(plan, step, captured=True, layers=2, steps=1))
    count = len(step.launches) + 1  # with what runs between layers
    own = range(len(found.launches) - count, len(found.launches))
    linked = {
        (edge.source, edge.target, edge.kind) for edge in graph_edges(found) if edge.target in own
    }
    shown = sorted({first for first, _, _ in linked} | set(own))
    depths = dict.fromkeys(shown, 0)
    for first, second, _ in sorted(linked, key=lambda edge: edge[1]):  # sources are done first
        depths[second] = max(depths[second], depths[first] + 1)
    nodes = []
    for position in shown:
        kernel = found.launches[position].node
        place = (position - own.start) % count  # in its layer
        launch = step.launches[place] if kernel.name != BETWEEN_LAYERS else None
        nodes.append(
            Node(
                kernel.name,
                launch.stream if launch else MAIN,
                launch.stage if launch else "",
                isinstance(kernel, Kernel) and kernel.pdl,
                depths[position],
                position < own.start,
            )
        )
    numbers = {position: number for number, position in enumerate(shown)}
    order = sorted((numbers[second], numbers[first], kind) for first, second, kind in linked)
    listed = tuple(NodeEdge(first, second, kind) for second, first, kind in order)
    return CapturedGraph(tuple(nodes), listed, predicted_streams(step))
