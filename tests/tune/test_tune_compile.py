"""What compiles the kernels of candidates in processes of its own, run in this one."""

from __future__ import annotations

from pathlib import Path

from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.tune_compile import jobs_of, kernels_of

FOLDER = Path(__file__).parents[2] / "generated" / "dsa_tp"


def test_a_kernel_of_the_list_becomes_an_object_with_its_function(tmp_path: Path) -> None:
    found = kernels_of(load_layer(FOLDER), "sm_90a")
    kernel = next(one for one in found if type(one).__name__ == "RmsNorm")
    path = tmp_path / "kpipe_0.o"
    jobs_of(FOLDER, [kernel], "sm_90a")[kernel](str(path))
    data = path.read_bytes()
    assert data[:4] == b"\x7fELF" and b"kpipe_0" in data
