"""Generated code is formatted and clean as if a person had run the formatter."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from spec_project import PIPELINES, edit, make_project, plan_of, render

ROOT = Path(__file__).parents[2]
SPECS = [*PIPELINES, "small_tp", "small_dcp"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rendered output of the shipped specs, of both geometries."""
    root = make_project(tmp_path_factory.mktemp("project"))
    shutil.copy(ROOT / "pyproject.toml", root / "pyproject.toml")
    for name, base in (("small_tp", "dsa_tp"), ("small_dcp", "dsa_dcp")):
        path = root / "pipelines" / f"{name}.yaml"
        path.write_text((root / "pipelines" / f"{base}.yaml").read_text())
        edit(root, path.name, f"name: {base}\n", f"name: {name}\n")
        edit(root, path.name, "geometry: kimi_k31", "geometry: small")
    for name in SPECS:
        for path, text in render(plan_of(root, name)).items():
            target = root / "generated" / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return root


@pytest.mark.parametrize("command", [["format", "--check"], ["check"]])
def test_ruff_finds_nothing(command: list[str], folder: Path) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run(
        [str(ruff), *command, "--no-cache", "generated"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_parses(folder: Path) -> None:
    files = sorted(folder.glob("generated/*/**/*.py"))
    assert len(files) >= 8 * len(SPECS) - 8
    for path in files:
        ast.parse(path.read_text())
