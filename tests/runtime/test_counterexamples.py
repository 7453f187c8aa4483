"""The explorer's counterexamples, run on the CPU: every fault goes wrong, every repair does not."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from layer_factory import LayerFactory

from kpipe.runtime import counterexamples, faults
from kpipe.runtime.aot.manifest import BuildError
from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.comm.mailbox import MailboxSpec
from kpipe.runtime.counterexamples import TRIALS, Runner, items_of, main, results_in
from kpipe.runtime.fault_trial import as_it_must_be, case_of, lengths_of, run_side
from kpipe.runtime.generated_folder import layer_of_step, load_layer
from kpipe.runtime.host.compile import flags_of
from kpipe.runtime.host.launch import unbound_op

ROOT = Path(__file__).parents[2]
SPEC = "extends: dsa_dcp.yaml\nname: tiny\ngeometry: small\nparallel: {tp: 2, dcp: 2}\n"
BOX = MailboxSpec("rows", (2, 2, 8), torch.float32, 0xFFFFFFFF, source_axis=0)

LATE = {  # what each must name, found by hand from the protocol
    "query not re-armed": (2, "mla_query", ""),
    "candidates not re-armed": (2, "topk_local", ""),
    "partials not re-armed": (2, "dcp_value", ""),
    "outputs not re-armed": (2, "o_proj", ""),
    "sums not re-armed": (2, "o_reduce", ""),
    "one parity in line": (0, "dcp_value", "q_mail"),
    "one parity forked": (0, "dcp_value", "q_mail"),
    "query not awaited": (0, "mla_query", ""),
}


@pytest.fixture(scope="module")
def bench():
    """The script that plans the trials."""
    sys.path.insert(0, str(ROOT / "bench"))
    before = list(sys.path)
    try:
        yield importlib.import_module("counterexamples")
    finally:
        sys.path[:] = [path for path in before if path != str(ROOT / "bench")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return LayerFactory(tmp_path_factory.mktemp("counter")).folder("tiny", SPEC)


@pytest.fixture(scope="module")
def trials(bench, folder) -> dict[str, dict]:
    spec = folder.parents[1] / "pipelines" / "tiny.yaml"
    return {one["id"]: one for one in bench.trials_of(str(spec))}


def test_who_is_late_and_where(trials):
    found = {
        name: (one["late"]["layer"], one["late"]["op"], one["late"]["box"])
        for name, one in trials.items()
    }
    assert found == LATE
    assert trials["one parity in line"]["late"]["rank"] == 1  # rank 0 overwrites its word
    assert trials["query not awaited"]["late"]["rank"] == 1  # rank 0 reads what it has not sent


def test_words_are_saved_where_the_op_that_rearms_does_not_poll_them(trials):
    saved = {
        one["box"]: one["saved"] for trial in trials.values() for one in trial["fault"]["unarmed"]
    }
    assert saved == {
        "q_mail": True,
        "candidates": False,
        "partial_mail": False,
        "lse_mail": False,
        "o_mail": False,
        "o_gather": False,
    }


def test_a_change_that_the_explorer_proves_is_refused(bench, folder, monkeypatch):
    safe = bench.Change("nothing", 4, "reused")
    monkeypatch.setattr(bench, "CHANGES", (safe,))
    with pytest.raises(ValueError, match="nothing: proved, not reused"):
        bench.trials_of(str(folder.parents[1] / "pipelines" / "tiny.yaml"))


@pytest.mark.parametrize("name", [name for name in LATE if name != "one parity forked"])
def test_the_fault_goes_wrong_and_its_repair_does_not(trials, folder, name):
    layer_class, trial = load_layer(folder), trials[name]
    case = case_of(layer_class, trial, "reference")
    control = run_side(layer_class, trial, "control", case)
    assert (control["outcome"], control["said"]) == ("right", "")
    fault = run_side(layer_class, trial, "fault", case)
    assert fault["outcome"] == trial["expects"], fault
    late = trial["late"]
    if trial["expects"] == "wrong":  # where it was named, and for the rank that did not wait
        assert fault["layer"] == late["layer"] and 1 - late["rank"] in fault["ranks"]
    else:
        assert fault["said"].startswith("mailbox ")  # of the rank that came to its poll last


def test_host_order_hides_what_takes_streams_apart(trials, folder):
    """Rank 0 polls candidates of the next layer ahead of its query, which would be erased."""
    trial = trials["one parity forked"]
    assert [name for name, one in trials.items() if one["apart"]] == ["one parity forked"]
    layer_class = load_layer(folder)
    case = case_of(layer_class, trial, "reference")
    assert run_side(layer_class, trial, "fault", case)["outcome"] == "right"


def test_without_its_fault_a_trial_fails(trials, folder):
    trial = trials["query not re-armed"]
    layer_class = load_layer(folder)
    case = case_of(layer_class, trial, "reference")
    result = run_side(layer_class, {**trial, "fault": trial["control"]}, "fault", case)
    assert result["outcome"] == "right" and not as_it_must_be(result)


def test_the_program(trials, folder, tmp_path, capsys):
    chosen = [trials["query not awaited"], trials["one parity forked"]]
    file, out = tmp_path / TRIALS, tmp_path / "out.json"
    plan = {"schema": counterexamples.PLAN, "pipeline": "tiny", "trials": chosen}
    file.write_text(json.dumps(plan))
    where = ["--folder", str(folder), "--backend", "reference"]
    assert main([str(tmp_path), *where, "--out", str(out)]) == 0
    text, talk = capsys.readouterr()
    lines = text.splitlines()
    assert "left out: one parity forked: it takes streams that run apart\n" in talk
    assert lines[0] == "ok      query not awaited, control: right"
    assert lines[1].startswith("ok      query not awaited, fault: wrong: gated of layer ")
    assert lines[2] == "1 trials, 2 runs, 0 not as they must be"
    assert [one["outcome"] for one in json.loads(out.read_text())["results"]] == ["right", "wrong"]
    lines = tmp_path / "lines"
    lines.write_text(json.dumps({"id": "query not awaited", "side": "fault", "outcome": "lost",
                                 "said": "before"}) + "\n")  # fmt: skip
    assert main([str(tmp_path), *where, "--only", "awaited", "--lines", str(lines)]) == 1
    assert [one["outcome"] for one in results_in(lines)] == ["lost", "right"]
    capsys.readouterr()
    chosen[0] = {**chosen[0], "fault": chosen[0]["control"]}
    file.write_text(json.dumps(plan))
    assert main([str(tmp_path), *where]) == 1
    assert "FAILED  query not awaited, fault: right" in capsys.readouterr().out


def test_files_that_cannot_be_used(trials, folder, tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "trials.json` cannot be read: " in capsys.readouterr().err
    file = tmp_path / TRIALS
    file.write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert "is not of schema kpipe.counterexamples/1: None" in capsys.readouterr().err
    plan = {"schema": counterexamples.PLAN, "pipeline": "no", "trials": list(trials.values())[:2]}
    file.write_text(json.dumps(plan))
    assert main([str(tmp_path)]) == 2
    assert "`generated/no` is not a generated folder" in capsys.readouterr().err
    assert main([str(tmp_path), "--folder", str(folder), "--only", "other"]) == 2
    assert capsys.readouterr().err == (
        "error: --only other: no such trial; there are query not re-armed, "
        "candidates not re-armed\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device(trials, folder, tmp_path, capsys):
    plan = {"schema": counterexamples.PLAN, "pipeline": "no", "trials": list(trials.values())}
    (tmp_path / TRIALS).write_text(json.dumps(plan))
    assert main([str(tmp_path), "--folder", str(folder), "--backend", "cuda"]) == 4
    text = "error: this machine has no CUDA device; --backend reference\n"
    assert capsys.readouterr().err == text


def test_controls_come_first_and_what_loses_the_device_last():
    trials = [{"id": "a", "expects": "timeout"}, {"id": "b", "expects": "wrong"}]
    assert items_of(trials) == [
        ("b", "control"),
        ("a", "control"),
        ("b", "fault"),
        ("a", "fault"),
    ]


def result_of(name: str, outcome: str) -> dict:
    return {"id": name, "side": "fault", "outcome": outcome, "said": ""}


def test_processes_follow_each_other_until_everything_has_run(monkeypatch, tmp_path):
    """The first ends behind a time-out, the second falls behind a result, the third says nothing,
    the fourth never ends."""
    lines, asked = tmp_path / "lines", []

    def run(command, timeout):
        asked.append(command[command.index("--items") + 1].replace("/fault", ""))
        if len(asked) <= 2:
            outcome = ("timeout", "wrong")[len(asked) - 1]
            counterexamples.add(result_of("ab"[len(asked) - 1], outcome), lines)
        if len(asked) == 4:
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=int(len(asked) == 2))

    monkeypatch.setattr(counterexamples.subprocess, "run", run)
    items = [(name, "fault") for name in "abcde"]
    counterexamples.run_apart(tmp_path, tmp_path, items, lines)
    assert asked == ["a,b,c,d,e", "b,c,d,e", "d,e", "e"]
    found = results_in(lines)
    assert [(one["id"], one["outcome"], one["said"]) for one in found] == [
        ("a", "timeout", ""),
        ("b", "wrong", ""),
        ("c", "lost", "the process ended with 1"),
        ("d", "lost", "the process ended with 0"),
        ("e", "lost", "no end within 560 s"),
    ]
    assert [as_it_must_be(one) for one in found] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("raised", "outcome", "said", "run"),
    [
        (ValueError("no room"), "lost", "no room", ["a", "b"]),
        (RuntimeError("CUDA error: gone\nmore"), "lost", "CUDA error: gone", ["a"]),
        (None, "timeout", "", ["a"]),
    ],
)
def test_a_process_goes_on_while_it_has_the_device(
    monkeypatch, tmp_path, raised, outcome, said, run
):
    asked = []

    def side(layer_class, entry, which, case):
        asked.append(entry["id"])
        if raised:
            raise raised
        return result_of(entry["id"], "timeout")

    monkeypatch.setattr(counterexamples, "case_of", lambda *more: None)
    monkeypatch.setattr(counterexamples, "run_side", side)
    lines = tmp_path / "lines"
    runner = Runner(None, "cuda", None, lines)
    runner.run([{"id": "a"}, {"id": "b"}], [("a", "fault"), ("b", "fault")])
    assert asked == run
    first = results_in(lines)[0]
    assert (first["id"], first["outcome"], first["said"]) == ("a", outcome, said)


def test_a_build_that_cannot_be_used_is_left_aside(monkeypatch, tmp_path):
    builds = []

    def side(layer_class, entry, which, build):
        builds.append(build)
        if build:
            raise BuildError("stale")
        return result_of(entry["id"], "wrong")

    monkeypatch.setattr(counterexamples, "case_of", lambda *more: more[-1])
    monkeypatch.setattr(counterexamples, "run_side", side)
    runner = Runner(None, "cuda", tmp_path, tmp_path / "lines")
    runner.run([{"id": "a"}, {"id": "b"}], [("a", "fault"), ("b", "fault")])
    assert builds == [tmp_path, None, None]
    assert [one["outcome"] for one in results_in(tmp_path / "lines")] == ["wrong", "wrong"]


def test_kernels_are_those_of_ranks_that_share_a_device(bench, folder, monkeypatch):
    """What is built is what such a rank asks for, no half of a launch, and no other rows."""
    made = []

    def build(kernels, wanted, out, jobs, said):
        made.extend(wanted)
        return SimpleNamespace(failed=[], made=wanted, bytes=0)

    monkeypatch.setattr("kpipe.runtime.aot.builder.build", build)
    bench.build_kernels(folder, [{"rows": 4}], folder / "build")
    layer_class, asked = load_layer(folder), set()
    for rank in range(2):
        comm = SimpleNamespace(rank=rank, ranks=2, resident=48, widest_cluster=10, in_halves=False)
        for call in layer_of_step(layer_class, "sm_90a", 4, 1).calls():
            (op,) = (op for op in layer_class.OPS if op.name == call.op)
            kernel = unbound_op(layer_class, op, "sm_90a", comm).kernel(call.rows, call.flags)
            asked.add((op.kernel, flags_of(kernel)))
    names = {f"{one.kernel}:{one.class_name}" for one in made}
    assert names == {name for name, _ in asked}
    assert {(f"{w.kernel}:{w.class_name}", tuple(w.flags.items())) for w in made} == asked
    made.clear()
    monkeypatch.setattr(
        "kpipe.runtime.aot.builder.build",
        lambda *more: SimpleNamespace(failed=[("x", "why")], made=[], bytes=0),
    )
    with pytest.raises(RuntimeError, match="x: why"):
        bench.build_kernels(folder, [{"rows": 4}], folder / "build")


def test_four_requests_have_more_keys_than_are_selected():
    assert lengths_of(16, 4, 1) == (92, 25, 33, 216)
    assert lengths_of(16, 8, 1)[4:] == (1, 7, 14, 21)
    lengths = lengths_of(2048, 64, 1)
    assert len(lengths) == 64 and sum(length > 2048 for length in lengths) == 4


def test_every_layer_gets_the_same_copy():
    group = DeviceRanks(2, "cpu", lockstep=False)
    comm = group.rank(0)
    faults.fewer_parities(comm, {"rows": 1})
    assert comm.mailbox(BOX, 1).parity == 0
    other = MailboxSpec("other", (2, 2, 8), torch.float32, 0xFFFFFFFF, source_axis=0)
    assert comm.mailbox(other, 1).parity == 1


class Rearms:
    """A prepared layer of device memory whose only op re-arms its mailbox."""

    def __init__(self, log: list[str]) -> None:
        self.box = DeviceRanks(2, "cpu", lockstep=False).rank(0).mailbox(BOX, 0)
        self.words = self.box.local.view(torch.int32)
        self.words.fill_(5)
        self._mailboxes = {"rows": self.box}
        self.log = log

    def op(self, *operands, **named) -> None:
        self.note()
        self.words.fill_(-1)

    def note(self) -> None:
        self.log.append(str(sorted(set(self.words.flatten().tolist()))))


@pytest.mark.parametrize(("saved", "words"), [(True, 5), (False, -(2**31))])
def test_a_rearm_is_undone(saved, words):
    layer = Rearms([])
    fault = faults.Fault(unarmed=(faults.Unarmed("rows", "op", saved),))
    ready = [[SimpleNamespace(layer=layer)]]
    late = faults.Late(0, 0, "op")
    faults.install(ready, [[None]], fault, late, lambda rank, cycles: layer.note())
    layer.op()
    assert (layer.words == words).all()
    assert layer.log == ["[5]", "[5]"]  # held up ahead of the op


def test_a_rearm_lands_late():
    layer = Rearms([])
    ready = [[SimpleNamespace(layer=layer)]]
    late = faults.Late(0, 0, "op", "rows")
    faults.install(ready, [[None]], faults.Fault(), late, lambda rank, cycles: layer.note())
    layer.op()
    assert layer.log == ["[5]", "[5]"]  # in the op, and as the others see it while it is late
    assert (layer.words == -1).all()
