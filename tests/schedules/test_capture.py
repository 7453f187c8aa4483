"""Predicted graphs against captured ones: equal, and every way of not being equal."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from fake_gpu import KERNEL, FakeMachine, Node
from spec_project import make_project

from kpipe.codegen.cli import main
from kpipe.codegen.proof.capture import differences, predicted_graph
from kpipe.codegen.proof.graph_edges import GraphEdge
from kpipe.codegen.proof.program import Copy, Kernel, Launch, Program, Record, Segment, Wait
from kpipe.runtime import verify_capture
from kpipe.runtime.schedules import layers, trial_file
from kpipe.runtime.schedules.form import Launch as Form

A = Kernel("a", trigger="early")
B, C = (Kernel(name, pdl=True, waits=True) for name in "bc")
FORKED = Program(
    (
        Segment((Launch(0, Copy("inputs")),)),
        Segment(
            (
                *(Launch(0, A), Record(0, 0), Wait(1, 0), Launch(0, B), Launch(1, Copy("clear"))),
                *(Record(1, 1), Wait(0, 1), Launch(0, C)),
            ),
            captured=True,
        ),
    )
)


def node(launch: int, kernel: str, kind: str = "kernel") -> dict:
    return {"launch": launch, "type": kind, "kernel": kernel}


def edge(source: int, target: int, kind: int) -> dict:
    return {"source": source, "target": target, "from_port": kind, "to_port": 0, "type": kind}


def recorded() -> dict:
    """What CUDA records for FORKED, written out by hand."""
    nodes = [node(1, "a_k"), node(2, "b_k"), node(3, "", "memset"), node(4, "c_k")]
    edges = [edge(0, 1, 1), edge(0, 2, 0), edge(1, 3, 1), edge(2, 3, 0)]
    return {"nodes": nodes, "edges": edges}


def test_the_prediction_of_a_fork() -> None:
    graph = predicted_graph(FORKED)
    assert graph.nodes == {
        1: "a (layer 0)",
        2: "b (layer 0)",
        3: "clear (layer 0)",
        4: "c (layer 0)",
    }
    assert graph.edges == (
        GraphEdge(2, 1, "programmatic", False),
        GraphEdge(3, 1, "full", True),
        GraphEdge(4, 2, "programmatic", False),
        GraphEdge(4, 3, "full", True),
    )
    assert differences(graph, recorded()) == ()


CHANGES = {
    "edge missing: a (layer 0) -> b (layer 0), programmatic": lambda g: g["edges"].pop(0),
    "edge extra: a (layer 0) -> c (layer 0), full": lambda g: g["edges"].append(edge(0, 3, 0)),
    "edge a (layer 0) -> b (layer 0) is full, not programmatic": lambda g: g["edges"][0].update(
        type=0, from_port=0
    ),
    "edge a (layer 0) -> b (layer 0) is type 1, from port 2, to port 0, not programmatic": (
        lambda g: g["edges"][0].update(from_port=2)
    ),
    "edge clear (layer 0) -> c (layer 0) is programmatic, not full": lambda g: g["edges"][3].update(
        type=1, from_port=1
    ),
    "node b (layer 0) runs the kernel other_k": lambda g: g["nodes"][1].update(kernel="other_k"),
    "node extra: memcpy": lambda g: g["nodes"].append(node(-1, "", "memcpy")),
    "node clear (layer 0) is of type kernel, not memset or memcpy": lambda g: g["nodes"][2].update(
        type="kernel"
    ),
    "node b (layer 0) is of type child graph, not kernel": lambda g: g["nodes"][1].update(
        type="child graph"
    ),
}


@pytest.mark.parametrize("line", CHANGES)
def test_each_difference_is_named(line: str) -> None:
    graph = copy.deepcopy(recorded())
    CHANGES[line](graph)
    assert differences(predicted_graph(FORKED), graph) == (line,)


def test_a_missing_node_takes_its_edges_along() -> None:
    graph = recorded()
    graph["nodes"][3].update(launch=-1)
    assert differences(predicted_graph(FORKED), graph) == (
        "node extra: c_k",
        "node missing: c (layer 0)",
        "edge missing: b (layer 0) -> c (layer 0), programmatic",
        "edge missing: clear (layer 0) -> c (layer 0), full",
        "edge extra: b (layer 0) -> c_k (no launch), programmatic",
        "edge extra: clear (layer 0) -> c_k (no launch), full",
    )


def test_the_layers_own_kernels_may_have_any_name() -> None:
    graph = recorded()
    graph["nodes"][1].update(kernel="other_k")
    assert differences(predicted_graph(FORKED), graph, kernels=False) == ()


# -- the three steps ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_project(tmp_path_factory.mktemp("capture"))
    result = CliRunner().invoke(
        main, ["verify-capture", spec(root), "--plan", str(root / "plan.json")]
    )
    assert result.exit_code == 0, result.output
    assert "24 launch lists of 4 modes" in result.stderr
    assert "no step can take the mode `late`" in result.stderr
    return root


def spec(root: Path) -> str:
    return str(root / "pipelines" / "dsa_dcp.yaml")


@pytest.fixture
def captured(project: Path, machine: FakeMachine, tmp_path: Path) -> dict:
    out = tmp_path / "captured.json"
    words = ["--plan", str(project / "plan.json"), "--out", str(out)]
    assert trial_file.main(verify_capture._options(words), verify_capture._capture) == 0
    return json.loads(out.read_text())


def judged(project: Path, document: dict, tmp_path: Path, *words: str):  # noqa: ANN201
    path = tmp_path / "given.json"
    path.write_text(json.dumps(document))
    return CliRunner().invoke(
        main, ["verify-capture", spec(project), "--captured", str(path), *words]
    )


def test_what_a_capture_by_the_rules_gives_is_what_is_predicted(
    project: Path, captured: dict, tmp_path: Path
) -> None:
    """The fake driver has its own rule of capture, from the documents."""
    result = judged(project, captured, tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("as predicted") == 24
    assert result.stderr == "24 graphs compared, 0 differ\n"
    plan = json.loads((project / "plan.json").read_text())
    edges = {kind for one in plan["lists"] for *_, kind in one["edges"]}
    assert edges == {"full", "programmatic"}


def test_a_difference_fails_and_is_told(project: Path, captured: dict, tmp_path: Path) -> None:
    one = next(one for one in captured["lists"] if one["key"] == "fork/sparse_decode")
    one["graphs"][0]["edges"].pop(0)
    result = judged(project, captured, tmp_path)
    assert result.exit_code == 1 and "24 graphs compared, 1 differ" in result.stderr
    assert "fork/sparse_decode:\n  edge missing: packed_gemm (layer 0) -> " in result.stdout
    data = json.loads(judged(project, captured, tmp_path, "--format", "json").stdout)
    (wrong,) = [graph for graph in data["graphs"] if graph["differences"]]
    assert wrong["key"] == "fork/sparse_decode" and len(wrong["differences"]) == 1


def test_captures_of_something_else(project: Path, captured: dict, tmp_path: Path) -> None:
    captured["lists"][0]["sha256"] = "0"
    captured["lists"][1]["key"] = "seventh/mode"
    result = judged(project, captured, tmp_path)
    said = " ".join(result.stdout.split())
    assert result.exit_code == 1
    assert "captured for another schedule of that name: plan and capture again" in said
    assert "the spec has no such launch list" in said and "it was not captured" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(pipeline="dsa_tp"), "holds graphs of `dsa_tp`, not `dsa_dcp`"),
        (lambda d: d.update(schema="kpipe.capture_plan/1"), "`schema` is 'kpipe.capture_plan/1'"),
        (lambda d: d["lists"][0].pop("graphs"), "cannot be read: KeyError('graphs')"),
    ],
)
def test_files_that_cannot_be_judged(
    project: Path, captured: dict, tmp_path: Path, change, message: str
) -> None:
    change(captured)
    result = judged(project, captured, tmp_path)
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2 and "error[KP820]" in said and message in said


def test_one_of_the_two_steps_is_asked_for(project: Path) -> None:
    result = CliRunner().invoke(main, ["verify-capture", spec(project)])
    assert result.exit_code == 2
    assert "give --plan FILE to write the plan, or --captured FILE to judge" in result.stderr


class TwoOps:
    """A layer with one op on each stream; `b` launches `extra` kernels more than it should."""

    OPS = (SimpleNamespace(name="a"), SimpleNamespace(name="b"))

    def __init__(self, machine: FakeMachine, extra: int = 0) -> None:
        self.machine, self.extra = machine, extra
        self.a, self.b = self.op("a", 1), self.op("b", 1 + extra)

    def op(self, name: str, count: int):  # noqa: ANN201
        def launch() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for _ in range(count):
                made = Node(KERNEL, lambda: None, f"kernel_{name}_tensorptr")
                self.machine.library.issue(stream, made, pdl=True)

        return launch

    def run(self) -> str:
        driver, main, side = self.machine.driver, *map(self.machine.stream, (0, 1))
        events = [driver.event(), driver.event()]
        driver.record(events[0], main.cuda_stream)
        driver.wait(side.cuda_stream, events[0])
        self.a()
        with torch.cuda.stream(side):
            self.b()
        driver.record(events[1], side.cuda_stream)
        driver.wait(main.cuda_stream, events[1])
        return "_fork"


@pytest.mark.parametrize("extra", [0, 1])
def test_a_layer_is_captured_with_the_launch_behind_each_node(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    from kpipe.runtime.schedules import execute

    monkeypatch.setattr(layers, "compile_kernel", execute.compile_kernel)
    timed = [SimpleNamespace(layer=layer, run=layer.run) for layer in (TwoOps(machine, extra),) * 1]
    capture = layers.LayerCapture(machine, timed, (Form(0, "between layers", pdl=True),))
    graph = capture.graph()
    assert capture.method == "_fork"
    found = [(one["launch"], one["kernel"]) for one in graph["nodes"]]
    between = "between_layers_kernel_cutlass_stand_in"
    assert found == [(1, "kernel_a"), (2, "kernel_b"), (3, between), *[(-1, "kernel_b")] * extra]
    assert len(graph["edges"]) == 2 + extra
