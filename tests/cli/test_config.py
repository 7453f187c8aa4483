"""Settings of a project: where they stand, what they may say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from case_runner import BASE

from kpipe.codegen import config
from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.spec import load


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(root: Path) -> list[str]:
    with pytest.raises(SpecError) as raised:
        config.load_config(root / "pipelines/x.yaml")
    assert {d.code for d in raised.value.diagnostics} == {"KP801"}
    return [f"{d.span.line}:{d.span.column} {d.message} {d.help}" for d in raised.value.diagnostics]


def test_defaults(tmp_path: Path) -> None:
    write(tmp_path, "pyproject.toml", "[project]\nname = 'x'\n")
    found = config.load_config(tmp_path / "pipelines/x.yaml")
    assert found == config.Config(tmp_path, tmp_path / "generated", (), ())
    assert found.template_folders == (config.SHIPPED / "templates",)


@pytest.mark.parametrize(
    ("name", "head"), [("pyproject.toml", "[tool.kpipe]\n"), ("kpipe.toml", "")]
)
def test_settings(tmp_path: Path, name: str, head: str) -> None:
    (tmp_path / "mine").mkdir()
    text = f'{head}output = "out"\ntemplates = ["mine"]\npipelines = ["pipelines/*.yaml"]\n'
    write(tmp_path, name, text)
    found = config.load_config(tmp_path / "pipelines/x.yaml")
    assert found.output == tmp_path / "out"
    assert found.template_folders == (tmp_path / "mine", config.SHIPPED / "templates")
    assert found.pipelines == ("pipelines/*.yaml",)


def test_nearest_project_wins(tmp_path: Path) -> None:
    write(tmp_path, "kpipe.toml", 'output = "outer"\n')
    write(tmp_path, "inner/kpipe.toml", 'output = "inner"\n')
    assert config.load_config(tmp_path / "inner/a/x.yaml").output == tmp_path / "inner/inner"


def test_a_table_of_semantics(tmp_path: Path) -> None:
    write(tmp_path, "kpipe.toml", 'semantics = "measured/own.json"\n')
    found = config.load_config(tmp_path / "x.yaml")
    assert found.semantics == tmp_path / "measured/own.json"  # read where something is cited
    for value, message in (
        ("3", "1:1 `semantics` takes the relative path of a file "),
        ('""', "1:1 `semantics` takes the relative path of a file "),
        ('"../own.json"', "1:1 `semantics` leaves the project: `../own.json` "),
    ):
        write(tmp_path, "kpipe.toml", f"semantics = {value}\n")
        assert refusal(tmp_path) == [message]


def test_refusals(tmp_path: Path) -> None:
    write(tmp_path, "kpipe.toml", '# ours\noutputs = "x"\noutput = 3\ntemplates = "mine"\n')
    assert refusal(tmp_path) == [
        "2:1 unknown setting `outputs` did you mean `output`?",
        "3:1 `output` takes the relative path of a folder ",
        "4:1 `templates` takes a list of texts ",
    ]
    write(tmp_path, "kpipe.toml", 'output = "/abs"\npipelines = ["../*.yaml"]\n')
    assert refusal(tmp_path) == [
        "1:1 `output` leaves the project: `/abs` ",
        "2:1 `pipelines` leaves the project: `../*.yaml` ",
    ]
    write(tmp_path, "kpipe.toml", "output = \n")
    assert refusal(tmp_path) == ["1:10 not TOML: invalid value "]


def test_links_out_of_the_project_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "project"
    write(root, "kpipe.toml", 'output = "out"\n')
    (root / "out").symlink_to(tmp_path)
    assert refusal(root) == ["1:1 `output` leaves the project: `out` "]


def test_two_homes_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "kpipe.toml", 'output = "a"\n')
    write(tmp_path, "pyproject.toml", "[tool.kpipe]\noutput = 'b'\n")
    assert refusal(tmp_path) == [
        "1:1 kpipe.toml and [tool.kpipe] of pyproject.toml both hold settings keep one of the two"
    ]
    write(tmp_path, "pyproject.toml", "# kpipe\n[tool.other]\n")
    assert config.load_config(tmp_path / "x.yaml").output == tmp_path / "a"


def test_agrees_with_the_loader(tmp_path: Path) -> None:
    """The fast path looks for the project and the geometry in the loader's places."""
    for mark in ("", "a/kpipe.toml", "a/b/pyproject.toml"):
        if mark:
            write(tmp_path, mark, "")
        for spec in ("x.yaml", "a/x.yaml", "a/b/x.yaml", "a/b/c/x.yaml"):
            path = tmp_path / spec
            assert config.project_root(path) == load.project_root(path)
            assert config.geometry_file(path, "small") == load.find_geometry(str(path), "small")[0]
            assert config.geometry_file(path, "none") == load.find_geometry(str(path), "none")[0]
    shutil.copytree(BASE / "geometry", tmp_path / "a/b/geometry")
    for spec in ("a/b/x.yaml", "a/b/c/x.yaml", "a/b/c/d/x.yaml"):
        path = tmp_path / spec
        assert config.geometry_file(path, "small") == load.find_geometry(str(path), "small")[0]


def test_environment() -> None:
    config.check_environment({"KPIPE_CACHE_DIR": "x", "PATH": "y", "NO_COLOR": "1"})
    with pytest.raises(SpecError) as raised:
        config.check_environment(["KPIPE_B", "KPIPE_A"])
    assert [d.message for d in raised.value.diagnostics] == [
        "unknown environment variable `KPIPE_A`",
        "unknown environment variable `KPIPE_B`",
    ]
