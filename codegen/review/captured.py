"""The graph that capturing one layer is predicted to give: nodes, edges and their ports.

The edges are those of the proof, read off the second of two captured layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.proof.edges import edges
from kpipe.codegen.proof.graph_edges import PROGRAMMATIC, graph_edges
from kpipe.codegen.proof.lower import BETWEEN_LAYERS, lower

LAYER_BEFORE = " of the layer before"


@dataclass(frozen=True)
class Edge:
    """`second` depends on `first`, in the words of `GraphEdge`."""

    first: str
    second: str
    port: str
    event: bool


@dataclass(frozen=True)
class Graph:
    """One captured layer: its launches, and the edges into them and into what follows.

    `ordered` are all pairs of which the second stands behind the first by some chain of edges;
    the second is of this layer, the first of this one or of the layer before.
    """

    nodes: tuple[str, ...]
    edges: tuple[Edge, ...]
    ordered: frozenset[tuple[str, str]]

    @property
    def programmatic(self) -> int:
        """How many edges have the programmatic port."""
        return sum(edge.port == PROGRAMMATIC for edge in self.edges)

    @property
    def beside(self) -> frozenset[tuple[str, str]]:
        """Pairs of launches that no chain orders: they may run side by side."""
        return frozenset(
            (first, second)
            for number, first in enumerate(self.nodes)
            for second in self.nodes[number + 1 :]
            if (first, second) not in self.ordered
        )


def captured_layer(pipeline: PipelinePlan, step: StepPlan) -> Graph:
    """The predicted graph of one layer of a step that has a layer ahead of it."""
    program = lower(pipeline, step, captured=True, layers=2, steps=1)
    found = edges(program)
    names = [launch.node.name for launch in found.launches]
    ahead = names.index(BETWEEN_LAYERS)  # the end of the first layer
    names = [name + LAYER_BEFORE * (place < ahead) for place, name in enumerate(names)]
    linked = graph_edges(found)
    before: list[set[int]] = [set() for _ in names]
    for edge in linked:  # by target, so that what a source stands behind is known
        before[edge.target] |= {edge.source, *before[edge.source]}
    listed = tuple(
        Edge(names[edge.source], names[edge.target], edge.kind, edge.event)
        for edge in linked
        if edge.target > ahead
    )
    own = range(ahead + 1, len(names) - 1)
    ordered = frozenset((names[first], names[at]) for at in own for first in before[at])
    return Graph(tuple(names[position] for position in own), listed, ordered)
