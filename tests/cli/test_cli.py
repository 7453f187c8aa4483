"""The command line: exit codes, streams, colour, environment, what it imports."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from case_runner import BASE, stub_renderer
from click.testing import CliRunner, Result

from kpipe.codegen import cli, cli_root
from kpipe.codegen.config import SHIPPED
from kpipe.codegen.rules import RULES


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(BASE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "kpipe.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str, env: dict[str, str] | None = None) -> Result:
    with stub_renderer():
        return CliRunner().invoke(cli.main, list(words), env=env)


def test_help_lists_every_exit_code() -> None:
    text = run("--help").stdout
    codes = re.findall(r"^  (\d+) ", text.partition("Exit codes:")[2], re.MULTILINE)
    constants = {
        cli_root.FINE,
        cli_root.FINDINGS,
        cli_root.USAGE,
        cli_root.DRIFT,
        cli_root.ENVIRONMENT,
        cli_root.INTERNAL,
    }
    assert {int(code) for code in codes} == constants


def test_help_puts_the_daily_verbs_first() -> None:
    text = run("--help").stdout
    first, rest = text.partition("More commands:")[::2]
    assert re.findall(r"^  ([a-z-]+) ", first.partition("Commands:")[2], re.MULTILINE) == [
        "check",
        "generate",
        "plan",
    ]
    assert re.findall(r"^  ([a-z-]+) ", rest.partition("Exit")[0], re.MULTILINE) == sorted(
        set(cli.main.commands) - set(cli_root.DAILY)
    )


@pytest.mark.parametrize("command", sorted(cli.main.commands))
def test_every_command_explains_itself(command: str) -> None:
    if command not in ("verify", "bench"):  # they answer for themselves, in their own process
        result = run(command, "--help")
        assert result.exit_code == 0 and result.stdout.startswith(f"Usage: kpipe {command}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["check", "base.yaml"], 0),
        (["plan", "base.yaml"], 0),
        (["plan", "absent.yaml"], 2),
        (["generate", "base.yaml", "--check"], 3),
        (["generate", "base.yaml", "--diff"], 3),
        (["generate", "base.yaml", "--colour", "never"], 2),
        (["check", "base.yaml", "--format", "xml"], 2),
    ],
)
def test_exit_codes(project: Path, words: list[str], expected: int) -> None:
    assert run(*words).exit_code == expected


def test_check_and_diff_write_nothing(project: Path) -> None:
    before = sorted(project.rglob("*"))
    run("generate", "base.yaml", "--check")
    run("generate", "base.yaml", "--diff")
    run("check", "base.yaml")
    run("plan", "base.yaml")
    assert sorted(project.rglob("*")) == before


def test_diff_applies(project: Path) -> None:
    assert run("generate", "base.yaml").exit_code == 0
    wanted = {p: p.read_bytes() for p in (project / "generated").rglob("*") if p.is_file()}
    (project / "generated/layer/layer.py").write_bytes(b"first\nno newline at the end")
    (project / "generated/layer/kernels/rms_norm.py").unlink()
    result = run("generate", "base.yaml", "--diff")
    assert result.exit_code == 3
    assert "\\ No newline at end of file" in result.stdout
    patch = subprocess.run(
        ["git", "apply", "--unsafe-paths"], input=result.stdout.encode(), capture_output=True
    )
    assert patch.returncode == 0, patch.stderr
    assert {p: p.read_bytes() for p in wanted} == wanted
    assert run("generate", "base.yaml", "--diff").stdout == ""


def test_drift_classes_by_name(project: Path) -> None:
    run("generate", "base.yaml")
    folder = project / "generated/layer"
    (folder / "layer.py").write_text("mine")
    (folder / "kernels/rms_norm.py").unlink()
    result = run("generate", "base.yaml", "--check")
    assert result.exit_code == 3
    assert result.stdout == (
        "base.yaml  generated/layer  1 missing, 1 hand-edited, 1 unchanged\n"
        "  missing      kernels/rms_norm.py\n"
        "  hand-edited  layer.py\n"
    )
    assert "files edited by hand are kept, unless you add --force\n" in result.stderr
    result = run("generate", "base.yaml", "--force")
    assert result.stdout.endswith("  restored     kernels/rms_norm.py\n  overwritten  layer.py\n")


def test_out_is_another_root(project: Path) -> None:
    result = run("generate", "base.yaml", "--out", "elsewhere")
    assert result.stdout.startswith("base.yaml  elsewhere/layer  3 new\n")
    assert (project / "elsewhere/layer/layer.py").is_file()
    assert not (project / "generated").exists()
    assert run("generate", "base.yaml", "--out", "elsewhere", "--check").exit_code == 0


def test_a_spec_named_twice_is_taken_once(project: Path) -> None:
    result = run("generate", "base.yaml", "./base.yaml")
    assert result.exit_code == 0
    assert result.stdout.count("generated/layer") == 1


def test_a_folder_of_another_spec_is_not_taken(project: Path) -> None:
    run("generate", "base.yaml")
    (project / "copy.yaml").write_text("extends: base.yaml\ndoc: kept its name\n")
    result = run("generate", "copy.yaml")
    assert result.exit_code == 1
    assert (
        "copy.yaml:1:1: error[KP807]: `generated/layer` is generated from `base.yaml`, which still "
        "exists\n"
    ) in result.stderr
    (project / "base.yaml").rename(project / "root.yaml")
    (project / "copy.yaml").write_text("extends: root.yaml\ndoc: kept its name\n")
    assert run("generate", "copy.yaml").exit_code == 0


def test_unknown_variables_are_refused(project: Path) -> None:
    result = run("check", "base.yaml", env={"KPIPE_OVERLAPP": "pdl", "KPIPE_CACHE_DIRS": "x"})
    assert result.exit_code == 2 and result.stdout == ""
    assert "error[KP802]: unknown environment variable `KPIPE_OVERLAPP`\n" in result.stderr
    assert "did you mean `KPIPE_CACHE_DIR`? unset KPIPE_CACHE_DIRS;" in result.stderr
    assert run("check", "base.yaml", env={"KPIPE_CACHE_DIR": "x"}).exit_code == 0


def test_internal_errors_are_one_line(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("wires crossed\nin two lines")

    monkeypatch.setattr("kpipe.codegen.plan.api.resolve_spec", broken)
    monkeypatch.setattr("kpipe.codegen.commands.plan.prove_pipeline", broken)
    result = run("plan", "base.yaml")
    assert result.exit_code == 70
    assert result.stderr == (
        "internal error: RuntimeError: wires crossed; please report, with the output of the same "
        "command and --debug\n"
    )
    result = run("plan", "base.yaml", "--debug")
    assert result.exit_code == 70 and "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("choice", "colored"), [("always", True), ("never", False), ("auto", False)]
)
def test_color(project: Path, choice: str, colored: bool) -> None:
    (project / "wrong.yaml").write_text("extends: base.yaml\nname: Wrong\n")
    text = run("check", "wrong.yaml", "--color", choice).stdout
    assert ("\x1b[31m\x1b[1merror[KP101]\x1b[0m: " in text) is colored
    plain = re.sub(r"\x1b\[\d+m", "", text)
    assert plain == run("check", "wrong.yaml", "--color", "never").stdout


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    from kpipe.codegen.commands.common import use_color

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert use_color("auto")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_color("auto")
    assert use_color("always")


def test_plan_json_agrees_with_itself(project: Path) -> None:
    data = json.loads(run("plan", "base.yaml", "--format", "json").stdout)
    assert data["schema"] == "kpipe.plan/1" and data["status"] == "proved"
    methods = {entry["method"] for entry in data["table"]}
    assert methods == {step["method"] for step in data["steps"]}
    covered = sum(len(entry["rows"]) for entry in data["table"])
    assert covered == len(data["targets"]) * sum(map(len, data["rows"].values()))
    ops = {op["name"] for op in data["ops"]}
    for step in data["steps"]:
        for item in step["items"]:
            assert item["kind"] != "launch" or item["op"] in ops
            assert item["place"]["line"] > 0


def test_plan_text_fits_and_hides_nothing() -> None:
    for spec in ("dsa_tp", "dsa_dcp"):
        path = str(SHIPPED / "pipelines" / f"{spec}.yaml")
        text = run("plan", path).stdout
        assert max(map(len, text.splitlines())) <= 110 + len(path)
        assert max(len(line) for line in text.splitlines() if path not in line) <= 110
        data = json.loads(run("plan", path, "--format", "json").stdout)
        for section in ("buffers", "mailboxes", "caches", "weights", "step_inputs", "ops"):
            for entry in data[section]:
                assert re.search(rf"\b{entry['name']}\b", text), entry["name"]
        for name, value in {**data["dims"], **data["numerics"], **data["environment"]}.items():
            assert f"{name} {value}" in text
        for step in data["steps"]:
            assert step["method"] in text
            for item in step["items"]:
                if item["kind"] == "launch":
                    assert item["pdl"]["release_reason"] in re.sub(r"\s+", " ", text)


def test_schema_prints_and_writes_the_same(project: Path) -> None:
    both = json.loads(run("schema").stdout)
    result = run("schema", "--out", "made/here")
    assert result.stdout == "made/here/pipeline.v1.json\nmade/here/geometry.v1.json\n"
    for name, schema in both.items():
        assert json.loads((project / "made/here" / name).read_text()) == schema


def test_explain_and_rules_say_the_same() -> None:
    data = json.loads(run("rules", "--format", "json").stdout)
    assert [rule["code"] for rule in data["rules"]] == sorted(RULES)
    for rule in data["rules"]:
        text = re.sub(r"\s+", " ", run("explain", rule["code"].lower()).stdout)
        for key in ("code", "name", "why", "bad", "repair"):
            assert re.sub(r"\s+", " ", rule[key]) in text


def test_verify_runs_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fake(command, check):  # noqa: ANN001, ANN202
        seen.append((command, check))
        return subprocess.CompletedProcess(command, 4)

    monkeypatch.setattr(subprocess, "run", fake)
    words = ["generated/x", "--backend", "cuda", "--virtual-ranks", "2", "--help"]
    assert CliRunner().invoke(cli.main, ["verify", *words]).exit_code == 4
    [(command, check)] = seen
    assert command[0] == sys.executable and not check
    assert command[-len(words) - 2 :] == ["-m", "kpipe.runtime.verify", *words]


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from kpipe.codegen.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = 'pydantic ruamel jinja2 rich torch kpipe.codegen.plan kpipe.runtime'.split()\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"


def test_a_first_generate_imports_nothing_in_vain(project: Path) -> None:
    script = (
        "import sys; from kpipe.codegen.cli import main\n"
        "try: main(['generate', 'base.yaml'])\n"
        "except SystemExit: pass\n"
        "vain = 'difflib rich kpipe.codegen.proof.races'.split()\n"
        "print('pydantic' in sys.modules, [name for name in vain if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", script]
    for _ in range(2):  # the second one remembers the proof
        shutil.rmtree("generated", ignore_errors=True)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True []"


def test_a_process_of_its_own_leaves_its_garbage_to_the_system(project: Path) -> None:
    script = (
        "import atexit, gc, sys; from kpipe.codegen.cli import main\n"
        "atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 0))\n"
        "sys.argv = ['kpipe', 'rules']; main()\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False True"


def test_a_closed_pipe_is_not_an_error(project: Path) -> None:
    script = "from kpipe.codegen.cli import main; main(['plan', 'base.yaml'])"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_codegen_never_imports_torch_or_the_runtime() -> None:
    for path in sorted((SHIPPED / "codegen").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] != "torch" and not name.startswith("kpipe.runtime"), path


def test_a_newer_kpipe_with_the_same_output_is_not_drift(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*words: str) -> Result:
        return run("generate", "base.yaml", *words)

    assert generate().exit_code == 0
    manifest = next(project.glob("generated/*/manifest.json"))
    older = re.sub(r'"tool": "[0-9a-f]+"', f'"tool": "{"0" * 64}"', manifest.read_text())
    assert older != manifest.read_text()
    manifest.write_text(older)
    checked = generate("--check")
    assert (checked.exit_code, checked.stdout.split()[-1]) == (0, "unchanged")
    assert manifest.read_text() == older
    assert generate().exit_code == 0 and manifest.read_text() != older
    manifest.write_text(older)
    (manifest.parent / "layer.py").unlink()
    assert generate("--check").exit_code == 3
