"""The start-up measurement: both ways are run in turn, and a build is made where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kpipe.runtime import startup


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def test_both_ways_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said, replayed = [], "same"

    def run(words: list[str]) -> str:
        said.append(words)
        if words[0] == "kpipe.runtime.build":
            (Path(words[words.index("--out") + 1]) / "rms_norm-1.so").write_bytes(b"1234")
            return "26 compiled\n"
        built = words[words.index("--build") + 1] != ""
        prepare = 0.5 if built else 20.0 + len(said)
        phases = {"imports": 4.0, "inputs": 1.0, "prepare": prepare, "first_step": 0.25}
        bits = {"out": "same", "replayed": replayed if built else "same"}
        return json.dumps(phases | bits | {"total": sum(phases.values())}) + "\n"

    monkeypatch.setattr(startup, "_said", run)
    out = tmp_path / "out.json"
    words = [str(tmp_path / "dsa_tp"), "--arch", "sm_90a", "--out", str(out), "--repeat", "2"]
    assert startup.main(words) == 0
    assert [words[0].rpartition(".")[2] for words in said] == ["build", *["startup"] * 4]
    (result,) = json.loads(out.read_text())["runs"]
    assert (result["objects"], result["bytes"], result["build"]) == (1, 4, "26 compiled")
    assert [run["prepare"] for run in result["compiled"]] == [22.0, 24.0]
    assert capsys.readouterr().out.splitlines() == [
        "seconds            imports  inputs  prepare  first_step  total",
        "dsa_tp   compiled  4.00     1.00    22.00    0.25        27.25",
        "dsa_tp   built     4.00     1.00    0.50     0.25        5.75",
    ]
    replayed = "other"
    assert startup.main(words) == 1
    assert capsys.readouterr().err == (
        "error: dsa_tp: compiled and built kernels leave different bits\n"
    )


def test_a_process_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = startup._said
    monkeypatch.setattr(startup, "_said", lambda words: said(["json.nothing", *words[1:2]]))
    assert startup.main([str(tmp_path), "--arch", "sm_90a"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: json.nothing {tmp_path}: exit 1\n") and "No module named" in err


def test_without_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert startup.main([str(tmp_path), "--arch", "sm_90a"]) == 4
    assert capsys.readouterr().err == "error: this machine has no CUDA device\n"
