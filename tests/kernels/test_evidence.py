"""Every launch that a shipped layer can make on a Hopper GPU has run there as it stands here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kpipe.codegen.evidence import evidence_of, kernel_digest
from kpipe.codegen.proof.api import prove_pipeline
from kpipe.runtime.evidence import device_files

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.parent.name for path in (ROOT / "generated").glob("*/layer.py"))


def documents(name: str) -> list[dict]:
    files = (ROOT / "generated" / name / "evidence").glob("*.json")
    found = [json.loads(file.read_text()) for file in files]
    return [document for document in found if "timings" not in document]  # times are no verdicts


@pytest.mark.parametrize("name", NAMES)
def test_every_launch_has_run(name: str) -> None:
    pipeline = prove_pipeline(str(ROOT / "pipelines" / f"{name}.yaml")).pipeline
    launches = evidence_of(pipeline, ROOT / "generated" / name)
    hopper = {(e.kernel, e.rows): e.state for e in launches if e.arch == "sm_90a"}
    assert hopper and set(hopper.values()) == {"valid"}, hopper


@pytest.mark.parametrize("name", NAMES)
def test_records_are_for_these_bytes_and_were_right(name: str) -> None:
    for document in documents(name):
        for kernel, made_of in document["kernels"].items():
            path = ROOT / "generated" / name / "kernels" / f"{kernel}.py"
            assert made_of["sha256"] == kernel_digest(path.read_bytes()), kernel
            assert made_of["device"] == device_files(path), "a device building block has changed"
        for entry in document["records"]:
            assert entry["ok"] and entry["max_relative_error"] <= entry["bound"], entry
            assert entry["kernel"] in document["kernels"]
        assert {entry["how"] for entry in document["records"]} <= {"eager", "captured"}
        assert all(layer["ok"] for layer in document["layers"])
