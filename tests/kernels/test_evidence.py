"""Every committed kernel has run on a GPU exactly as it stands here, and was right."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

GENERATED = Path(__file__).resolve().parents[2] / "generated"
FILES = sorted(path for path in GENERATED.glob("*/kernels/*.py") if path.stem != "__init__")


def records(kernel: Path) -> list[dict]:
    evidence = (kernel.parents[1] / "evidence").glob("*.json")
    return [entry for file in evidence for entry in json.loads(file.read_text())["records"]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parents[1].name}-{path.stem}")
def test_evidence_is_for_these_bytes(path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    judged = [entry for entry in records(path) if entry.get("sha256") == digest]
    assert {entry["rows"] for entry in judged} >= {1, 2, 4, 8, 16, 32, 64}
    assert {entry["how"] for entry in judged} >= {"eager", "captured"}
    assert all(entry["ok"] and entry["max_relative_error"] <= entry["bound"] for entry in judged)
    stale = [
        e for e in records(path) if e["kernel"] == path.stem and e.get("sha256", digest) != digest
    ]
    assert not stale
