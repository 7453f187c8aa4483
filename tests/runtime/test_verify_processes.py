"""`kpipe verify --processes`: the same verdict as with threads, by processes; and its refusals."""

from __future__ import annotations

import json

import pytest
import torch
from layer_factory import LayerFactory

from kpipe.runtime.verify import main

DCP = "extends: dsa_dcp.yaml\nname: tiny_dcp\ngeometry: small\nparallel: {tp: 2, dcp: 2}\n"
TP = "extends: dsa_tp.yaml\nname: tiny_tp\ngeometry: small\nparallel: {tp: 4}\n"


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> LayerFactory:
    return LayerFactory(tmp_path_factory.mktemp("verify_processes"))


@pytest.fixture(scope="module")
def dcp(factory: LayerFactory) -> str:
    return str(factory.folder("tiny_dcp", DCP))


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread a rank, as virtual ranks have, and no launcher around this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_processes_leave_the_bits_of_threads(capfd: pytest.CaptureFixture[str], dcp: str) -> None:
    arguments = [dcp, "--lengths", "70,1,0", "--layers", "2", "--seed", "3", "--format", "json"]
    assert main(arguments) == 0
    threads = json.loads(capfd.readouterr().out)
    assert main([*arguments, "--processes"]) == 0
    processes = json.loads(capfd.readouterr().out)
    assert (threads.pop("processes"), processes.pop("processes")) == (False, True)
    assert processes == threads and processes["ranks"] == [0, 1]


def test_a_layer_that_is_wrong_on_one_rank_fails_on_all(
    capfd: pytest.CaptureFixture[str], factory: LayerFactory
) -> None:
    folder = factory.folder("silent", DCP.replace("tiny_dcp", "silent"))
    text = (folder / "layer.py").read_text()
    nothing = "(lambda *operands, **named: None)("
    (folder / "layer.py").write_text(text.replace("self.topk_local(", nothing))
    assert main([str(folder), "--processes", "--lengths", "70"]) == 1
    out, err = capfd.readouterr()
    waited = "mailbox candidates, parity 0, stage topk_merge, rank "
    assert out.startswith("FAILED: the layer raised ") and waited in out
    assert "FAILED: the layer raised " in err and "rank 1: " in err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("--processes --concurrent", 2, "--concurrent needs --backend cuda and a context-parallel"),
        (
            "--processes --virtual-ranks 2",
            2,
            "--processes runs every rank in a process; leave out --virtual-ranks",
        ),
        ("--replays 2", 2, "--replays 2: at least one, of --captured"),
    ],
)
def test_what_does_not_go_together(
    capsys: pytest.CaptureFixture[str], dcp: str, arguments: str, code: int, text: str
) -> None:
    assert main([dcp, *arguments.split()]) == code
    assert text in capsys.readouterr().err


def test_ranks_that_exchange_nothing_are_no_group(
    capsys: pytest.CaptureFixture[str], factory: LayerFactory
) -> None:
    assert main([str(factory.folder("tiny_tp", TP)), "--processes"]) == 2
    text = "error: --processes: the ranks of tiny_tp exchange nothing\n"
    assert capsys.readouterr().err == text


def test_multicast_is_refused(
    capsys: pytest.CaptureFixture[str], dcp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert main([dcp, "--processes", "--lengths", "5"]) == 2
    assert capsys.readouterr().err.startswith("error: NCCL_NVLS_ENABLE is '1': ")


def test_a_group_of_another_size_is_refused_once(
    capsys: pytest.CaptureFixture[str], dcp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORLD_SIZE", "3"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    texts = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main([dcp, "--processes", "--lengths", "5"]) == 2
        texts.append(capsys.readouterr().err)
    assert texts == ["error: tiny_dcp is generated for 2 ranks, this group has 3\n", ""]


def test_too_few_gpus(
    capsys: pytest.CaptureFixture[str], dcp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kpipe.runtime import verify

    monkeypatch.setattr(verify, "_cannot_run", lambda layer_class, case: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    arguments = [dcp, "--processes", "--backend", "cuda", "--arch", "sm_90a"]
    assert main(arguments) == 4
    assert capsys.readouterr().err == (
        "error: 2 ranks that are processes need a GPU each, this machine has one GPU; "
        "--virtual-ranks runs them on one\n"
    )
