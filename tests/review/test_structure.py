"""Graph, lifetimes and mailboxes against accounts of their own, and the trace's form."""

from __future__ import annotations

import json
from itertools import pairwise

from kpipe.codegen.plan.model import MAIN, Fork, Launch, Method, PipelinePlan, StepPlan
from kpipe.codegen.review.buffer_lifetimes import lifetimes
from kpipe.codegen.review.captured_graph import captured_graph
from kpipe.codegen.review.mailbox_phases import phases
from kpipe.codegen.review.timed_schedule import timed_schedule
from kpipe.codegen.review.trace import trace_json


def methods_of(plans: dict[str, PipelinePlan]) -> list[tuple[PipelinePlan, Method]]:
    return [(plan, method) for plan in plans.values() for method in plan.methods]


def expected_edges(step: StepPlan) -> set[tuple[str, str, str]]:
    """Edges into the second of two captured layers: a kernel launched with the attribute depends
    programmatically on every kernel that its stream's next node depends on, a plain one fully."""
    fronts: dict[str, set[str]] = {}
    found: set[tuple[str, str, str]] = set()
    for layer in (0, 1):
        for item in step.items:
            if isinstance(item, Launch):
                kind = "programmatic" if item.pdl.attribute else "full"
                front = fronts.get(item.stream, set())
                found |= {(f, f"{item.name}{layer}", kind) for f in front}
                fronts[item.stream] = {f"{item.name}{layer}"}
            else:
                fork = isinstance(item, Fork)
                before, behind = (item.origin, item.stream) if fork else (item.stream, item.target)
                fronts[behind] = fronts.get(behind, set()) | fronts.get(before, set())
        found |= {(f, f"between layers{layer}", "programmatic") for f in fronts[MAIN]}
        fronts[MAIN] = {f"between layers{layer}"}
    return {edge for edge in found if edge[1].endswith("1")}


def test_the_graph_has_the_edges_of_a_capture(plans: dict[str, PipelinePlan]) -> None:
    for plan, method in methods_of(plans):
        graph = captured_graph(plan, method.plan)
        names = [f"{node.name}{0 if node.ahead else 1}" for node in graph.nodes]
        found = {(names[e.first], names[e.second], e.kind) for e in graph.edges}
        assert found == expected_edges(method.plan)
        assert len(graph.edges) == len(found)


def test_depths_grow_along_edges(plans: dict[str, PipelinePlan]) -> None:
    for plan, method in methods_of(plans):
        graph = captured_graph(plan, method.plan)
        for number, node in enumerate(graph.nodes):
            ahead = [graph.nodes[edge.first].depth + 1 for edge in graph.into(number)]
            assert node.depth == max(ahead, default=0)


def test_a_piece_is_alive_from_its_write_to_its_last_read(plans: dict[str, PipelinePlan]) -> None:
    for plan, method in methods_of(plans):
        found = lifetimes(plan, method.plan)
        assert found.launches == tuple(launch.name for launch in method.plan.launches)
        for piece in found.pieces:
            if piece.first < 0 or piece.scope == "launch":
                continue
            assert piece.touches[piece.first] == "W", piece.name
            assert piece.touches[piece.last] == "R", piece.name
        whole = {piece.name: piece for piece in found.pieces if not piece.inner}
        private = [piece for piece in found.pieces if piece.scope == "launch"]
        assert all(piece.first == piece.last for piece in private)
        assert found.total == sum(p.bytes for p in (*plan.buffers, *private))
        assert 0 < found.live <= found.total
        for buffer in plan.buffers:
            inner = [piece for piece in found.pieces if piece.inner == buffer.name]
            assert [piece.name for piece in inner] == [name for name, _, _ in buffer.columns]
            if inner:
                assert whole[buffer.name].last == max(piece.last for piece in inner)


def test_lifetimes_of_the_front_list_by_hand(plans: dict[str, PipelinePlan]) -> None:
    plan = plans["dsa_tp"]
    step = next(method.plan for method in plan.methods if method.name == "_front")
    pieces = {piece.name: piece for piece in lifetimes(plan, step).pieces}
    names = [launch.name for launch in step.launches]

    def touched(name: str) -> dict[str, str]:
        return {names[n]: letter for n, letter in enumerate(pieces[name].touches) if letter}

    assert touched("selected") == {"topk_select": "W", "sparse_decode": "R"}
    assert touched("gate") == {"packed_gemm": "W", "mla_value": "R"}
    assert touched("query") == {"mla_query": "W", "sparse_decode": "R"}
    assert touched("q_c") == {}  # index_front and mla_query norm for themselves


def test_every_copy_is_published_polled_and_rearmed_in_its_layers(
    plans: dict[str, PipelinePlan],
) -> None:
    plan = plans["dsa_dcp"]
    for method in plan.methods:
        found = phases(plan, method.plan)
        per_layer = len(found.ops)
        assert found.layers == 3
        for copy in found.copies:
            for layer in range(found.layers):
                letters = "".join(copy.acts[layer * per_layer : (layer + 1) * per_layer])
                if layer % 2 != copy.parity:
                    assert letters == ""
                else:
                    assert letters[0] == "P" and letters[-1] == "A" and "W" in letters
            owner = next(box.rearmed_by for box in plan.mailboxes if box.name == copy.box)
            for first, last in copy.spans:
                assert found.ops[last % per_layer] == owner
                assert first // per_layer == last // per_layer


def test_a_trace_has_what_the_format_asks_for(plans: dict[str, PipelinePlan]) -> None:
    for plan in plans.values():
        schedules = [timed_schedule(plan, m.plan, m.name) for m in plan.methods]
        data = json.loads(trace_json(schedules))
        events = data["traceEvents"]
        assert {event["ph"] for event in events} <= {"M", "X", "s", "f"}
        assert all({"name", "pid", "tid"} <= event.keys() for event in events)
        assert set(data["otherData"]["durations"]) == {m.name for m in plan.methods}
        lanes: dict[tuple[int, int], list[dict]] = {}
        for event in events:
            if event["ph"] == "X":
                assert event["dur"] > 0 and event["args"]["duration"] == "estimated"
                lanes.setdefault((event["pid"], event["tid"]), []).append(event)
        assert sum(map(len, lanes.values())) == sum(len(m.plan.launches) for m in plan.methods)
        for slices in lanes.values():
            for first, second in pairwise(sorted(slices, key=lambda e: e["ts"])):
                assert first["ts"] + first["dur"] <= second["ts"] + 0.002
        flows = [event for event in events if event["ph"] in "sf"]
        begins = {e["id"]: e for e in flows if e["ph"] == "s"}
        ends = {e["id"]: e for e in flows if e["ph"] == "f"}
        assert begins.keys() == ends.keys() and len(flows) == 2 * len(begins)
        for number, begin in begins.items():
            assert any(
                s["ts"] <= begin["ts"] < s["ts"] + s["dur"]
                for s in lanes[begin["pid"], begin["tid"]]
            )
            end = ends[number]
            assert end["bp"] == "e" and end["ts"] >= begin["ts"]
            assert any(s["ts"] == end["ts"] for s in lanes[end["pid"], end["tid"]])


def test_the_title_of_a_process_says_what_the_durations_are(
    plans: dict[str, PipelinePlan],
) -> None:
    plan = plans["dsa_tp"]
    method = plan.methods[0]
    data = json.loads(trace_json([timed_schedule(plan, method.plan, method.name)]))
    (name,) = [e for e in data["traceEvents"] if e["name"] == "process_name"]
    assert name["args"]["name"].endswith(", estimated")
