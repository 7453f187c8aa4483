"""Ops against their limits, above all the head rows of a sparse core."""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_project import SHIPPED, findings_edited, make_project, plan_of

from kpipe.codegen.diagnostics import Span
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.plan.limits import head_rows
from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.document import read_document
from kpipe.codegen.spec.load import Source

PLACE = Span("x.yaml", 1, 1, 1, 2)


def heads_of(op: str, heads: int, tp: int = 1, context_parallel: bool = False) -> int | str:
    """Head rows of a launch, or the refusal."""
    report = Report(Source("x.yaml", read_document("x.yaml", "a: 1"), {}))
    rows = head_rows(CONTRACTS[op], {"heads": heads, "tp": tp}, context_parallel, PLACE, report)
    return report.found[0].message if report.found else rows


def refused(op: str, ranges: str, heads: int) -> str:
    return f"`{op}` takes {ranges} head rows; this layer has {heads}"


@pytest.mark.parametrize(
    ("heads", "tiles"),
    [(4, 4), (12, 12), (64, 64), (65, 128), (80, 128), (96, 128), (127, 128), (128, 128)],
)
def test_library_cores_take_up_to_64_or_are_padded_to_128(heads: int, tiles: int) -> None:
    assert heads_of("trtllm_gen", heads) == tiles
    assert heads_of("prims_ts", heads) == tiles


@pytest.mark.parametrize("heads", [129, 192])
def test_more_head_rows_than_a_core_has_are_refused(heads: int) -> None:
    assert heads_of("trtllm_gen", heads) == refused("trtllm_gen", "1-64, 128", heads)
    assert heads_of("sparse_decode", heads) == refused("sparse_decode", "1-128", heads)
    assert heads_of("flashmla_sparse", heads) == refused("flashmla_sparse", "64, 128", heads)


@pytest.mark.parametrize(("heads", "tiles"), [(12, 64), (64, 64), (65, 128), (96, 128)])
def test_flashmla_is_padded_to_64_or_128(heads: int, tiles: int) -> None:
    assert heads_of("flashmla_sparse", heads) == tiles


@pytest.mark.parametrize("heads", [1, 12, 65, 96, 128])
def test_our_core_needs_no_padding(heads: int) -> None:
    assert heads_of("sparse_decode", heads) == heads


def test_context_parallel_cores_run_every_ranks_heads() -> None:
    assert heads_of("sparse_decode", 12, tp=8, context_parallel=True) == 96
    assert heads_of("trtllm_gen", 12, tp=8, context_parallel=True) == 128


def test_ops_without_heads_have_no_head_rows() -> None:
    assert heads_of("o_proj", 12) == 0


def test_shipped_plans_state_their_head_rows(tmp_path: Path) -> None:
    make_project(tmp_path)
    assert {s.head_rows for s in plan_of(tmp_path, "dsa_tp").plans} == {12}
    found = {(s.arch, s.head_rows) for s in plan_of(tmp_path, "dsa_dcp").plans}
    assert found == {("sm_90a", 96), ("sm_100a", 128)}


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "dsa_tp",
            '{"1-64": sparse_decode}',
            '{"1-64": tokenspeed_sparse}',
            "`tokenspeed_sparse` does not run on sm_90a",
        ),
        (
            "dsa_tp",
            "{format: fp8_tensor, page: 64}",
            "{format: nvfp4_ds_mla, page: 64}",
            "`mla_query` cannot use cache format nvfp4_ds_mla of `latent_kv`",
        ),
        (
            "dsa_dcp",
            '{q1: {"1-4": wait, "5-64": fork}, q4: {"4-64": fork}}\n    sm_100a',
            '{q1: {"1-4": late, "5-64": fork}, q4: {"4-64": fork}}\n    sm_100a',
            "",
        ),
    ],
)
def test_refusals(name: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    found = findings_edited(tmp_path, name, (old, new))
    assert [f.message for f in found[:1]] == ([message] if message else [])
    assert all(f.code == "KP104" for f in found)


def test_pages_of_a_core(tmp_path: Path) -> None:
    cores = '{"1-64": sparse_decode}, sm_100a: {"1-15": prims_ts, "16-64": trtllm_gen}}'
    query = "query:    {shape: [rows, heads, latent], dtype: "
    text = (SHIPPED / "dsa_tp.yaml").read_text()
    blackwell = next(line for line in text.split("\n") if line.startswith("    sm_100a: {q1:"))
    edits = (
        ("{format: fp8_tensor, page: 64}", "{format: fp8_ds_mla, page: 128}"),
        (f"{query}fp8}}", f"{query}bf16}}"),
        ("targets: [sm_90a, sm_100a]", "targets: [sm_90a]"),
        (cores, "flashmla_sparse}"),
        (', sm_100a: {"1-32": mla_value, "33-64": [value_bmm, mla_gate]}', ""),
        ("  values:   {shape: [heads, rows, v_dim], dtype: bf16}\n", ""),
        (blackwell, ""),
    )
    (found,) = findings_edited(tmp_path, "dsa_tp", *edits)
    assert found.message == "`flashmla_sparse` cannot use pages of 128 tokens of `latent_kv`"
    assert found.allowed == ("64",)
