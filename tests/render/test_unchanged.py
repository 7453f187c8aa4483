"""The fast path: "unchanged" exactly where a full run would write nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kpipe.codegen.config import load_config
from kpipe.codegen.render import manifest as manifest_module
from kpipe.codegen.render import unchanged as unchanged_module
from kpipe.codegen.render.generate import prepare
from kpipe.codegen.render.publish import publish
from kpipe.codegen.render.unchanged import unchanged_folder

BASE = Path(__file__).resolve().parents[1] / "cases" / "_base"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one generated spec that extends another, and a template of its own."""
    root = tmp_path / "project"
    shutil.copytree(BASE, root / "pipelines")
    (root / "pipelines/spec.yaml").write_text("extends: base.yaml\nname: spec\n")
    (root / "kpipe.toml").write_text('templates = ["mine"]\n')
    (root / "mine/layer").mkdir(parents=True)
    (root / "mine/layer/extra.py.jinja").write_text("extra\n")
    monkeypatch.chdir(root)
    generate()
    return root


def generate() -> bool:
    """Publish the spec; whether anything was written."""
    spec = "pipelines/spec.yaml"
    config = load_config(Path(spec))
    prepared = prepare(spec, config, config.output, {})
    publish([prepared.changes])
    return bool(prepared.changes.drift)


def unchanged() -> bool:
    spec = Path("pipelines/spec.yaml")
    config = load_config(spec)
    return unchanged_folder(spec, config, config.output) is not None


def test_unchanged_and_a_full_run_agrees(project: Path) -> None:
    assert unchanged()
    assert not generate()


def append(path: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        with (root / path).open("a") as file:
            file.write("\n# changed\n")

    return change


def shadow_geometry(root: Path) -> None:
    """pipelines/geometry is searched ahead of ../geometry, so move it there first."""
    shutil.move(root / "pipelines/geometry", root / "geometry")
    generate()
    assert unchanged()
    shutil.copytree(root / "geometry", root / "pipelines/geometry")


def shadow_template(root: Path) -> None:
    (root / "mine/layer/layer.py.jinja").write_text("mine\n")


def reformat_manifest(root: Path) -> None:
    path = root / "generated/spec/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))


def link_outside(root: Path) -> None:
    shutil.move(root / "generated/spec/kernels", root.parent / "kernels")
    (root / "generated/spec/kernels").symlink_to(root.parent / "kernels")


def rename_folder(root: Path) -> None:
    (root / "generated/spec").rename(root / "generated/other")


CHANGES: dict[str, Callable[[Path], None]] = {
    "spec": append("pipelines/spec.yaml"),
    "extended spec": append("pipelines/base.yaml"),
    "geometry": append("pipelines/geometry/small.yaml"),
    "shadowed geometry": shadow_geometry,
    "own template": append("mine/layer/extra.py.jinja"),
    "new shared template": lambda root: (root / "mine/layer/b.jinja").write_text(""),
    "removed template": lambda root: (root / "mine/layer/extra.py.jinja").unlink(),
    "shadowed template": shadow_template,
    "template folders": lambda root: (root / "kpipe.toml").write_text(""),
    "output root": lambda root: (root / "kpipe.toml").write_text(
        'templates = ["mine"]\noutput = "out"\n'
    ),
    "generated file": append("generated/spec/layer.py"),
    "missing file": lambda root: (root / "generated/spec/kernels/rms_norm.py").unlink(),
    "missing manifest": lambda root: (root / "generated/spec/manifest.json").unlink(),
    "broken manifest": append("generated/spec/manifest.json"),
    "reformatted manifest": reformat_manifest,
    "link": link_outside,
    "renamed folder": rename_folder,
    "missing spec": lambda root: (root / "pipelines/spec.yaml").unlink(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_change_is_seen(project: Path, name: str) -> None:
    assert unchanged()
    CHANGES[name](project)
    assert not unchanged()


def test_strangers_in_the_folder_do_not_matter(project: Path) -> None:
    (project / "generated/spec/evidence").mkdir()
    (project / "generated/spec/evidence/h200.json").write_text("{}")
    (project / "generated/other").mkdir()
    (project / "generated/notes.txt").write_text("")
    assert unchanged()
    assert not generate()


def test_version_and_sources_of_kpipe_count(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged_module, "__version__", "9.9.9")
    assert not unchanged()
    monkeypatch.undo()
    monkeypatch.chdir(project)
    monkeypatch.setattr(unchanged_module, "tool_digest", lambda: "0")
    assert not unchanged()


def test_a_spec_of_another_name_than_its_file_is_found(project: Path) -> None:
    (project / "pipelines/spec.yaml").write_text("extends: base.yaml\nname: other_name\n")
    assert generate()
    assert unchanged()


def test_manifest_names_no_machine(project: Path) -> None:
    text = (project / "generated/spec/manifest.json").read_text()
    assert str(project) not in text and str(manifest_module.SHIPPED) not in text


def test_the_fast_path_imports_nothing_heavy(project: Path) -> None:
    script = (
        "import sys; from kpipe.codegen.cli import main\n"
        "try: main(['generate', 'pipelines/spec.yaml'])\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "heavy = 'pydantic ruamel jinja2 rich torch kpipe.codegen.plan kpipe.runtime'.split()\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "pipelines/spec.yaml  generated/spec  unchanged\n[]\n"
    assert done.stderr == ""
