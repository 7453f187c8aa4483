"""What an edit of the overlap changes: the class and its schedule, never a kernel."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
from spec_project import findings_of, make_project, plan_of, render

MODES = {
    "dsa_tp": ("serial", "fork", "fork_split", "front", "wait", "late", "late_front"),
    "dsa_dcp": ("serial", "fork", "front", "wait"),
}
FIRST = {"dsa_tp": '{q1: {"1-4": front, "5-32"', "dsa_dcp": '{q1: {"1-4": wait, "5-64"'}
SCHEDULE = {"layer.py", "SCHEDULE.md"}


def without_pictures(files: dict[str, str]) -> dict[str, str]:
    """One picture a launch list comes and goes with the list."""
    return {path: text for path, text in files.items() if not path.startswith("schedule/")}


def first_entry(root: Path, name: str, mode: str) -> Path:
    """The shipped spec with another mode in the first q1 entry of sm_90a."""
    make_project(root)
    path = root / "pipelines" / f"{name}.yaml"
    old = next(line for line in path.read_text().split("\n") if FIRST[name] in line)
    assert old.strip().startswith("sm_90a:")
    word = FIRST[name].split('"1-4": ')[1].split(",")[0]
    new = old.replace(f'"1-4": {word}', f'"1-4": {mode}', 1)
    path.write_text(path.read_text().replace(old, new))
    return path


def test_the_place_of_issue_is_written_where_the_spec_has_it(tmp_path: Path) -> None:
    old = "packed_gemm, fork side, query_norm, index_gemm, dsa_index, index_scores, topk_select,"
    new = old.replace("index_gemm,", "issue side, index_gemm,")
    texts = [
        render(plan_of(make_project(tmp_path / str(i), edits)))["layer.py"]
        for i, edits in enumerate(([], [("dsa_tp.yaml", old, new)]))
    ]
    bodies = [text.split("def _fork_sparse_decode")[1].split("def ")[0] for text in texts]
    places = [[b.index(f"self.{op}(") for op in ("mla_query", "index_gemm")] for b in bodies]
    assert places[0][0] > places[0][1] and places[1][0] < places[1][1]
    assert bodies[0].index("side.wait_stream") == bodies[1].index("side.wait_stream")


def test_a_side_stream_that_forks_another_is_written_as_python(tmp_path: Path) -> None:
    """Behind the event of a fork the block of the stream begins anew."""
    old = (
        "main: [packed_gemm, fork side, index_front, index_scores, topk_select, join side, core, "
        "value, o_proj]\n      side: [mla_query]"
    )
    new = (
        "main: [packed_gemm, fork side, join side, core, value, o_proj]\n"
        "      side: [index_front, fork other, index_scores, topk_select, join other]\n"
        "      other: [mla_query]"
    )
    root = make_project(tmp_path, [("dsa_tp.yaml", old, new)])
    text = render(plan_of(root))["layer.py"]
    compile(text, "layer.py", "exec")
    body = text.split("def _front")[1].split("def ")[0]
    words = (
        "side.wait_stream(main)",
        "with self.on(side):\n            self.index_front(",
        "other.wait_stream(side)",
        "with self.on(side):\n            self.index_scores(",
        "with self.on(other):\n            self.mla_query(",
        "side.wait_stream(other)",
        "main.wait_stream(side)",
    )
    places = [body.index(word) for word in words]
    assert places == sorted(places)


@pytest.mark.parametrize("name", MODES)
def test_from_any_mode_to_any_other(name: str, tmp_path: Path) -> None:
    files: dict[str, dict[str, str]] = {}
    refused = []
    for mode in MODES[name]:
        path = first_entry(tmp_path / mode, name, mode)
        if findings_of(str(path)):
            refused.append(mode)
        else:
            files[mode] = without_pictures(render(plan_of(tmp_path / mode, name)))
    assert refused == []
    for one, other in permutations(files, 2):
        before, after = files[one], files[other]
        assert before.keys() == after.keys()
        changed = {path for path in before if before[path] != after[path]}
        assert changed <= SCHEDULE, (one, other)
        if (name, {one, other}) != ("dsa_tp", {"serial", "wait"}):
            assert changed == SCHEDULE, (one, other)


def test_the_query_stream_may_be_forked_behind_the_norm(tmp_path: Path) -> None:
    """fork and fork_split launch the same ops at few rows, in another order: both change."""
    before = first_entry(tmp_path / "a", "dsa_tp", "fork")
    after = first_entry(tmp_path / "b", "dsa_tp", "fork_split")
    assert before.read_text() != after.read_text()
    texts = [render(plan_of(tmp_path / folder))["layer.py"] for folder in "ab"]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("name", MODES)
def test_a_new_mode_changes_no_file_until_the_table_names_it(name: str, tmp_path: Path) -> None:
    before = render(plan_of(make_project(tmp_path), name))
    path = tmp_path / "pipelines" / f"{name}.yaml"
    text = path.read_text()
    serial = next(line for line in text.split("\n") if line.startswith("      main:"))
    text = text.replace("  fallback:", f"    mine:\n{serial}\n  fallback:", 1)
    path.write_text(text)
    declared = render(plan_of(tmp_path, name))
    changed = {file for file in before if before[file] != declared[file]}
    assert changed <= SCHEDULE  # line numbers of the spec in comments
    assert before.keys() == declared.keys()


@pytest.mark.parametrize("name", MODES)
def test_a_new_mode_with_a_new_op_adds_its_op_and_changes_no_kernel(
    name: str, tmp_path: Path
) -> None:
    root = make_project(tmp_path)
    before = render(plan_of(root, name))
    path = root / "pipelines" / f"{name}.yaml"
    text = path.read_text()
    query = next(line for line in text.split("\n") if "query_norm, mla_query" in line)
    text = text.replace(query, query.replace("mla_query", "mla_query, mla_query_split", 1), 1)
    wait = next(line for line in text.split("\n") if line.startswith("      main:"))
    mode = wait.replace("mla_query,", "query_norm, mla_query_split,")
    text = text.replace("  fallback:", f"    mine:\n{mode}\n  fallback:", 1)
    path.write_text(text)
    after = render(plan_of(root, name))
    kernels = [{file for file in of if file.startswith("kernels/")} for of in (before, after)]
    assert kernels[1] - kernels[0] <= {"kernels/mla_query_split.py"}
    assert kernels[0] <= kernels[1]
    for file in before:
        if file.startswith("kernels/") or file == "memory.py":
            assert before[file] == after[file], file


@pytest.mark.parametrize("name", MODES)
def test_a_table_of_one_mode_keeps_every_kernel(name: str, tmp_path: Path) -> None:
    """Even where no step launches an op any more: its mode is still declared."""
    rest = "fork_split" if name == "dsa_tp" else "fork"
    root = make_project(tmp_path)
    path = root / "pipelines" / f"{name}.yaml"
    head, _, _ = path.read_text().partition("  table:\n")
    rendered = []
    for mode in MODES[name]:
        if mode == "fork_split":
            continue
        path.write_text(f'{head}  table: {{"1-32": {mode}, "33-64": {rest}}}\n')
        files = without_pictures(render(plan_of(root, name)))
        rendered.append({file: text for file, text in files.items() if file not in SCHEDULE})
    assert all(files == rendered[0] for files in rendered)
