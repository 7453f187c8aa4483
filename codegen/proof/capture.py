"""The graph that a capture must give, predicted by the checker's own edges, and comparing it.

Two chained layers of every launch list of every mode are lowered and captured in the model.  What
a GPU recorded for the same launches must be that graph, edge by edge; where it is not, either the
rule of capture or the lowering is wrong, and with it every proof.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kpipe.codegen.plan.build import build_mode
from kpipe.codegen.plan.model import Method, PipelinePlan, StepPlan
from kpipe.codegen.plan.resolve import Resolved
from kpipe.codegen.proof.edges import edges
from kpipe.codegen.proof.graph_edges import FULL, PROGRAMMATIC, GraphEdge, graph_edges
from kpipe.codegen.proof.lower import lower
from kpipe.codegen.proof.program import Kernel, Program
from kpipe.codegen.proof.schedule_form import encode
from kpipe.codegen.proof.synthesis import synthesise

LAYERS = 2
TRIGGER_PORT = 1  # of a kernel node: its trigger, and not its completion
Use = tuple[str, int, int]  # arch, q, rows


@dataclass(frozen=True)
class PredictedGraph:
    """What a captured segment must become: a node per launch, by position, and the edges."""

    nodes: Mapping[int, str]  # position -> the launch, as a person calls it
    kernels: Mapping[int, str]  # position -> how the kernel's name begins; copies have none
    edges: tuple[GraphEdge, ...]


@dataclass(frozen=True)
class CaptureList:
    """One launch list of one mode, and its graph; `key` is unique in a pipeline.

    `uses` are the steps (arch, q, rows) that can take it, `selected` those for which the table
    does.
    """

    key: str
    mode: str
    uses: tuple[Use, ...]
    selected: tuple[Use, ...]
    schedule: Mapping[str, Any]
    graph: PredictedGraph

    @property
    def digest(self) -> str:
        """sha256 of the schedule: an observation of another one says nothing about this."""
        text = json.dumps(self.schedule, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """What the GPU's machine needs, and the prediction."""
        return {
            "key": self.key,
            "mode": self.mode,
            "uses": [list(use) for use in self.uses],
            "selected": [list(use) for use in self.selected],
            "sha256": self.digest,
            "schedule": self.schedule,
            "nodes": list(self.graph.nodes.values()),
            "edges": [
                [self.graph.nodes[edge.source], self.graph.nodes[edge.target], edge.kind]
                for edge in self.graph.edges
            ],
        }


def predicted_graph(program: Program) -> PredictedGraph:
    """The graph of the program's captured launches, by the edges that the checker rests on."""
    found = edges(program)
    nodes: dict[int, str] = {}
    kernels: dict[int, str] = {}
    seen: dict[str, int] = {}
    for position, launch in enumerate(found.launches):
        if found.in_graph[position]:
            name = launch.node.name
            nodes[position] = f"{name} (layer {seen.setdefault(name, 0)})"
            if isinstance(launch.node, Kernel):
                kernels[position] = symbol(name)
            seen[name] += 1
    return PredictedGraph(nodes, kernels, graph_edges(found))


def symbol(name: str) -> str:
    """A launch's name as a stand-in carries it in its function's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def capture_lists(resolved: Resolved, pipeline: PipelinePlan) -> tuple[CaptureList, ...]:
    """Every launch list of every mode that some rows can take, with the overlap that is proved.

    `pipeline` is the proved plan: its lists are the selected ones.
    """
    selected: dict[tuple, list[Use]] = {}
    for step in pipeline.plans:
        selected.setdefault(step.identity, []).append((step.arch, step.q, step.rows))
    plans = ((mode, build_mode(resolved, mode)) for mode in resolved.modes)
    return tuple(
        found
        for mode, plan in plans
        if plan is not None
        for found in _of_mode(plan, mode, selected)
    )


def _of_mode(
    plan: PipelinePlan, mode: str, selected: Mapping[tuple, Sequence[Use]]
) -> Iterable[CaptureList]:
    lists: dict[tuple, tuple[StepPlan, list[Method]]] = {}
    for method in plan.methods:
        step = synthesise(plan, method.plan).step
        lists.setdefault(step.identity, (step, []))[1].append(method)
    for step, methods in lists.values():
        program = lower(plan, step, captured=True, layers=LAYERS, steps=1)
        uses = tuple(
            (arch, q, rows)
            for method in methods
            for arch, q, counts in method.uses
            for rows in counts
        )
        name = methods[0].name.removeprefix("_").removeprefix(mode).removeprefix("_")
        yield CaptureList(
            f"{mode}/{name}" if name else mode,
            mode,
            uses,
            tuple(selected.get(step.identity, ())),
            encode(program, touches=False),
            predicted_graph(program),
        )


def illegal_modes(resolved: Resolved, lists: Iterable[CaptureList]) -> tuple[str, ...]:
    """Modes of the spec that have no launch list here."""
    planned = {found.mode for found in lists}
    return tuple(mode for mode in resolved.modes if mode not in planned)


# -- comparing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One captured graph against its prediction; `layer`: of the generated layer itself.

    `lines` say what differs; empty where the graph is the predicted one.
    """

    key: str
    layer: bool
    nodes: int
    edges: int
    lines: tuple[str, ...]


