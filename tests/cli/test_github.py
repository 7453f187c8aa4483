"""What GitHub and pre-commit read: annotations, the hooks, the action."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from kpipe.codegen.cli import main
from kpipe.codegen.commands.common import show_findings
from kpipe.codegen.config import SHIPPED
from kpipe.codegen.diagnostics import Diagnostic, Span

PER_LEVEL, PER_RUN = 10, 50  # annotations that GitHub shows of a level and step, and of a run
COMMAND = re.compile(r"kpipe (?P<name>[a-z-]+)(?P<rest>[^|>&#;\n]*)")


def read(name: str) -> Any:
    return YAML(typ="safe").load((SHIPPED / name).read_text())


def findings(**counts: int) -> list[Diagnostic]:
    return [
        Diagnostic("KP101", f"{severity} {n:02}", Span("a.yaml", n, 1, n, 2), severity)  # type: ignore[arg-type]
        for severity, count in counts.items()
        for n in range(1, count + 1)
    ]


def printed(found: list[Diagnostic], capsys: pytest.CaptureFixture[str]) -> list[str]:
    show_findings(found, {}, "github", color="never")
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("counts", "hidden", "last"),
    [
        ({"error": 10, "warning": 10, "note": 10}, 0, ""),
        ({"error": 13}, 3, "3 errors more"),
        ({"error": 12, "warning": 11, "note": 10}, 4, "2 errors, 1 warning, 1 note more"),
    ],
)
def test_annotations_stay_within_the_limits(
    counts: dict[str, int], hidden: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(findings(**counts), capsys)
    commands = [line for line in lines if line.startswith("::")]
    for level in ("error", "warning", "notice"):
        assert sum(line.startswith(f"::{level} ") for line in commands) <= PER_LEVEL
    assert len(commands) < PER_RUN
    log = [line for line in lines if not line.startswith("::")]
    assert len(log) == hidden and all(line.startswith("not annotated: a.yaml:") for line in log)
    if last:
        rest = "GitHub shows 10 of a level, the log lists them"
        assert lines[-1] == f"::notice title=kpipe::{last}: {rest}"


def test_annotations_stand_at_paths_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    found = [Diagnostic("KP101", "m", Span("specs/a.yaml", 3, 5, 3, 9))]
    assert printed(found, capsys)[0].startswith(
        "::error file=inner/specs/a.yaml,line=3,col=5,endColumn=9,"
    )
    outside = [Diagnostic("KP101", "m", Span(f"{os.sep}x{os.sep}a.yaml", 3, 5, 3, 9))]
    assert "file=/x/a.yaml" in printed(outside, capsys)[0]


def test_hooks_are_what_pre_commit_takes() -> None:
    hooks = {hook["id"]: hook for hook in read(".pre-commit-hooks.yaml")}
    assert set(hooks) == {"kpipe-check", "kpipe-generate-check"}
    for hook in hooks.values():
        assert {"id", "name", "entry", "language"} <= set(hook)
        assert hook["language"] == "python" and hook["pass_filenames"] is False
        check_command(hook["entry"])
    wanted = {
        "pipelines/a.yaml": True,
        "pipelines/geometry/a.yaml": True,
        "pyproject.toml": True,
        "generated/a/layer.py": False,
    }
    for path, runs in wanted.items():
        assert bool(re.search(hooks["kpipe-check"]["files"], path)) is runs
        assert re.search(hooks["kpipe-generate-check"]["files"], path)


def test_action_is_a_composite_action() -> None:
    action = read("action.yml")
    assert {"name", "description", "inputs", "runs"} <= set(action)
    assert action["runs"]["using"] == "composite"
    for step in action["runs"]["steps"]:
        assert ("uses" in step) != ("run" in step)
        assert "run" not in step or step["shell"] == "bash"
    text = (SHIPPED / "action.yml").read_text()
    used = set(re.findall(r"inputs\.([a-z-]+)", text))
    assert used == set(action["inputs"])
    assert all({"description", "default"} <= set(given) for given in action["inputs"].values())


def test_action_hands_nothing_from_outside_to_a_shell() -> None:
    """Expressions in a script would run what a branch is called."""
    for step in read("action.yml")["runs"]["steps"]:
        assert "${{" not in step.get("run", "") and "${{" not in step.get("with", {}).get(
            "script", ""
        )


def test_action_runs_commands_that_there_are() -> None:
    steps = {step.get("name", ""): step for step in read("action.yml")["runs"]["steps"]}
    check_command(steps["Check"]["run"])
    check_command("kpipe generate --check")
    assert "kpipe generate --check ||" in steps["Generated code is up to date"]["run"]
    assert 'kpipe plan --against "$REF" --format markdown >' in steps["Plan"]["run"]
    ran = " ".join(step.get("run", "") for step in steps.values())
    names = {match["name"] for match in COMMAND.finditer(ran)}
    assert {"check", "generate", "plan"} <= names <= set(main.commands) | {"and"}


def check_command(line: str) -> None:
    """The command is one of the command line, and takes these options."""
    match = COMMAND.fullmatch(line)
    assert match and match["name"] in main.commands, line
    taken = {o for p in main.commands[match["name"]].params for o in (*p.opts, *p.secondary_opts)}
    given = [word for word in shlex.split(match["rest"]) if word.startswith("--")]
    assert set(given) <= taken, line
