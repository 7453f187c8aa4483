"""What `kpipe bench` writes beside its times: which kernels ran, by the hashes of the evidence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kpipe.codegen import evidence
from kpipe.runtime import bench

GENERATED = Path(__file__).parents[2] / "generated"


def test_hashes_are_those_of_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = GENERATED / "dsa_tp"
    monkeypatch.setattr(bench.torch.cuda, "get_device_name", lambda: "GPU X")
    found = bench.document([], "sm_90a", folder)["kernels"]
    kernel = (folder / "kernels" / "packed_gemm.py").read_bytes()
    assert found["packed_gemm"]["sha256"] == evidence.kernel_digest(kernel)
    assert evidence.same_blocks(found["packed_gemm"]["device"])
    assert "__init__" not in found and len(found) == len([*folder.glob("kernels/*.py")]) - 1
