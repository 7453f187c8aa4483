"""`kpipe show` and the pictures of `kpipe generate` as a user meets them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from review.pictures import read
from spec_project import edit, make_project, plan_of, render

from kpipe.codegen.cli import main

STEP = ("--rows", "8", "--q", "1", "--arch", "sm_90a")
FORMS = [("timeline", form) for form in ("text", "svg", "html", "perfetto")] + [
    (view, form)
    for view in ("graph", "streams", "buffers", "mailbox")
    for form in ("text", "svg", "html")
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


def show(project: Path, *words: str) -> Result:
    before = os.getcwd()
    os.chdir(project)
    try:
        return CliRunner().invoke(main, ["show", *words])
    finally:
        os.chdir(before)


@pytest.mark.parametrize(("view", "form"), FORMS)
def test_every_view_in_every_form(view: str, form: str, project: Path) -> None:
    result = show(project, view, "pipelines/dsa_dcp.yaml", *STEP, "--format", form)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("\n") and not result.stdout.endswith("\n\n")
    if form == "text":
        assert max(map(len, result.stdout.split("\n"))) <= 100
        assert result.stdout.isascii()
    if form == "svg":
        assert read(result.stdout).boxes


@pytest.mark.parametrize("view", ["timeline", "graph", "streams", "buffers", "mailbox"])
def test_text_of_all_launch_lists_stays_within_100_columns(view: str, project: Path) -> None:
    result = show(project, view, "pipelines/dsa_dcp.yaml")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.split("\n"))) <= 100
    names = [method.name for method in plan_of(project, "dsa_dcp").methods]
    assert all(f"dsa_dcp {name}: rows" in result.stdout for name in names)


@pytest.mark.parametrize(
    ("name", "begins"),
    [("a.svg", "<svg "), ("a.html", "<!doctype html>"), ("a.json", "{\n"), ("a.txt", "dsa_tp ")],
)
def test_the_name_of_the_output_decides_the_form(name: str, begins: str, project: Path) -> None:
    result = show(project, "timeline", "pipelines/dsa_tp.yaml", *STEP, "--out", name)
    assert (result.exit_code, result.stdout) == (0, "")
    assert (project / name).read_text().startswith(begins)


class _Loads(HTMLParser):
    """Whatever a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {key}" for key, _ in attrs if key in ("src", "href", "xlink:href")]


def test_a_page_loads_nothing(project: Path) -> None:
    result = show(project, "graph", "pipelines/dsa_dcp.yaml", *STEP, "--format", "html")
    loads = _Loads()
    loads.feed(result.stdout)
    assert loads.found == []
    urls = set(re.findall(r"https?://[^\"' <)]*", result.stdout))
    assert urls == {"http://www.w3.org/2000/svg"}
    assert "@import" not in result.stdout and "fetch(" not in result.stdout


