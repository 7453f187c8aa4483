"""Which launches of a generated folder count as run: by bytes, flags, rows and architecture."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from spec_project import make_project, plan_of

from kpipe.codegen.evidence import evidence_of, kernel_digest, summary
from kpipe.codegen.proof.prove import prove

KERNEL = "rms_norm"
DEVICE = Path(__file__).resolve().parents[2] / "runtime" / "device"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def pipeline(tmp_path: Path):
    plan = prove(plan_of(make_project(tmp_path), "dsa_tp")).pipeline
    only = tuple(c if c.kernel == KERNEL else replace(c, kernel="") for c in plan.ops)
    return replace(plan, ops=only)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "generated" / "dsa_tp"
    (made / "kernels").mkdir(parents=True)
    (made / "evidence").mkdir()
    (made / "kernels" / f"{KERNEL}.py").write_text("from pipelines/dsa_tp.yaml\nKERNEL = 1\n")
    return made


def record(folder: Path, made_of: dict[str, object] | None = None, **changes: object) -> None:
    entry = {
        "kernel": KERNEL,
        "arch": "sm_90a",
        "rows": 8,
        "flags": {"pdl": True, "release": True},
        "ok": True,
    } | changes
    kernel = {
        "sha256": kernel_digest((folder / "kernels" / f"{KERNEL}.py").read_bytes()),
        "device": {"memory.py": sha256(DEVICE / "memory.py")},
    } | (made_of or {})
    document = {"gpu": "GPU X", "kernels": {KERNEL: kernel}, "records": [entry]}
    (folder / "evidence" / "x.json").write_text(json.dumps(document))


def states(pipeline, folder: Path) -> dict[tuple[str, int], str]:
    return {
        (one.arch, one.rows): one.state
        for one in evidence_of(pipeline, folder)
        if one.kernel == KERNEL
    }


def test_a_record_of_these_bytes_counts_for_its_rows_only(pipeline, folder: Path) -> None:
    record(folder)
    found = states(pipeline, folder)
    assert found["sm_90a", 8] == "valid"
    assert {state for key, state in found.items() if key != ("sm_90a", 8)} == {"missing"}


@pytest.mark.parametrize(
    "made_of",
    [
        {"sha256": "0" * 64},
        {"device": {"memory.py": "0" * 64}},
        {"device": {"no_longer_there.py": "0" * 64}},
    ],
)
def test_other_bytes_are_stale(pipeline, folder: Path, made_of: dict[str, object]) -> None:
    record(folder, made_of)
    assert states(pipeline, folder)["sm_90a", 8] == "stale"


def test_a_building_block_that_the_kernel_does_not_use_changes_nothing(
    pipeline, folder: Path
) -> None:
    """The record names what the kernel was made of; what else lies in the folder is not asked."""
    record(folder, {"device": {}})
    assert states(pipeline, folder)["sm_90a", 8] == "valid"


def test_the_same_kernel_in_a_folder_beside_has_run(pipeline, folder: Path) -> None:
    """But for the line that names its spec; of other kernels nothing is taken over."""
    beside = folder.parent / "other"
    shutil.copytree(folder, beside)
    record(beside)
    kernel = folder / "kernels" / f"{KERNEL}.py"
    kernel.write_text("from pipelines/other.yaml\nKERNEL = 1\n")
    assert states(pipeline, folder)["sm_90a", 8] == "valid"
    kernel.write_text("from pipelines/other.yaml\nKERNEL = 2\n")
    assert states(pipeline, folder)["sm_90a", 8] == "missing"


@pytest.mark.parametrize(
    "changes",
    [{"ok": False}, {"arch": "sm_100a"}, {"rows": 7}, {"flags": {"pdl": False, "release": False}}],
)
def test_a_record_of_something_else_does_not_count(pipeline, folder: Path, changes) -> None:
    record(folder, **changes)
    assert states(pipeline, folder)["sm_90a", 8] == "missing"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"records": 3}', '{"records": []}', '{"records": [], "kernels": {"a": 1}}'],
)
def test_a_file_that_says_nothing_is_no_evidence(pipeline, folder: Path, text: str) -> None:
    (folder / "evidence" / "x.json").write_text(text)
    assert set(states(pipeline, folder).values()) == {"missing"}


def test_the_summary_names_gpu_and_kernels(pipeline, folder: Path) -> None:
    record(folder)
    hopper, blackwell = (
        line for line in summary(e for e in evidence_of(pipeline, folder) if e.kernel == KERNEL)
    )
    assert hopper.startswith("evidence sm_90a: 1 of ")
    assert hopper.endswith(f"launches valid (GPU X); missing: {KERNEL}")
    assert blackwell.endswith("; compiled, not run")
