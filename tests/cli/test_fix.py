"""`kpipe check --fix`: each repair on a copy of a shipped spec, and what is never touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from spec_project import PIPELINES, edit, make_project, plan_of, render, source_of

from kpipe.codegen.cli import main
from kpipe.codegen.commands.fix import apply_fixes, edited
from kpipe.codegen.diagnostics import Diagnostic, Edit, Span

DCP = "dsa_dcp.yaml"
SILENT = ("between_layers: waits", "between_layers: silent")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


def fix(*specs: str) -> Result:
    return CliRunner().invoke(main, ["check", "--fix", *specs])


def shipped(name: str) -> bytes:
    return source_of(name).read_bytes()


def test_a_dropped_join_is_put_back_and_generates_what_was_shipped(project: Path) -> None:
    before = render(plan_of(project, "dsa_dcp"))
    edit(project, DCP, "topk_local, topk_merge, join side,\n", "topk_local, topk_merge,\n")
    result = fix(f"pipelines/{DCP}")
    assert result.stderr.startswith(f"pipelines/{DCP}: fixed 1 of 1 finding\n")
    assert result.exit_code == 0
    text = (project / "pipelines" / DCP).read_text()
    assert "topk_merge,\n             join side, core, dcp_value" in text
    assert text.replace(",\n             join side, core", ", join side,\n             core") == (
        shipped(DCP).decode()
    )
    assert render(plan_of(project, "dsa_dcp")) == before


@pytest.mark.parametrize("name", PIPELINES[:2])
def test_every_shipped_join_is_put_back_where_it_was(name: str, project: Path) -> None:
    text = shipped(f"{name}.yaml").decode()
    count = text.count(", join side")
    path = project / "pipelines" / f"{name}.yaml"
    assert count > 1
    for number in range(count):
        parts = text.split(", join side")
        path.write_text(", join side".join(parts[: number + 1]) + parts[number + 1])
        if number + 1 < count:
            rest = ", join side".join(parts[number + 1 :])
            path.write_text(", join side".join(parts[: number + 1]) + rest)
        assert fix(f"pipelines/{name}.yaml").exit_code == 0
        assert path.read_text().split() == text.split()


def test_what_the_engine_does_is_not_ours_to_declare(project: Path) -> None:
    """Only the author knows whether `waits` is true: the finding says so, --fix leaves it."""
    edit(project, DCP, *SILENT)
    before = (project / "pipelines" / DCP).read_bytes()
    result = fix(f"pipelines/{DCP}")
    assert result.exit_code == 1
    assert (project / "pipelines" / DCP).read_bytes() == before


def test_misspelt_words_are_replaced_and_nothing_else(project: Path) -> None:
    path = project / "pipelines" / DCP
    text = shipped(DCP).decode().replace("\n", "\r\n")
    wrong = (
        (
            "late:\r\n      main: [packed_gemm, query_norm",
            "late:\r\n      main: [packed_gem, query_norm",
        ),
        (
            "core, dcp_value, o_proj, o_reduce]\r\n      side",
            "core, dcp_valeu, o_proj, o_reduce]\r\n      side",
        ),
        ("join side,\r\n", "join sdie,\r\n"),
    )
    broken = text
    for old, new in wrong:
        broken = broken.replace(old, new, 1)
    assert broken != text
    path.write_bytes(broken.encode())
    result = fix(f"pipelines/{DCP}")
    assert result.stderr.startswith(f"pipelines/{DCP}: fixed 3 of 4 findings\n")
    assert result.exit_code == 0, result.output
    assert path.read_bytes() == text.encode()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("sigmoid: refined", "sigmoid: refine"),
        ("geometry: kimi_k31", "geometry: kimi_k3"),
        ("mailboxes:", "mailboxs:"),
        ("options: {tie: low_id}", "options: {tie: 'lowid'}"),
        ("rearmed_by: topk_merge", "rearmed_by: topk_mrege"),
        ("rearmed_by: topk_merge", "rearmed_by: o_reduce"),
        ("fallback: {late: fork}", "fallback: {late: frok}"),
    ],
)
def test_a_wrong_word_is_corrected(right: str, wrong: str, project: Path) -> None:
    edit(project, DCP, right, wrong)
    result = fix(f"pipelines/{DCP}")
    assert (result.exit_code, result.stdout.split()[1]) == (0, "ok"), result.output
    fixed = (project / "pipelines" / DCP).read_text().replace("'low_id'", "low_id")
    assert fixed == shipped(DCP).decode()


def test_a_join_that_comes_too_late_moves(project: Path) -> None:
    edit(
        project,
        DCP,
        "topk_merge, join side,\n             core, dcp_value,",
        "topk_merge,\n             core, join side, dcp_value,",
    )
    result = fix(f"pipelines/{DCP}")
    assert result.exit_code == 0, result.output
    text = (project / "pipelines" / DCP).read_text()
    assert text.split() == shipped(DCP).decode().split()


def test_a_join_is_put_into_a_block_list(project: Path) -> None:
    main = "packed_gemm, fork side, query_norm, index_gemm, dsa_index, index_scores, topk_local, "
    ops = (main + "topk_merge, core, dcp_value, o_proj, o_reduce  # last").split(", ")
    lines = "".join(f"        - {op}\n" for op in ops)
    text = shipped(DCP).decode()
    start = text.index("      main: [packed_gemm, fork side, query_norm")
    end = text.index("      side: [mla_query, query_wait]")
    path = project / "pipelines" / DCP
    path.write_text(f"{text[:start]}      main:\n{lines}{text[end:]}")
    assert fix(f"pipelines/{DCP}").exit_code == 0
    assert "        - topk_merge\n        - join side\n        - core\n" in path.read_text()


def test_a_join_goes_where_the_whole_spec_is_clean(project: Path) -> None:
    """Nobody reads what the side stream writes; the core needs the poll that stands there."""
    main = "main: [packed_gemm, mla_query, index, index_scores, topk_local, topk_merge, "
    forked = f"side: [query_wait]\n      {main}fork side"
    edit(project, DCP, f"{main}query_wait", forked)
    result = fix(f"pipelines/{DCP}")
    assert result.stderr.startswith(f"pipelines/{DCP}: fixed 1 of 1 finding\n")
    assert (
        "fork side, join side, core, dcp_value, o_proj, o_reduce]\n"
        in (project / "pipelines" / DCP).read_text()
    )
    assert result.exit_code == 0, result.output


def test_files_outside_the_project_stay_as_they_are(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside.yaml"
    inside.mkdir()
    (inside / "kpipe.toml").touch()
    outside.write_text("word: wrong\n")
    (inside / "link.yaml").symlink_to(outside)
    (inside / "spec.yaml").write_text("word: wrong\n")
    texts, found = {}, []
    for path in (outside, inside / "link.yaml", inside / "spec.yaml"):
        span = Span(str(path), 1, 7, 1, 12)
        found.append(
            (str(inside / "spec.yaml"), Diagnostic("KP103", "x", span, fix=(Edit(span, "right"),)))
        )
        texts[str(path)] = "word: wrong\n"
    assert apply_fixes(found, texts) == (
        f"{inside / 'link.yaml'}: fixed 0 of 1 finding",
        f"{inside / 'spec.yaml'}: fixed 1 of 1 finding",
        f"{outside}: fixed 0 of 1 finding",
    )
    assert outside.read_text() == "word: wrong\n"
    assert (inside / "spec.yaml").read_text() == "word: right\n"
    assert sorted(path.name for path in inside.iterdir()) == [
        "kpipe.toml",
        "link.yaml",
        "spec.yaml",
    ]


def test_of_two_edits_that_meet_the_first_is_applied_and_a_changed_file_is_left(
    tmp_path: Path,
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("abcdef\n")
    name = str(path)

    def finding(message: str, first: int, last: int, text: str) -> tuple[str, Diagnostic]:
        span = Span(name, 1, first, 1, last)
        return name, Diagnostic("KP103", message, span, fix=(Edit(span, text),))

    found = [finding("a", 1, 3, "X"), finding("b", 2, 4, "Y"), finding("c", 5, 5, "+")]
    assert apply_fixes(found, {name: "abcdeF\n"}) == (f"{name}: fixed 0 of 3 findings",)
    assert path.read_text() == "abcdef\n"
    assert apply_fixes(found, {name: "abcdef\n"}) == (f"{name}: fixed 2 of 3 findings",)
    assert path.read_text() == "Xcd+ef\n"


def test_line_ends_and_the_byte_order_mark_are_kept() -> None:
    edits = (Edit(Span("x", 2, 1, 2, 2), "-\n"), Edit(Span("x", 1, 1, 1, 1), "+"))
    assert edited("\ufeffa\r\nb\r\n", edits) == "\ufeff+a\r\n-\r\n\r\n"


def test_a_clean_spec_is_not_written(project: Path) -> None:
    path = project / "pipelines" / DCP
    before = path.stat().st_mtime_ns, path.stat().st_ino
    result = fix(f"pipelines/{DCP}")
    assert result.exit_code == 0 and "fixed" not in result.stderr
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
