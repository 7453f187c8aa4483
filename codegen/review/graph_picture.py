"""The predicted CUDA graph as text and as SVG: streams as columns, depth downwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kpipe.codegen.plan.model import MAIN
from kpipe.codegen.proof.graph_edges import FULL, PORTS, PROGRAMMATIC
from kpipe.codegen.review import svg
from kpipe.codegen.review.captions import Caption, heading, text_heading, wrapped
from kpipe.codegen.review.captured_graph import CapturedGraph, NodeEdge

BOX_HEIGHT, ROW, COLUMN_GAP = 28.0, 46.0, 50.0
TOP = 92.0  # of the first node, below the heading
ABOUT = (
    "Predicted for a capture, a layer in the middle of a graph. full: from port 0, at the end of "
    "the node; programmatic: from port 1, once all of its blocks have released or exited."
)


@dataclass(frozen=True)
class GraphView:
    """A graph with what its picture says above it and how its stages are coloured."""

    caption: Caption
    graph: CapturedGraph


def _facts(graph: CapturedGraph) -> str:
    own = sum(not node.ahead for node in graph.nodes) - 1
    full, programmatic = graph.count(FULL), graph.count(PROGRAMMATIC)
    streams = "stream" if graph.replay_streams == 1 else "streams"
    return (
        f"{own} nodes a layer and one between layers; {full} full and {programmatic} programmatic "
        f"edges; replayed on {graph.replay_streams} {streams}"
    )


def graph_text(views: Sequence[GraphView]) -> str:
    """One table a graph, at most 100 columns wide."""
    parts = []
    for view in views:
        rows = [("node", "stream", "kernel", "launched", "depends on")]
        for number, node in enumerate(view.graph.nodes):
            needs = [_edge_words(view.graph, edge) for edge in view.graph.into(number)]
            how = "" if node.ahead else "pdl" if node.pdl else "plain"
            rows.append((str(number), node.stream, node.title, how, "".join(needs[:1])))
            rows += [("", "", "", "", more) for more in needs[1:]]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = ["  ".join([*map(str.ljust, row[:4], widths), row[4]]).rstrip() for row in rows]
        parts.append([*text_heading(view.caption), *wrapped(_facts(view.graph)), "", *table])
    return "\n\n".join("\n".join(lines) for lines in [*parts, wrapped(ABOUT)]) + "\n"


def _edge_words(graph: CapturedGraph, edge: NodeEdge) -> str:
    return f"{edge.kind} {edge.first} {graph.nodes[edge.first].title}"


def graph_svg(views: Sequence[GraphView]) -> str:
    """One picture of the graphs, one below the other."""
    places = [_place(view.graph) for view in views]
    width = max(svg.WIDTH, *(place.right for place in places))
    parts: list[str] = []
    top = 0.0
    for view, place in zip(views, places, strict=True):
        drawn, top = _panel(view, place, top, width)
        parts += drawn
    about = svg.wrapped(ABOUT, svg.SMALL, width - 2 * svg.PAD)
    parts += svg.paragraph(svg.PAD, top, about)
    name = views[0].caption.pipeline
    height = top + 16 * len(about) + 10
    return svg.document(height, f"{name}: predicted CUDA graph", parts, width)


@dataclass(frozen=True)
class _Place:
    """Columns of the streams, the width of a box, where the words beside begin and end."""

    columns: dict[str, int]
    box: float
    notes: float
    right: float

    def left(self, stream: str) -> float:
        return svg.PAD + self.columns[stream] * (self.box + COLUMN_GAP)

    def middle(self, stream: str) -> float:
        return self.left(stream) + self.box / 2


def _place(graph: CapturedGraph) -> _Place:
    own = [node.stream for node in graph.nodes if not node.ahead]
    streams = tuple(dict.fromkeys([MAIN, *own]))
    box = max(svg.width(node.title, svg.TEXT, mono=True) for node in graph.nodes) + 28
    notes = svg.PAD + len(streams) * (box + COLUMN_GAP)
    words = (_port_words(graph, edge) for edge in graph.edges)
    longest = max((svg.width(line, svg.SMALL, mono=True) for line in words), default=0.0)
    columns = {stream: number for number, stream in enumerate(streams)}
    return _Place(columns, box, notes, notes + longest + svg.PAD)


def _panel(view: GraphView, place: _Place, top: float, width: float) -> tuple[list[str], float]:
    graph = view.graph
    first = top + TOP
    parts = heading(view.caption, _facts(graph), "predicted", top, width)
    for stream in place.columns:
        x = place.middle(stream)
        parts.append(svg.text(x, first - 10, stream, mono=True, anchor="middle", kind="b"))
    parts += [part for edge in graph.edges for part in _edge(graph, place, edge, first)]
    rows: dict[int, list[str]] = {}
    for number, node in enumerate(graph.nodes):
        parts.append(_node(view, place, number, first))
        for edge in graph.into(number):
            rows.setdefault(node.depth, []).append(_port_words(graph, edge))
    for depth, lines in rows.items():
        y = first + depth * ROW + BOX_HEIGHT / 2 + 4 - 7 * (len(lines) - 1)
        for number, words in enumerate(lines):
            note = svg.text(place.notes, y + 14 * number, words, svg.SMALL, mono=True, kind="soft")
            parts.append(note)
    deepest = max(node.depth for node in graph.nodes)
    return parts, first + deepest * ROW + BOX_HEIGHT + 34


def _port_words(graph: CapturedGraph, edge: NodeEdge) -> str:
    first, second = graph.nodes[edge.first].title, graph.nodes[edge.second].name
    return f"{second} <- {first}, port {PORTS[edge.kind]}"


def _node(view: GraphView, place: _Place, number: int, first: float) -> str:
    node = view.graph.nodes[number]
    x, y = place.left(node.stream), first + node.depth * ROW
    kind = f"s{view.caption.colour(node.stage)}" if node.stage else "cell"
    kind += " faint" * node.ahead
    how = "launched with the PDL attribute" if node.pdl else "launched plain"
    needs = [_edge_words(view.graph, edge) for edge in view.graph.into(number)]
    title = "\n".join([f"node {number}: {node.title}, stream {node.stream}, {how}", *needs])
    box = svg.rect(x, y, place.box, BOX_HEIGHT, kind, radius=5)
    middle = x + place.box / 2, y + BOX_HEIGHT / 2 + 4
    parts = [svg.rect(x, y, place.box, BOX_HEIGHT, "page", radius=5)] * node.ahead + [box]
    return svg.titled(title, [*parts, svg.text(*middle, node.title, mono=True, anchor="middle")])


def _edge(graph: CapturedGraph, place: _Place, edge: NodeEdge, first: float) -> list[str]:
    """Straight down to the next node of a column; out to another column and down to its node, or
    down beside its node and into it, whichever column has nothing in the way."""
    a, b = graph.nodes[edge.first], graph.nodes[edge.second]
    x1, x2 = place.middle(a.stream), place.middle(b.stream)
    y1, y2 = first + a.depth * ROW, first + b.depth * ROW
    kind = "link" if edge.kind == FULL else "pdl dash"
    fill = "fill-soft" if edge.kind == FULL else "fill-pdl"
    if x1 == x2:
        return [
            svg.line(x1, y1 + BOX_HEIGHT, x2, y2 - 6, kind),
            svg.head(x2, y2, fill, "down"),
        ]
    right = 1 if x2 > x1 else -1
    between = range(a.depth, b.depth)
    blocked = any(n.stream == b.stream and n.depth in between for n in graph.nodes)
    n = svg.number
    if not blocked:  # out, then down
        x2 += -right * min(24.0, place.box / 4)
        y1 += BOX_HEIGHT / 2
        start, corner = x1 + right * place.box / 2, f"Q{n(x2)} {n(y1)} {n(x2)} {n(y1 + 10)}"
        points = f"M{n(start)} {n(y1)}L{n(x2 - right * 10)} {n(y1)}{corner}L{n(x2)} {n(y2 - 6)}"
        return [svg.path(points, kind), svg.head(x2, y2, fill, "down")]
    y2 += BOX_HEIGHT / 2
    tip = x2 - right * place.box / 2
    corner = f"Q{n(x1)} {n(y2)} {n(x1 + right * 10)} {n(y2)}"
    points = (
        f"M{n(x1)} {n(y1 + BOX_HEIGHT)}L{n(x1)} {n(y2 - 10)}{corner}L{n(tip - right * 6)} {n(y2)}"
    )
    return [svg.path(points, kind), svg.head(tip, y2, fill, "right" if right > 0 else "left")]
