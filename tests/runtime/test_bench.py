"""What `kpipe bench` writes beside its times: which kernels ran, by the hashes of the evidence."""

from __future__ import annotations

from pathlib import Path

from kpipe.codegen import evidence
from kpipe.runtime import bench

GENERATED = Path(__file__).parents[2] / "generated"


def test_hashes_are_those_of_the_evidence() -> None:
    folder = GENERATED / "dsa_tp"
    found = bench.kernel_digests(folder)
    assert found["packed_gemm"] == evidence.file_digest(folder / "kernels" / "packed_gemm.py")
    assert "__init__" not in found and len(found) == len([*folder.glob("kernels/*.py")]) - 1
    assert bench.device_digest() == evidence.device_digest()
