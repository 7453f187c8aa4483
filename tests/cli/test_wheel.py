"""The wheel holds everything that kpipe needs, and works where it alone is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from kpipe.codegen.config import SHIPPED

PARTS = ("codegen", "runtime", "templates", "pipelines", "schemas")
DATA = (".jinja", ".yaml", ".json")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as a build leaves folders behind; nothing is fetched."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for part in PARTS:
        shutil.copytree(SHIPPED / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(SHIPPED / name, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    return next(out.glob("kpipe_dsl-*.whl"))


def test_the_wheel_holds_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    files = {path for part in PARTS for path in (SHIPPED / part).rglob("*") if path.is_file()}
    scaffold = SHIPPED / "codegen" / "scaffold" / "files"
    wanted = {p for p in files if p.suffix in (".py", *DATA) or p.is_relative_to(scaffold)}
    wanted = {p for p in wanted if "__pycache__" not in p.parts}
    assert len(wanted) > 150
    lacking = {f"kpipe/{p.relative_to(SHIPPED).as_posix()}" for p in wanted} - packed
    assert not lacking


def test_a_project_starts_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    install = [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    packages = next((home / "lib").iterdir()) / "site-packages"
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    hidden = ("PYTHONPATH", "KPIPE_CACHE_DIR")
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")

    def run(*words: str, folder: Path = tmp_path) -> str:
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(str(python), "-c", "import kpipe.codegen as it; print(it.__file__)")
    assert Path(where.strip()).is_relative_to(home)
    kpipe = str(home / "bin" / "kpipe")
    run(kpipe, "new", "mine")
    mine = tmp_path / "mine"
    assert "ok" in run(kpipe, "check", folder=mine)
    run(kpipe, "generate", folder=mine)
    assert "unchanged" in run(kpipe, "generate", "--check", folder=mine)
    assert (mine / "generated/dsa_tp/layer.py").is_file()
