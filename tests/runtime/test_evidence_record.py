"""What a record of evidence says it was made of, and how it is written."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kpipe.runtime.evidence import (
    DEVICE,
    device_files,
    document,
    file_digest,
    file_name,
    kept_records,
    known_launches,
    launch_key,
    launch_record,
    text_of,
)

KERNELS = Path(__file__).resolve().parents[2] / "generated" / "dsa_tp" / "kernels"


def names_in(path: Path) -> set[str]:
    """Every identifier that follows an import word in a file, by text and not by syntax."""
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = "\n".join(ast.unparse(node) for node in imports)
    return {
        word for word in lines.replace(",", " ").replace(".", " ").split() if word.isidentifier()
    }


@pytest.mark.parametrize("name", ["sparse_decode", "rms_norm", "index_scores"])
def test_everything_that_a_kernel_imports_is_recorded(name: str) -> None:
    """Nothing outside the record is named by an import of the kernel or of what is recorded."""
    found = device_files(KERNELS / f"{name}.py")
    blocks = {path.stem for path in DEVICE.glob("*.py")} - {"__init__"}
    files = [KERNELS / f"{name}.py", *(DEVICE / file for file in found)]
    named = set().union(*(names_in(file) for file in files)) & blocks
    assert named <= {Path(file).stem for file in found}
    assert found == {file: file_digest(DEVICE / file) for file in sorted(found)}


def test_every_form_of_import_counts(tmp_path: Path) -> None:
    kernel = tmp_path / "k.py"
    kernel.write_text(
        "import kpipe.runtime.device.fp8\n"
        "from kpipe.runtime.device import barrier\n"
        "from kpipe.runtime.device.pdl import wait\n"
        "from kpipe.runtime.host.compile import Symbol\n"
        "import torch, memory\n"
    )
    assert {"fp8.py", "barrier.py", "pdl.py"} <= set(device_files(kernel))
    assert "compile.py" not in device_files(kernel)


def test_a_document_is_written_one_record_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "layer"
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "k.py").write_text("from kpipe.runtime.device import pdl\n")
    verdict = SimpleNamespace(error=0.25, bound=0.5, wrong=[])
    wrong = SimpleNamespace(error=0.75, bound=0.5, wrong=["out: error"])
    records = [
        launch_record("k", {"pdl": True}, "sm_90a", 4, 1, how, found)
        for how, found in (("eager", verdict), ("captured", wrong))
    ]
    made = document(folder, "GPU X", records, [{"case": "edges", "ok": True}])
    text = text_of(made)
    assert json.loads(text) == made
    assert [entry["ok"] for entry in made["records"]] == [True, False]
    assert made["kernels"]["k"]["device"] == {"pdl.py": file_digest(DEVICE / "pdl.py")}
    assert sum(line.startswith('  {"kernel": "k"') for line in text.splitlines()) == 2


def test_the_file_is_named_after_the_gpu() -> None:
    assert file_name("NVIDIA H200") == "nvidia_h200.json"
    assert file_name("NVIDIA GB200-NVL") == "nvidia_gb200_nvl.json"


def test_launches_of_the_same_kernel_beside_are_known(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        (folder / "kernels").mkdir(parents=True)
        text = f"# {folder.name}.yaml\nfrom kpipe.runtime.device import pdl\n"
        (folder / "kernels" / "k.py").write_text(text)
    verdict = SimpleNamespace(error=0.25, bound=0.5, wrong=[])
    wrong = SimpleNamespace(error=0.75, bound=0.5, wrong=["out"])
    flags = {"pdl": True, "splits": 4}
    records = [
        launch_record("k", flags, "sm_90a", 4, 1, "eager", verdict),
        launch_record("k", flags, "sm_90a", 8, 1, "eager", wrong),
    ]
    (folders[0] / "evidence").mkdir()
    (folders[0] / "evidence" / "gpu_x.json").write_text(
        text_of(document(folders[0], "GPU X", records))
    )
    known = known_launches(folders[1], "GPU X")
    assert known == {launch_key("k", {"splits": 4, "pdl": True}, "sm_90a", 4, 1, "eager")}
    assert known_launches(folders[0], "GPU X") == frozenset(), "its own are run again"
    assert known_launches(folders[1], "GPU Y") == frozenset()
    assert kept_records(folders[0], "GPU X", known) == records[:1], "left out, and not lost"
    assert kept_records(folders[0], "GPU X", frozenset()) == []
    assert kept_records(folders[1], "GPU X", known) == []
    (folders[1] / "kernels" / "k.py").write_text("# two.yaml\nfrom kpipe import other\n")
    assert known_launches(folders[1], "GPU X") == frozenset()
