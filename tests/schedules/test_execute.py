"""Running schedules: on a machine that does everything in the host's order nothing goes wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fake_gpu import FakeMachine

from kpipe.runtime import probe
from kpipe.runtime.host.driver import Driver, DriverError
from kpipe.runtime.host.graph import GraphEdge, Node, read_graph
from kpipe.runtime.schedules import trial_file
from kpipe.runtime.schedules.form import Launch, Schedule, Segment, Touch, as_json, from_json
from kpipe.runtime.schedules.memory import lay_out, long_launches
from kpipe.runtime.schedules.rows import EXPERIMENTS, Experiment


def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str, code: int = 0) -> dict:
    out = tmp_path / "observed.json"
    options = probe._options(["--out", str(out), "--repetitions", "2", *words])
    assert trial_file.main(options, probe._probe) == code
    return json.loads(out.read_text())


@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_every_experiment_is_in_order_on_a_machine_in_order(machine: FakeMachine, mode: str):
    for one in EXPERIMENTS:
        if one.words or mode not in one.modes:
            continue
        seen = machine.run(one.schedule(mode), 2, long_launches(one.schedule(mode), one.long, 1))
        assert (seen.any, seen.final, sum(seen.wrong)) == (0, 0, 0), one.chain
        assert len(seen.graphs) == (mode == "captured")


def test_a_late_write_is_seen(machine: FakeMachine):
    """The reader runs first: wrong in every repetition, in its read and nowhere else."""
    schedule = Experiment("x", "A; C(pdl wait)").schedule("eager")
    layout = lay_out(schedule, {})
    from kpipe.runtime.schedules.execute import Running

    running = Running(machine, schedule, layout)
    running.issues.reverse()
    seen = running.repeat(3)
    assert [look.early for look in seen.looks] == [True, False]
    assert seen.wrong == (3, 3) and seen.words == (192, 192)
    assert (seen.final, seen.any) == (0, 3)


def test_words_left_behind_are_compared(machine: FakeMachine):
    writers = tuple(Launch(0, name, touches=(Touch("x", True),)) for name in "ab")
    schedule = Schedule((Segment(writers),))
    from kpipe.runtime.schedules.execute import Running

    running = Running(machine, schedule, lay_out(schedule, {}))
    running.issues.reverse()
    assert running.repeat(2).final == 2


def test_captured_graph_is_read_with_launches_ports_and_types(machine: FakeMachine):
    schedule = Experiment("x", "A(trig); fork; side memset; side D; join; C(pdl)").schedule(
        "captured"
    )
    (graph,) = machine.run(schedule, 1, {}).graphs
    assert graph.nodes == (
        Node(0, "kernel", "A_kernel_cutlass_stand_in"),
        Node(1, "memset"),
        Node(2, "kernel", "D_kernel_cutlass_stand_in"),
        Node(3, "kernel", "C_kernel_cutlass_stand_in"),
    )
    assert graph.edges == (
        GraphEdge(0, 1),
        GraphEdge(1, 2),
        GraphEdge(0, 3, from_port=1, type=1),
        GraphEdge(2, 3, from_port=1, type=1),
    )


def test_a_node_that_no_launch_made_stands_last(machine: FakeMachine):
    schedule = Experiment("x", "A; C").schedule("captured")
    from kpipe.runtime.schedules.execute import Running

    running = Running(machine, schedule, lay_out(schedule, {}))
    handle = running.graphs[0][0]
    known = machine.driver.nodes(handle)
    graph = read_graph(machine.driver, handle, {known[1]: 7})
    assert [node.launch for node in graph.nodes] == [7, -1]


def test_errors_of_the_driver_name_the_call(machine: FakeMachine):
    machine.library.fail = "cuGraphGetNodes"
    with pytest.raises(DriverError, match=r"cuGraphGetNodes: a made-up error \(999\)"):
        machine.driver.nodes(1)
    with pytest.raises(DriverError, match="no capture here"):
        Driver(machine.library).capture_state(5)


def test_a_graph_without_edges_is_not_asked_for_them(machine: FakeMachine):
    """The driver refuses the question for one kernel, and for two that nothing orders."""
    for chain, count in (("A(trig)", 1), ("A; side C", 2)):
        (graph,) = machine.run(Experiment("x", chain).schedule("captured"), 1, {}).graphs
        assert (len(graph.nodes), graph.edges) == (count, ())


def test_edges_that_cannot_be_read_name_the_graph(machine: FakeMachine):
    machine.library.fail = "cuGraphGetEdges_v2"
    message = (
        "the edges of the graph of A_kernel_cutlass_stand_in, memset: "
        "cuGraphGetEdges_v2: a made-up error (999)"
    )
    with pytest.raises(DriverError, match=re.escape(message)):
        machine.run(Experiment("x", "A; memset").schedule("captured"), 1, {})


def test_an_experiment_that_is_refused_takes_no_other_along(
    machine: FakeMachine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(probe, "EXPERIMENTS", [Experiment("1", "A; C"), Experiment("2", "C; A")])
    machine.library.fail = "cuGraphGetEdges_v2"
    document = probed(tmp_path, monkeypatch, code=1)
    assert [(one["row"], one["mode"]) for one in document["experiments"]] == [
        *(("1", "eager"), ("2", "eager"))
    ]
    assert [(one["row"], one["mode"]) for one in document["refused"]] == [
        *(("1", "captured"), ("2", "captured"))
    ]
    assert "refused: 1, captured: the edges of the graph of" in capsys.readouterr().err


def test_what_nobody_expected_is_shown_once(capsys: pytest.CaptureFixture[str]):
    attempts = trial_file.Attempts()
    assert attempts.run(lambda: 7, id="fine") == 7 and attempts.code == 0
    for name in "ab":
        assert attempts.run(lambda: 1 // 0, id=name) is None
    assert attempts.code == 1
    said = "ZeroDivisionError: integer division or modulo by zero"
    assert attempts.refused == [{"id": "a", "error": said}, {"id": "b", "error": said}]
    error = capsys.readouterr().err
    assert error.count("Traceback") == 1 and f"refused: b: {said}" in error


def test_probe_writes_experiments_and_graph_trials(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(probe, "EXPERIMENTS", [one for one in EXPERIMENTS if not one.words])
    document = probed(tmp_path, monkeypatch)
    assert document["schema"] == "kpipe.observed/1" and document["gpu"] == "fake"
    assert all(item["stale"] == item["early"] == 0 for item in document["experiments"])
    trials = {trial["sentence"]: trial for trial in document["graph_trials"]}
    assert len(trials) == 8
    assert trials["child graph of A(trig); pdl C(no wait)"]["edges"] == [[0, 0]]
    refused = trials["A(trig); plain C becomes pdl C(no wait)"]
    assert refused["update"] == "refused: topology changed"
    assert trials["A(trig); pdl C(no wait) becomes pdl C(wait)"]["update"] == "applied"
    assert trials["A(trig); pdl C(wait) becomes itself"]["repetitions"] == 2


def test_a_trial_that_the_driver_refuses_does_not_end_the_probe(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(probe, "EXPERIMENTS", [])
    machine.library.fail = "cuGraphAddChildGraphNode"
    trials = probed(tmp_path, monkeypatch)["graph_trials"]
    assert trials[0]["update"].startswith("refused: cuGraphAddChildGraphNode: a made-up error")
    assert trials[4]["update"] == "refused: topology changed"


def test_without_a_gpu_or_a_file_the_program_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert trial_file.main(probe._options(["--out", "x"]), probe._probe) == 4
    assert "no CUDA device; --dry-run needs none" in capsys.readouterr().err
    assert trial_file.main(probe._options([]), probe._probe) == 2
    assert "--out FILE says where" in capsys.readouterr().err
    wrong = probe._options(["--dry-run", "--rows", "2,99"])
    assert trial_file.main(wrong, probe._probe) == 2
    assert capsys.readouterr().err == "error: --rows: no row '99'\n"
    path = tmp_path / "p.json"
    path.write_text('{"schema": "kpipe.stress/0"}')
    with pytest.raises(trial_file.UsageError, match="not of schema kpipe.stress/1"):
        trial_file.read_document(path, "kpipe.stress/1")
    with pytest.raises(trial_file.UsageError, match="cannot be read"):
        trial_file.read_document(tmp_path / "q.json", "kpipe.stress/1")


def test_form_survives_json():
    for one in EXPERIMENTS:
        for mode in one.modes:
            schedule = one.schedule(mode)
            assert from_json(json.loads(json.dumps(as_json(schedule)))) == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "kpipe.schedule/2"}, "not a schedule of this version"),
        (
            {"segments": [{"captured": False, "stream": 0, "actions": [{"do": "fly"}]}]},
            "'fly' is no action",
        ),
        (
            {"segments": [{"captured": False, "stream": 0, "actions": [{"do": "wait", "at": 1}]}]},
            "action 'wait': .*unexpected keyword argument 'at'",
        ),
    ],
)
def test_what_is_no_schedule(change: dict, message: str):
    data = as_json(EXPERIMENTS[0].schedule("eager")) | change
    with pytest.raises(ValueError, match=message):
        from_json(data)


@pytest.mark.parametrize(
    ("chain", "message"),
    [("A; B!", "row x: 'B!' is no item of a chain"), ("A(fast)", "row x: A is fast")],
)
def test_what_is_no_chain(chain: str, message: str):
    with pytest.raises(ValueError, match=message):
        Experiment("x", chain).schedule("eager")


def test_what_cannot_be_laid_out():
    copy = Launch(0, "c", "memset", touches=(Touch("x", True), Touch("y", True)))
    with pytest.raises(ValueError, match="c is a copy with 2 accesses"):
        lay_out(Schedule((Segment((copy,)),)), {})
    one = Launch(0, "c", "memset", touches=(Touch("x", True),))
    with pytest.raises(ValueError, match="c is a copy, and a copy cannot be delayed"):
        lay_out(Schedule((Segment((one,)),)), {(0, False): 5})
    far = Launch(0, "k", touches=(Touch("x", True, first=60, end=70),))
    with pytest.raises(ValueError, match="x 60:70 lies outside its 64 words"):
        lay_out(Schedule((Segment((far,)),)), {})
    with pytest.raises(ValueError, match="a sleep of 2001 us"):
        lay_out(
            Schedule((Segment((Launch(0, "k", touches=(Touch("x", True),)),)),)), {(0, False): 2001}
        )


def test_the_words_of_a_chain():
    schedule = Experiment("x", "A(some); B(pdl wait late); side D(trig); C(pdl wait)").schedule(
        "eager"
    )
    x, looked = Touch("x", write=True), Touch("x", write=False)
    assert schedule.launches == (
        Launch(0, "A", trigger="some", touches=(x,), ctas=4),
        Launch(0, "B", pdl=True, waits=True, trigger="after_wait"),
        Launch(1, "D", trigger="early"),
        Launch(0, "C", pdl=True, waits=True, touches=(Touch("x", False, early=True), looked)),
    )


def test_a_read_across_what_two_writers_left():
    """Words 0-7 are nobody's, 8-15 the second's, 16-31 the first's; all of them are looked at."""
    first = Launch(0, "a", touches=(Touch("x", True, first=8, end=32),))
    second = Launch(0, "b", touches=(Touch("x", True, first=8, end=16),))
    reader = Launch(0, "c", touches=(Touch("x", False, first=4, end=20),))
    layout = lay_out(Schedule((Segment((first, second, reader)),)), {})
    start = layout.finals[0].first
    rows = [(kind, at - start, count, value) for kind, at, count, value, *_ in layout.work[2][1]]
    assert rows == [(1, 4, 4, 0), (1, 8, 8, 2), (1, 16, 4, 1)]
    spans = [(one.first - start, one.end - start, one.value) for one in layout.finals]
    assert spans == [(0, 8, 0), (8, 16, 2), (16, 32, 1), (32, 64, 0)]
