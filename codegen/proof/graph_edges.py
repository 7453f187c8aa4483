"""The edges of the CUDA graph that captured launches become, by the rules of the proof."""

from __future__ import annotations

from dataclasses import dataclass

from kpipe.codegen.proof.edges import Edges
from kpipe.codegen.proof.instants import PER_LAUNCH, START

FULL, PROGRAMMATIC = "full", "programmatic"
PORTS = {FULL: 0, PROGRAMMATIC: 1}  # cudaGraphKernelNodePort: default, programmatic
_KINDS = {"graph_full": FULL, "graph_start": PROGRAMMATIC}


@dataclass(frozen=True, order=True)
class GraphEdge:
    """Launch `target` depends on launch `source`; both are positions in the program.

    full: it starts when the source has completed.  programmatic: it starts when the source has
    released it or exited.  `event`: through a fork or a join, else along the stream.
    """

    target: int
    source: int
    kind: str
    event: bool


def graph_edges(found: Edges) -> tuple[GraphEdge, ...]:
    """The edges between the captured launches of a program, by target."""
    listed = {
        GraphEdge(position, edge.source // PER_LAUNCH, _KINDS[edge.rule], edge.event >= 0)
        for position in range(len(found.launches))
        for edge in found.parents[PER_LAUNCH * position + START]
        if edge.rule in _KINDS
    }
    return tuple(sorted(listed))
