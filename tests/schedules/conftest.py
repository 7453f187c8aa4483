"""Observations as a GPU writes them, without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_gpu import fake_gpu

from kpipe.codegen.proof.tables import FOLDER
from kpipe.runtime import probe
from kpipe.runtime.schedules import trial_file

MACHINE = {"gpu": "fake", "arch": "sm_90", "driver": "580.159.04", "versions": {}}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kpipe.runtime.host.machine.described", lambda: MACHINE)
    with fake_gpu(monkeypatch) as made:
        yield made


@pytest.fixture(scope="session")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of the observations of a machine on which everything happens in order."""
    out = tmp_path_factory.mktemp("probe") / "observed.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kpipe.runtime.host.machine.described", lambda: MACHINE)
        with fake_gpu(patch):
            options = probe._options(["--out", str(out), "--repetitions", "1"])
            assert trial_file.main(options, probe._probe) == 0
    return out.read_text()


@pytest.fixture
def observed(in_order: str) -> dict:
    """The same with the counts of the machine behind the shipped table."""
    table = json.loads((FOLDER / "sm_90-580.159.04.json").read_text())
    outcomes = {row["id"]: row for row in table["rows"]}
    document = json.loads(in_order)
    for item in document["experiments"]:
        mode = "eager" if item["mode"] == "mixed" else item["mode"]
        outcome = outcomes.get(item["row"], {mode: "ordered"})[mode]
        item["repetitions"] = 40
        item["early"] = 40 if outcome != "ordered" else 0
        item["stale"] = 40 if outcome == "stale" else 0
    return document


@pytest.fixture
def written(tmp_path: Path):
    def write(document: dict, name: str = "observed.json") -> str:
        path = tmp_path / name
        path.write_text(json.dumps(document))
        return str(path)

    return write