def test_the_same_bytes_under_another_hash_seed(project: Path) -> None:
    found = set()
    for seed in ("1", "2"):
        code = "from kpipe.codegen.cli import main; main()"
        words = [sys.executable, "-c", code, "show", "timeline", "pipelines/dsa_dcp.yaml"]
        run = subprocess.run(
            [*words, "--format", "html"],
            cwd=project,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        found.add(run.stdout)
    assert len(found) == 1


def test_estimated_and_measured_are_told_apart(project: Path, tmp_path: Path) -> None:
    bench = Path(__file__).parents[2] / "bench" / "results" / "dsa_tp_h200.json"
    one = ("timeline", "pipelines/dsa_tp.yaml", "--rows", "1", "--arch", "sm_90a")
    for form in ("text", "svg", "html", "perfetto"):
        plain = show(project, *one, "--format", form)
        timed = show(project, *one, "--format", form, "--timings", str(bench))
        assert "measured on NVIDIA H200" not in plain.stdout
        assert "Estimated, not run" in plain.stdout
        assert "measured on NVIDIA H200" in timed.stdout
        assert "Estimated, not run" not in timed.stdout
        both = show(project, *one, "--format", form, "--timings", str(bench), "--estimated")
        assert both.exit_code == 2


def test_another_architecture_stays_estimated_and_that_is_said(project: Path) -> None:
    bench = Path(__file__).parents[2] / "bench" / "results" / "dsa_tp_h200.json"
    words = ("pipelines/dsa_tp.yaml", "--rows", "1", "--arch", "sm_100a")
    result = show(project, "timeline", *words, "--timings", str(bench))
    assert result.exit_code == 0 and "measured on" not in result.stdout
    assert "no times for rows 1, q 1, sm_100a" in result.stderr
    assert "it has rows 1, 4, 16, 64 on sm_90a" in result.stderr


def test_a_mode_that_is_not_legal_and_one_that_the_table_never_takes(tmp_path: Path) -> None:
    root = make_project(tmp_path)
    illegal = show(root, "timeline", "pipelines/dsa_dcp.yaml", "--mode", "late")
    assert illegal.exit_code == 1
    assert "error[KP104]: mode `late` is not legal here: it excludes dcp" in illegal.stderr
    assert "may suit" not in illegal.stderr
    partly = show(root, "timeline", "pipelines/dsa_tp.yaml", "--mode", "fork")
    assert partly.exit_code == 1 and "`mla_query_split` reads `q_c` before" in partly.stderr
    assert partly.stderr.endswith(
        "mode `fork` may suit some steps only: select them with --rows, --q, --arch\n"
    )
    few = show(root, "timeline", "pipelines/dsa_tp.yaml", "--mode", "fork", *STEP)
    assert few.exit_code == 0 and "rows 8, q 1, sm_90a, mode fork" in few.stdout
    none = show(root, "timeline", "pipelines/dsa_tp.yaml", "--mode", "fork", "--rows", "9")
    assert none.exit_code == 2 and "a step of 9 rows is padded to 16" in none.stderr
    assert "may suit" not in none.stderr
    old = "requires: {fused_indexer: true}\n    late_front"
    mine = f"{old[:31]}\n    mine:\n      main: [packed_gemm, query_norm, fork side, index_gemm, "
    mine += "dsa_index, index_scores, topk_select, join side, core, value, o_proj]\n"
    mine += "      side: [mla_query]\n    late_front"
    edit(root, "dsa_tp.yaml", old, mine)
    shown = show(root, "streams", "pipelines/dsa_tp.yaml", "--mode", "mine", *STEP)
    assert shown.exit_code == 0 and "mode mine" in shown.stdout


def test_generated_pictures_are_those_of_show(project: Path) -> None:
    plan = plan_of(project, "dsa_tp")
    files = render(plan)
    pictures = {name for name in files if name.startswith("schedule/")}
    assert pictures == {f"schedule/{m.name.removeprefix('_')}.svg" for m in plan.methods}
    words = ("pipelines/dsa_tp.yaml", "--rows", "1", "--q", "1", "--arch", "sm_90a")
    shown = show(project, "timeline", *words, "--format", "svg")
    assert files["schedule/front.svg"] == shown.stdout
    for name in pictures:
        assert f"]({name})" in files["SCHEDULE.md"]
        assert "Estimated, not run" in files[name]


def test_a_comment_in_the_spec_changes_no_picture(tmp_path: Path) -> None:
    before = render(plan_of(make_project(tmp_path)))
    edit(tmp_path, "dsa_tp.yaml", "overlap:\n", "# said once more\noverlap:\n")
    after = render(plan_of(tmp_path))
    changed = {name for name in before if before[name] != after[name]}
    assert not any(name.startswith("schedule/") for name in changed)
    assert "layer.py" in changed  # its comments name lines of the spec


def test_a_diff_names_pictures_and_does_not_print_them(tmp_path: Path) -> None:
    root = make_project(tmp_path)
    before = os.getcwd()
    os.chdir(root)
    try:
        first = CliRunner().invoke(main, ["generate", "pipelines/dsa_tp.yaml"])
        edit(root, "dsa_tp.yaml", 'sm_90a:  {q1: {"1-4": front', 'sm_90a:  {q1: {"1-4": wait')
        diff = CliRunner().invoke(main, ["generate", "pipelines/dsa_tp.yaml", "--diff"])
    finally:
        os.chdir(before)
    assert first.exit_code == 0 and diff.exit_code == 3
    new = "Pictures /dev/null and b/generated/dsa_tp/schedule/wait_index_front.svg differ\n"
    assert new in diff.stdout or "Pictures /dev/null and b/generated/dsa_tp/schedule/wait" in (
        diff.stdout
    )
    assert "<svg" not in diff.stdout and "+++ b/generated/dsa_tp/layer.py" in diff.stdout
