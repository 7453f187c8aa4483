"""The manifest: deterministic text, nothing of the machine in it, nothing believed unseen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kpipe.codegen.cache import tool_digest
from kpipe.codegen.config import SHIPPED
from kpipe.codegen.render.manifest import (
    SCHEMA,
    Manifest,
    ManifestError,
    digest,
    is_inner,
    label,
    labelled,
    parse_manifest,
    read_manifest,
    render_manifest,
    shared_templates,
    template_digest,
    template_names,
)

SAMPLE = Manifest(
    pipeline="layer",
    spec="pipelines/layer.yaml",
    kpipe="0.1.0",
    geometry="kpipe:pipelines/geometry/small.yaml",
    inputs={"pipelines/layer.yaml": "2", "a.yaml": "1"},
    templates={"layer/layer.py.jinja": "3"},
    tool="4",
    files={"layer.py": "6", "__init__.py": "5"},
)


def test_text_is_sorted_and_ends_in_one_newline() -> None:
    text = render_manifest(SAMPLE)
    data = json.loads(text)
    assert list(data) == sorted(data) and list(data["files"]) == ["__init__.py", "layer.py"]
    assert data["schema"] == SCHEMA
    assert text.endswith("}\n") and "\r" not in text
    shuffled = SAMPLE._replace(files=dict(reversed(SAMPLE.files.items())))
    assert render_manifest(shuffled) == text


def test_round_trip() -> None:
    assert parse_manifest(render_manifest(SAMPLE)) == SAMPLE


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.update(schema="kpipe.manifest/2"), "not of schema kpipe.manifest/1"),
        (lambda data: data.pop("tool"), "its keys are not those of a manifest"),
        (lambda data: data.update(user="me"), "its keys are not those of a manifest"),
        (lambda data: data.update(tool=4), "`tool` has a wrong value"),
        (lambda data: data.update(files=["layer.py"]), "`files` has a wrong value"),
        (lambda data: data["files"].update({"../../etc/passwd": "0"}), "`files` has a wrong value"),
        (lambda data: data["files"].update({"/etc/passwd": "0"}), "`files` has a wrong value"),
        (
            lambda data: data["templates"].update({"../x.jinja": "0"}),
            "`templates` has a wrong value",
        ),
    ],
)
def test_refuses_what_is_no_manifest(change, why: str) -> None:  # noqa: ANN001
    data = json.loads(render_manifest(SAMPLE))
    change(data)
    with pytest.raises(ManifestError) as raised:
        parse_manifest(json.dumps(data))
    assert str(raised.value) == why


def test_reading(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    (tmp_path / "manifest.json").write_bytes(b"\xff")
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("<<<<<<< ours")
    with pytest.raises(ManifestError, match="not JSON"):
        read_manifest(tmp_path)


def test_labels_name_no_machine(tmp_path: Path) -> None:
    inside = tmp_path / "pipelines/a.yaml"
    assert label(inside, tmp_path) == "pipelines/a.yaml"
    shipped = SHIPPED / "pipelines/geometry/small.yaml"
    assert label(shipped, tmp_path) == "kpipe:pipelines/geometry/small.yaml"
    for path in (inside, shipped):
        assert labelled(label(path, tmp_path), tmp_path) == path
    assert label(tmp_path / "x.yaml", tmp_path / "project") == "../x.yaml"


@pytest.mark.parametrize("name", ["a.py", "kernels/a.py", ".hidden"])
def test_inner_names(name: str) -> None:
    assert is_inner(name)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\\b", "c:/a"])
def test_names_that_may_leave(name: str) -> None:
    assert not is_inner(name)


def test_template_search(tmp_path: Path) -> None:
    mine, shipped = tmp_path / "mine", tmp_path / "shipped"
    for folder, names in (
        (mine, ["layer/a.jinja"]),
        (shipped, ["layer/a.jinja", "kernels/k.jinja"]),
    ):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(folder.name)
    (shipped / "kernels/_macros.jinja").write_text("")
    (shipped / "layer/notes.txt").write_text("")
    names = template_names([mine, shipped])
    assert names == {"layer/a.jinja", "kernels/k.jinja", "kernels/_macros.jinja"}
    assert shared_templates(names) == {"layer/a.jinja", "kernels/_macros.jinja"}
    assert template_digest("layer/a.jinja", [mine, shipped]) == digest("mine")
    assert template_digest("kernels/k.jinja", [mine, shipped]) == digest("shipped")
    assert template_digest("absent.jinja", [mine, shipped]) is None


def test_tool_digest_sees_names_and_bytes(tmp_path: Path) -> None:
    def with_files(**files: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "__pycache__/x.py").write_text(folder.name)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        return tool_digest(folder)

    first = with_files(a="1", b="2")
    assert first == with_files(b="2", a="1")
    assert len({first, with_files(a="1"), with_files(a="1", c="2"), with_files(a="12", b="")}) == 4
