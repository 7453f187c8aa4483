"""`kpipe new`: a project that works at once, and nothing of the user's overwritten."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from ruamel.yaml import YAML

from kpipe.codegen.cli import main
from kpipe.codegen.config import SHIPPED_TEMPLATES
from kpipe.codegen.scaffold.project import pipelines, project_files


def kpipe(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_new_project_checks_and_generates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = kpipe("new", "mine")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == sorted(f"mine/{name}" for name in project_files("dsa_tp"))
    assert result.stderr == "next: cd mine && kpipe check && kpipe generate\n"
    monkeypatch.chdir(folder / "mine")
    assert kpipe("check").exit_code == 0
    assert kpipe("generate", "--check").exit_code == 3
    assert kpipe("generate").exit_code == 0
    assert kpipe("generate", "--check").exit_code == 0
    assert (folder / "mine/generated/dsa_tp/layer.py").is_file()


@pytest.mark.parametrize("name", pipelines())
def test_every_shipped_pipeline_is_a_start(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kpipe("new", ".", "--from", name).exit_code == 0
    assert kpipe("check").exit_code == 0
    spec = (folder / f"pipelines/{name}.yaml").read_text()
    schema = re.search(r"\$schema=(\S+)", spec)
    assert schema and (folder / "pipelines" / schema[1]).is_file()


def test_a_template_of_the_project_wins(folder: Path) -> None:
    kpipe("new", ".")
    kpipe("generate")
    own = folder / "templates/layer/schedule.md.jinja"
    own.parent.mkdir(parents=True)
    shipped = (SHIPPED_TEMPLATES / "layer/schedule.md.jinja").read_text()
    own.write_text(f"{shipped}\nHow we name things.\n")
    result = kpipe("generate", "--check")
    assert result.exit_code == 3 and "SCHEDULE.md" in result.stdout
    assert kpipe("generate").exit_code == 0
    written = (folder / "generated/dsa_tp/SCHEDULE.md").read_text()
    assert written.endswith("\nHow we name things.\n")


def test_files_that_are_there_are_not_overwritten(folder: Path) -> None:
    (folder / "README.md").write_text("ours\n")
    (folder / "other.txt").write_text("ours\n")
    before = tree(folder)
    result = kpipe("new", ".")
    assert result.exit_code == 2
    assert result.stderr.endswith(
        "Error: these files are there; add --keep or --force:\n  README.md\n"
    )
    assert tree(folder) == before
    assert kpipe("new", ".", "--keep").exit_code == 0
    assert (folder / "README.md").read_text() == "ours\n"
    assert "README.md  kept" in kpipe("new", ".", "--keep").stdout.splitlines()
    assert kpipe("new", ".", "--force").exit_code == 0
    assert (folder / "README.md").read_text() != "ours\n"
    assert (folder / "other.txt").read_text() == "ours\n"


@pytest.mark.parametrize("there", ["--keep", "--force"])
def test_a_pyproject_of_the_user_stays(folder: Path, there: str) -> None:
    own = '[project]\nname = "engine"\n'
    (folder / "pyproject.toml").write_text(own)
    assert kpipe("new", ".").exit_code == 0
    settings = tomllib.loads((folder / "kpipe.toml").read_text())
    assert settings["pipelines"] == ["pipelines/*.yaml"]
    assert kpipe("check").exit_code == 0
    (folder / "kpipe.toml").unlink()
    own += '[tool.kpipe]\npipelines = ["pipelines/*.yaml"]\n'
    (folder / "pyproject.toml").write_text(own)
    assert kpipe("new", ".", there).exit_code == 0
    assert (folder / "pyproject.toml").read_text() == own
    assert not (folder / "kpipe.toml").exists()
    assert kpipe("check").exit_code == 0


def test_unknown_pipelines_and_files_in_the_way(folder: Path) -> None:
    result = kpipe("new", "mine", "--from", "dsa-tp")
    assert result.exit_code == 2 and "did you mean `dsa_tp`? there are dsa_dcp," in result.stderr
    (folder / "mine").write_text("a file\n")
    assert kpipe("new", "mine").exit_code == 2
    (folder / "half").mkdir()
    (folder / "half/pipelines").write_text("a file\n")
    result = kpipe("new", "half")
    assert result.exit_code == 2
    assert "Error: cannot write `half/pipelines" in result.stderr


def test_editor_and_ci_fit_the_project(folder: Path) -> None:
    kpipe("new", ".")
    schemas = json.loads((folder / ".vscode/settings.json").read_text())["yaml.schemas"]
    for schema, pattern in schemas.items():
        assert (folder / schema).is_file() and list(folder.glob(pattern))
    task = json.loads((folder / ".vscode/tasks.json").read_text())["tasks"][0]
    spec = folder / "pipelines/dsa_tp.yaml"
    spec.write_text(spec.read_text().replace("join side", "joined side"))
    line = kpipe(*task["command"].split()[1:]).stdout.splitlines()[0]
    matcher = task["problemMatcher"]["pattern"]
    found = re.match(matcher["regexp"], line)
    assert found and found[matcher["file"]] == "pipelines/dsa_tp.yaml"
    yaml = YAML(typ="safe")
    commands = [step.get("run", "") for step in workflow_steps(folder, yaml)]
    hooks = yaml.load((folder / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    ran = [*commands, *(hook["entry"] for hook in hooks)]
    for line in (line for line in ran if line.startswith("kpipe ")):
        name, *options = line.split()[1:]
        known = {option for parameter in main.commands[name].params for option in parameter.opts}
        assert {option for option in options if option.startswith("--")} <= known


def workflow_steps(folder: Path, yaml: YAML) -> list[dict[str, str]]:
    return yaml.load((folder / ".github/workflows/kpipe.yml").read_text())["jobs"]["kpipe"]["steps"]
