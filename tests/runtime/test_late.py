"""`kpipe verify --late`: a rank late at random in each layer; on the CPU, by threads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from layer_factory import LayerFactory

from kpipe.runtime import late
from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.comm.virtual_ranks import VirtualRanks
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.late import HoldUp, replace_op, run_late
from kpipe.runtime.trial import Case, Chain
from kpipe.runtime.verify import main

DCP = "extends: dsa_dcp.yaml\nname: late_dcp\ngeometry: small\nparallel: {tp: 2, dcp: 2}\n"
TP = "extends: dsa_tp.yaml\nname: late_tp\ngeometry: small\nparallel: {tp: 4}\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> LayerFactory:
    return LayerFactory(tmp_path_factory.mktemp("late"))


@pytest.fixture(scope="module")
def dcp(project) -> Path:
    return project.folder("late_dcp", DCP)


def test_late_ranks_leave_the_same_bits(dcp, capsys, monkeypatch):
    held = []
    hold_up = HoldUp.__call__
    monkeypatch.setattr(
        HoldUp, "__call__", lambda self, *who: (held.append(who), hold_up(self, *who))
    )
    options = ["--late", "0", "--lengths", "70,5,1,0,30", "--layers", "2", "--format", "json"]
    assert main([str(dcp), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    for layer in found["layers"]:
        (again,) = [check for check in layer["checks"] if check["what"] == "replays"]
        assert (again["error"], again["bound"]) == (0.0, 0.0)
    assert len(held) == 2 * late.ROUNDS
    assert {rank for rank, _ in held} == {0, 1}
    assert all(0 < cycles < late.MOST_CYCLES for _, cycles in held)


def test_a_layer_that_does_not_wait_for_the_query_shows(dcp, monkeypatch):
    """Whichever rank is late ahead of its query, the other reads words that have not come."""
    layer_class = load_layer(dcp)
    case = Case((70, 5, 1, 0, 30), 1, "sm_90a")
    group = VirtualRanks(2, timeout_s=60.0, refuse_overwrite=False)
    chain = Chain(layer_class, case)
    ready = chain.ready(chain.first(), group)
    for of_rank in ready:
        replace_op(of_rank[0].layer, "query_wait", lambda inner: lambda *o, **n: None)
    monkeypatch.setattr(late, "_ops", lambda one: ["mla_query"])
    runs = run_late(ready, group, 0)
    assert sum(of_rank[0].unstable for of_rank in runs) > 0


def test_a_device_is_late_by_a_spin_of_its_stream(monkeypatch):
    spins = []
    monkeypatch.setattr(torch.cuda, "_sleep", spins.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    hold_up = HoldUp(DeviceRanks(2, "cpu", lockstep=False))
    hold_up(1, 7000)
    assert spins == [1, 7000]


def test_two_threads_do_not_wait_for_each_other():
    group = VirtualRanks(2, timeout_s=60.0)
    hold_up = HoldUp(group)
    assert group.run(lambda comm: hold_up(comm.rank, 1)) == [None, None]


def test_every_round_draws_anew_and_the_same_for_a_seed(monkeypatch):
    monkeypatch.setattr(late, "_ops", lambda one: ["first", "second", "third"])
    ready = [[SimpleNamespace(), SimpleNamespace()] for _ in range(2)]

    def rounds(seed):
        found, held, draw = [], late._Late(None), random.Random(seed)
        for _ in range(20):
            held.drawn(draw, ready)
            found.append(held.now)
        return found

    assert rounds(3) == rounds(3) != rounds(4)
    for now in rounds(3):
        assert [number for _, number, _ in now] == [0, 1]  # one rank a layer
    every = {place for now in rounds(3) for place in now}
    assert {rank for rank, _, _ in every} == {0, 1} and len({op for _, _, op in every}) == 3


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("late_tp", "--late 1", "--late: the ranks of late_tp exchange nothing"),
        (
            "late_dcp",
            "--late 1 --processes",
            "--late runs eagerly, the ranks in one process; leave out --processes",
        ),
        (
            "late_dcp",
            "--late 1 --stop-after query",
            "--late runs whole layers; leave out --stop-after",
        ),
        ("late_dcp", "--late 0 --suite", "--suite runs its own cases; leave out --late"),
        ("late_dcp", "--late x", "argument --late: invalid int value: 'x'; see --help"),
    ],
)
def test_what_cannot_be_late(project, capsys, name, options, text):
    folder = project.folder(name, TP if name == "late_tp" else DCP)
    assert main([str(folder), *options.split()]) == 2
    assert capsys.readouterr() == ("", f"error: {text}\n")
