"""Tables over rows: one value, row ranges, and keys for architecture and query length above."""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_project import make_project, plan_edited, plan_of

from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.tables import Table, read_table
from kpipe.codegen.spec.document import Scalar, find, read_document
from kpipe.codegen.spec.load import Source

ROWS = {1: (1, 2, 4, 8, 64), 4: (4, 8, 64)}
ARCHS = ("sm_90a", "sm_100a")


def read(text: str) -> tuple[Table, list[str]]:
    root = read_document("x.yaml", f"t: {text}\n")
    report = Report(Source("x.yaml", root, {}))
    node = find(root, ("t",))
    assert node is not None
    table = read_table(node, "t", ARCHS, ROWS, report)
    return table, [d.message for d in sorted(report.found)]


def value(table: Table, arch: str, q: int, rows: int) -> str:
    cell = table.at(arch, q, rows)
    assert cell is not None and isinstance(cell.value, Scalar)
    return cell.value.raw


def test_one_value_holds_everywhere() -> None:
    table, found = read("a")
    assert found == []
    assert {value(table, arch, q, r) for arch in ARCHS for q in ROWS for r in ROWS[q]} == {"a"}


def test_row_ranges() -> None:
    table, found = read('{"1-4": a, "5-": b}')
    assert found == []
    assert [value(table, "sm_90a", 1, r) for r in ROWS[1]] == ["a", "a", "a", "b", "b"]


def test_row_ranges_may_stand_in_any_order() -> None:
    table, found = read('{"5-64": b, "1-4": a}')
    assert found == []
    assert [value(table, "sm_90a", 4, r) for r in ROWS[4]] == ["a", "b", "b"]


def test_keys_by_arch_and_query_length() -> None:
    text = '{sm_90a: {q1: {"1-2": a, "4-64": b}, q4: c}, sm_100a: d}'
    table, found = read(text)
    assert found == []
    assert [value(table, "sm_90a", 1, r) for r in (1, 4)] == ["a", "b"]
    assert value(table, "sm_90a", 4, 64) == "c"
    assert [value(table, "sm_100a", q, 64) for q in ROWS] == ["d", "d"]


def test_keys_by_query_length_alone() -> None:
    table, found = read('{q1: a, q4: {"4-8": b, "64": c}}')
    assert found == []
    assert [value(table, "sm_100a", 4, r) for r in ROWS[4]] == ["b", "b", "c"]


def test_a_table_without_query_keys_is_total_over_all_rows() -> None:
    _, found = read('{"4-64": a}')
    assert found == ["t: rows 1, 2 not covered"]


def test_values_come_in_file_order_and_once() -> None:
    table, _ = read('{sm_90a: {"1-8": a, "64": b}, sm_100a: {"1-64": c}}')
    assert [cell.value.raw for cell in table.values()] == ["a", "b", "c"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("{sm_90a: a}", ["`t` says nothing for `sm_100a`"]),
        (
            "{sm_90a: a, sm_100a: b, sm_120a: c}",
            ["`t` has a key `sm_120a` that nothing reads: it is not in `targets`"],
        ),
        (
            "{q1: a, q2: b, q4: c}",
            ["`t` has a key `q2` that nothing reads: it is not in `rows.queries`"],
        ),
        ('{"1-8": a, "8-64": b}', ["t: row 8 in entries `1-8` and `8-64`"]),
        (
            '{"1-64": a, "65-": b}',
            ["t: `65-` selects none of the declared rows (1, 2, 4, 8, 64)"],
        ),
        ("{}", ["t: rows 1, 2, 4, 8, 64 not covered"]),
    ],
)
def test_refusals(text: str, messages: list[str]) -> None:
    _, found = read(text)
    assert found == messages


def test_a_refused_table_answers_nothing() -> None:
    table, _ = read('{"4-64": a}')
    assert table.at("sm_90a", 1, 4) is None


@pytest.mark.parametrize(
    ("arch", "q", "rows", "mode", "core"),
    [
        ("sm_90a", 1, 4, "front", "sparse_decode"),
        ("sm_90a", 1, 5, "fork", "sparse_decode"),
        ("sm_90a", 1, 64, "fork_split", "sparse_decode"),
        ("sm_90a", 4, 8, "front", "sparse_decode"),
        ("sm_90a", 4, 16, "fork", "sparse_decode"),
        ("sm_100a", 1, 4, "late_front", "prims_ts"),
        ("sm_100a", 1, 8, "fork", "prims_ts"),
        ("sm_100a", 1, 16, "fork", "trtllm_gen"),
        ("sm_100a", 4, 4, "fork", "prims_ts"),
        ("sm_100a", 4, 64, "fork_split", "trtllm_gen"),
    ],
)
def test_the_shipped_tables(
    arch: str, q: int, rows: int, mode: str, core: str, tmp_path: Path
) -> None:
    make_project(tmp_path)
    plan = plan_of(tmp_path)
    step = next(s for s in plan.plans if (s.arch, s.q, s.rows) == (arch, q, rows))
    assert (step.mode, dict(step.cores)["core"]) == (mode, core)


def test_without_the_fused_indexer_late_modes_fall_back(tmp_path: Path) -> None:
    edit = ("features: {fused_indexer: true}", "features: {fused_indexer: false}")
    plan = plan_edited(tmp_path, "dsa_tp", edit)
    step = next(s for s in plan.plans if (s.arch, s.rows) == ("sm_100a", 4) and s.q == 1)
    assert (step.asked_mode, step.mode) == ("late_front", "front")
    assert plan.fallbacks == (("late_front", "front", "it needs fused_indexer"),)


def test_without_the_fused_indexer_a_second_table_may_hold(tmp_path: Path) -> None:
    edits = (
        ("features: {fused_indexer: true}", "features: {fused_indexer: false}"),
        ("  table:\n", '  table_unfused: {"1-32": serial, "33-64": fork_split}\n  table:\n'),
    )
    plan = plan_edited(tmp_path, "dsa_tp", *edits)
    assert {s.mode for s in plan.plans if s.rows <= 32} == {"serial"}
    assert plan.fallbacks == ()


def test_fallbacks_are_followed_to_their_end(tmp_path: Path) -> None:
    edits = (
        ("features: {fused_indexer: true}", "features: {fused_indexer: false}"),
        ("{late: fork, late_front: front}", "{late: fork, late_front: late}"),
    )
    plan = plan_edited(tmp_path, "dsa_tp", *edits)
    assert plan.fallbacks == (
        ("late_front", "late", "it needs fused_indexer"),
        ("late", "fork", "it needs fused_indexer"),
    )


def test_a_spec_with_fewer_rows_may_extend_one_with_a_finer_table(tmp_path: Path) -> None:
    """Entries that were written for more rows than are declared are no mistake of the heir's."""
    root = make_project(tmp_path)
    child = root / "pipelines" / "few.yaml"
    child.write_text('extends: dsa_dcp_d2.yaml\nname: few\nrows: {batches: "2, 8, 64"}\n')
    assert plan_of(root, "few").rows == ((1, (2, 8, 64)), (4, (8, 64)))
    table = 'overlap: {table: {sm_90a: {"1": fork, "2-64": fork}, sm_100a: fork}}\n'
    child.write_text(child.read_text() + table)
    with pytest.raises(SpecError, match="`1` selects none of the declared rows"):
        plan_of(root, "few")
