"""`kpipe tune` of a rank that exchanges words, with a stand-in for compiler and device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_device_launches import Device
from tune_recorded import planned

from kpipe.codegen.tune import plan as tune_plan
from kpipe.runtime.bench import graphed
from kpipe.runtime.comm.mailbox import MailboxTimeout
from kpipe.runtime.host.compile import flags_of
from kpipe.runtime.tune_bench import DeviceBench, Machine
from kpipe.runtime.tune_compile import kernels_of
from kpipe.runtime.tune_plan import Plan, read_plan

LAYERS, CONTEXT = 3, 200
SMS = 120  # not what kernels take by themselves


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr("kpipe.runtime.comm.device_ranks.multiprocessors", lambda device: SMS)
    monkeypatch.setattr("kpipe.runtime.host.launch.arch_of", lambda device: "sm_90a")
    return Device(monkeypatch)


@pytest.fixture(scope="module")
def plan(layers, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    layers.dcp(2)  # writes the spec
    spec = next((layers.root / "pipelines").glob("dcp_2_i1.yaml"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_plan, "found_modes", lambda *given: [])
        tuning = planned(spec, rows=(3, 64), queries=(1,), modes=8, tiles=2, context=CONTEXT)
    folder = Path(tmp_path_factory.mktemp("plan"))
    for name, text in {**tuning.files, "plan.json": json.dumps(tuning.as_json())}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read_plan(folder)


class Clock:
    """Captures by running, and notes what comes ahead of what."""

    def __init__(self, device: Device) -> None:
        self.device, self.log = device, []

    def machine(self) -> Machine:
        return Machine(
            "cpu", "cuda", self.capture, self.replay_us, self.graphed, synchronize=lambda: None
        )

    def graphed(self, run):
        return lambda: (self.log.append("words"), run())

    def capture(self, runs, before):
        before()
        self.device.launched.clear()
        for run in runs:
            run()
        self.log.append(f"capture of {len(runs)}")
        return "graph"

    def replay_us(self, graph, runs, before):
        before()
        self.log.append("replay")
        return 8.0


def test_what_is_compiled_ahead_is_what_a_rank_alone_launches(plan, device, monkeypatch):
    """Every candidate: its kernels whole, with the GPU to themselves, and no other rank's."""
    bench = DeviceBench(plan, Clock(device).machine(), layers=LAYERS)
    monkeypatch.setattr(bench, "_outputs", lambda layers: (bench._run(layers), [torch.ones(2)])[1])
    for step in plan.steps:
        for one in step.candidates:
            found = bench.open(step, [one.name])
            assert not isinstance(found[one.name], str), found
            launched = {(one.kernel, *sorted(one.flags.items())) for one in device.launched}
            layer_class = bench.layer_class(step, one)
            ahead = kernels_of(layer_class, plan.arch, bench._comm(0))
            assert launched == {
                (type(kernel).__name__, *sorted(flags_of(kernel))) for kernel in ahead
            }
            assert {one.half for one in device.launched} == {"whole"}
            assert {one.flags.get("rank", 0) for one in device.launched} == {0}
            assert {one.flags.get("resident", SMS) for one in device.launched} == {SMS}
    assert {step.rows for step in plan.steps} == {3, 64}


def test_words_come_ahead_of_every_replay_and_layers_share_no_mailbox(plan, device, monkeypatch):
    clock = Clock(device)
    bench, step = DeviceBench(plan, clock.machine(), layers=LAYERS), plan.steps[0]
    monkeypatch.setattr(bench, "_outputs", lambda layers: (bench._run(layers), [torch.ones(2)])[1])
    ready = bench.open(step, [step.present])[step.present]
    assert ready.us() == 8.0
    assert clock.log == ["words", f"capture of {LAYERS}", "words", "replay"]
    layers = bench._bound(bench.layer_class(step, step.candidates[0]))
    places = [box.local.data_ptr() for one in layers for box in one.layer._mailboxes.values()]
    assert len(set(places)) == len(places) == 6 * LAYERS
    for one in layers:
        for name in ("candidates", "lse_mail"):
            words = one.layer._mailboxes[name].local.view(torch.int32)[:, : step.rows]
            assert (words[0] == -1).all() and not (words[1] == -1).any()


def test_a_poll_that_gives_up_is_what_a_candidate_failed_of(plan, device, monkeypatch):
    bench, step = DeviceBench(plan, Clock(device).machine(), layers=LAYERS), plan.steps[0]
    told = dict(mailbox="o_mail", stage="o_reduce", rank=0, peers=(1,), word=(1, 0, 0))
    timeout = MailboxTimeout("o_mail: rank 1 has not written", **told)
    monkeypatch.setattr(bench._peers, "timeouts", lambda: [timeout])

    def lost(layers):
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(bench, "_outputs", lost)
    found = bench.open(step, [step.present])
    assert found == {step.present: "MailboxTimeout: o_mail: rank 1 has not written"}


def test_a_machine_brings_words_by_a_graph() -> None:
    """As `kpipe bench` does."""
    assert Machine().graphed is graphed
