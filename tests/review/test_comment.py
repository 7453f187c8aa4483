"""The comment of a pull request: verdict first, deterministic, never too long for its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from review_project import LATE, TABLE, inside, make_repository, reviewed
from spec_project import edit

from kpipe.codegen.cli import main
from kpipe.codegen.review.as_json import review_json
from kpipe.codegen.review.markdown import LIMIT, MARK, render_markdown
from kpipe.codegen.review.model import Review
from kpipe.codegen.review.text import render_text

WITH = "index_front, index_scores, topk_select, mla_query, core"
WITHOUT = WITH.replace("mla_query, ", "")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_repository(tmp_path_factory.mktemp("comment"))
    edit(root, "dsa_tp.yaml", TABLE, LATE)
    return root


@pytest.fixture(scope="module")
def found(repository: Path) -> Review:
    names = sorted(f"pipelines/{path.name}" for path in (repository / "pipelines").glob("*.yaml"))
    return reviewed(repository, *names)


def run(repository: Path, *words: str) -> tuple[int, str]:
    with inside(repository):
        result = CliRunner().invoke(main, ["plan", *words, "--against", "main"])
    return result.exit_code, result.stdout


def test_the_first_line_is_the_verdict(found: Review) -> None:
    first, second, *_ = render_markdown(found).split("\n")
    assert first.startswith("kpipe: 1 pipeline changed, schedule of 1 of 11 row ranges; proved; ")
    assert second == ""
    assert render_text(found).partition("\n")[0] == first
    assert json.loads(review_json(found, 0))["verdict"] == first


def test_several_specs_are_one_comment(found: Review) -> None:
    text = render_markdown(found)
    assert text.count(MARK) == 1 and text.endswith(f"{MARK}\n")
    assert "## `dsa_tp` (pipelines/dsa_tp.yaml)" in text
    assert "- `dsa_dcp_d2` (pipelines/dsa_dcp_d2.yaml): " in text  # at the end, in one line


def test_details_are_folded_and_closed(found: Review) -> None:
    text = render_markdown(found)
    assert text.count("<details>") == text.count("</details>") > 0
    assert text.count("```") % 2 == 0
    assert "before  main  packed_gemm" in text and "after   main  packed_gemm" in text


def test_a_long_comment_loses_details_from_the_last_on(found: Review) -> None:
    (one,) = (pipeline for pipeline in found.pipelines if pipeline.name == "dsa_tp")
    lists = tuple(
        replace(one.lists[0], mode_after=f"mode_{number}", numerics=("x" * 900,))
        for number in range(150)
    )
    entries = tuple(
        replace(entry, change=number)
        for number in range(150)
        for entry in one.ranges
        if entry.change == 0
    )
    many = replace(found, pipelines=(replace(one, ranges=entries, lists=lists),))
    whole = render_text(many)
    assert len(whole.encode()) > LIMIT
    text = render_markdown(many)
    assert LIMIT - 4096 < len(text.encode()) <= LIMIT
    assert "`mode_0` at" in text and "`mode_149` at" not in text
    said = "sections left out to keep this comment under 64 KB; "
    assert f"{said}`kpipe plan" in text and text.endswith(f"{MARK}\n")
    assert text.count("<details>") == text.count("</details>")
    shorter = render_markdown(replace(many, pipelines=many.pipelines * 40))
    assert len(shorter.encode()) <= LIMIT and said in shorter
    assert shorter.startswith("kpipe: ")


@pytest.mark.parametrize("word", ["<img src=x>", "`<img src=x>", "``@team <b>", "@team `x"])
def test_words_of_a_stranger_are_inert(repository: Path, word: str) -> None:
    text = (repository / "pipelines" / "dsa_tp.yaml").read_text()
    path = repository / "pipelines" / "hostile.yaml"
    path.write_text(text.replace("core, value, o_proj]", f"core, value, '{word}']"))
    try:
        code, out = run(repository, "pipelines/hostile.yaml", "--format", "markdown")
    finally:
        path.unlink()
    assert code == 1 and out.startswith("kpipe: 1 pipeline refused (KP1")
    for line in out.splitlines():
        parts = line.split("`")
        bare = parts[::2] if len(parts) % 2 else parts
        bare = [part for part in bare if not part.startswith("<!-- kpipe")]
        assert not [part for part in bare if "<" in part or "@" in part], line


def test_the_same_bytes_whatever_the_hash_seed(repository: Path) -> None:
    command = "import sys; from kpipe.codegen.cli import main; sys.argv[0] = 'kpipe'; main()"
    outputs = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", command, "plan", "pipelines/dsa_tp.yaml", "--against", "main"],
            cwd=repository,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_rows_are_selected(repository: Path) -> None:
    code, out = run(repository, "pipelines/dsa_tp.yaml", "--rows", "64")
    assert (code, out.partition("\n")[0].split(" against ")[0]) == (
        0,
        "kpipe: no schedule change in 1 pipeline",
    )
    code, out = run(repository, "pipelines/dsa_tp.yaml", "--rows", "4", "--arch", "sm_90a")
    assert "schedule of 1 of 2 row ranges" in out


def test_all_specs_of_the_settings(repository: Path) -> None:
    code, out = run(repository)
    assert code == 0
    assert "dsa_tp (pipelines/dsa_tp.yaml)" in out and "dsa_dcp_d2" in out


def test_json_says_everything(repository: Path) -> None:
    code, out = run(repository, "pipelines/dsa_tp.yaml", "--format", "json")
    data = json.loads(out)
    assert data["schema"] == "kpipe.review/1" and data["exit"] == {"code": 0, "reason": "fine"}
    (pipeline,) = data["pipelines"]
    (moved,) = pipeline["lists"][0]["launches"]
    assert (moved["kind"], moved["name"]) == ("moved", "mla_query")
    assert pipeline["memory"]["before"]["total"] == pipeline["memory"]["after"]["total"]


def test_findings_of_the_new_side_are_the_exit_code(repository: Path) -> None:
    edit(repository, "dsa_tp.yaml", WITH, WITHOUT)
    try:
        code, out = run(repository, "pipelines/dsa_tp.yaml", "--format", "json")
    finally:
        edit(repository, "dsa_tp.yaml", WITHOUT, WITH)
    data = json.loads(out)
    assert code == 1 and data["exit"] == {"code": 1, "reason": "findings"}
    assert {finding["code"] for finding in data["pipelines"][0]["found"]} == {"KP201"}
