"""Every launch that a shipped layer can make on a Hopper GPU has run there as it stands here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kpipe.codegen.evidence import device_digest, evidence_of, file_digest
from kpipe.codegen.proof.api import prove_pipeline

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.parent.name for path in (ROOT / "generated").glob("*/layer.py"))


def records(name: str) -> list[dict]:
    files = (ROOT / "generated" / name / "evidence").glob("*.json")
    return [entry for file in files for entry in json.loads(file.read_text())["records"]]


@pytest.mark.parametrize("name", NAMES)
def test_every_launch_has_run(name: str) -> None:
    pipeline = prove_pipeline(str(ROOT / "pipelines" / f"{name}.yaml")).pipeline
    launches = evidence_of(pipeline, ROOT / "generated" / name)
    hopper = {(e.kernel, e.rows): e.state for e in launches if e.arch == "sm_90a"}
    assert hopper and set(hopper.values()) == {"valid"}, hopper


@pytest.mark.parametrize("name", NAMES)
def test_records_are_for_these_bytes_and_were_right(name: str) -> None:
    found = records(name)
    for entry in found:
        kernel = ROOT / "generated" / name / "kernels" / f"{entry['kernel']}.py"
        assert entry["sha256"] == file_digest(kernel), kernel
        assert entry["device_sha256"] == device_digest(), "a device building block has changed"
        assert entry["ok"] and entry["max_relative_error"] <= entry["bound"], entry
    assert {entry["how"] for entry in found} == {"eager", "captured"}