def judge(lists: Sequence[CaptureList], captured: Mapping[str, Any]) -> tuple[Verdict, ...]:
    """Every captured graph against the list of its key, in the order of the prediction.

    A list that was not captured, was refused, or for which another schedule was captured, is a
    difference; so is a key that the spec does not have.  Raises KeyError or TypeError for what is
    no document of captures.
    """
    known = {one.key: one for one in lists}
    order = {one.key: number for number, one in enumerate(lists)}
    found = captured["lists"]
    verdicts = [_verdict(known.get(one["key"]), one) for one in found]
    refused = captured.get("refused", ())
    for one in refused:
        why = f"refused on that machine: {one['error']}"
        verdicts.append(Verdict(one["key"], one["layer"], 0, 0, (why,)))
    stand_ins = {one["key"] for one in (*found, *refused) if not one["layer"]}
    for one in lists:
        if one.key not in stand_ins:
            verdicts.append(Verdict(one.key, False, 0, 0, ("it was not captured",)))
    return tuple(sorted(verdicts, key=lambda v: (order.get(v.key, len(order)), v.layer)))


def _verdict(one: CaptureList | None, captured: Mapping[str, Any]) -> Verdict:
    key, layer = captured["key"], captured["layer"]
    (graph,) = captured["graphs"]
    sizes = len(graph["nodes"]), len(graph["edges"])
    if one is None:
        return Verdict(key, layer, *sizes, ("the spec has no such launch list",))
    if captured["sha256"] != one.digest:
        why = "captured for another schedule of that name: plan and capture again"
        return Verdict(key, layer, *sizes, (why,))
    return Verdict(key, layer, *sizes, differences(one.graph, graph, kernels=not layer))


def differences(
    predicted: PredictedGraph, captured: Mapping[str, Any], *, kernels: bool = True
) -> tuple[str, ...]:
    """What a captured graph (`nodes`, `edges`, as the runtime writes them) has otherwise.

    One line each: nodes that are missing, extra or of another kind, kernels of another name (with
    `kernels`), edges that are missing, extra, or of another type or port.  Empty where it is the
    predicted graph.  Raises KeyError or TypeError for what is no graph.
    """
    names = dict(predicted.nodes)
    lines, at = [], {}
    for number, node in enumerate(captured["nodes"]):
        position, kernel = node["launch"], node["kernel"]
        at[number] = position if position in names else -1 - number
        if position not in names:
            names[at[number]] = f"{kernel or node['type']} (no launch)"
            lines.append(f"node extra: {kernel or node['type']}")
        elif node["type"] not in (wanted := _types(predicted, position)):
            said = " or ".join(wanted)
            lines.append(f"node {names[position]} is of type {node['type']}, not {said}")
        elif kernels and not kernel.startswith(predicted.kernels.get(position, "")):
            lines.append(f"node {names[position]} runs the kernel {kernel}")
    missing = set(predicted.nodes) - set(at.values())
    lines += [f"node missing: {names[position]}" for position in sorted(missing)]
    wanted = {(edge.source, edge.target): edge.kind for edge in predicted.edges}
    return (*lines, *_edge_lines(wanted, _recorded(captured["edges"], at), names))


def _types(predicted: PredictedGraph, position: int) -> tuple[str, ...]:
    return ("kernel",) if position in predicted.kernels else ("memset", "memcpy")


def _recorded(
    captured: Sequence[Mapping[str, int]], at: Mapping[int, int]
) -> dict[tuple[int, int], str]:
    found = {}
    for edge in captured:
        data = edge["type"], edge["from_port"], edge["to_port"]
        kind = {(0, 0, 0): FULL, (1, TRIGGER_PORT, 0): PROGRAMMATIC}.get(data)
        said = kind or "type {}, from port {}, to port {}".format(*data)
        found[at[edge["source"]], at[edge["target"]]] = said
    return found


def _edge_lines(
    wanted: Mapping[tuple[int, int], str],
    found: Mapping[tuple[int, int], str],
    names: Mapping[int, str],
) -> list[str]:
    def arrow(pair: tuple[int, int]) -> str:
        return f"{names[pair[0]]} -> {names[pair[1]]}"

    lines = []
    for pair, kind in wanted.items():
        if pair not in found:
            lines.append(f"edge missing: {arrow(pair)}, {kind}")
        elif found[pair] != kind:
            lines.append(f"edge {arrow(pair)} is {found[pair]}, not {kind}")
    extra = sorted(pair for pair in found if pair not in wanted)
    return lines + [f"edge extra: {arrow(pair)}, {found[pair]}" for pair in extra]
