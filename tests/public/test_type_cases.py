"""Mistakes that others have reported in public, as edges whose two ends mean different things.

The codes suggested by the collection of cases map to ours:

    SP-LSE-BASE      KP213   D18: an LSE to base 2 merged as one to base e
    SP-EMPTY-ROW     KP214   D19: a rank that holds no key of a row
    SP-INDEX-FORMAT  KP215   D30: a list with holes where a compact prefix is counted on
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from spec_project import findings_edited, plan_edited
from type_edits import changed, findings_with

from kpipe.codegen.diagnostics import Diagnostic
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.ops.types import EmptyRow, IndexFormat, IndexSpace, Placement
from kpipe.codegen.plan.model import StepPlan

HOPPER = '{"1-64": sparse_decode}'
CORES = ("sparse_decode", "prims_ts", "trtllm_gen")
BLACKWELL = '{"1-15": prims_ts, "16-64": trtllm_gen}'


def at(found: tuple[Diagnostic, ...], mode: str) -> list[tuple[str, str]]:
    """Code and message of the findings in one mode."""
    return [(f.code, f.message) for f in found if f.message.startswith(f"mode `{mode}`")]


def told(step: StepPlan) -> str:
    """The base that the merge of a step is told; unsaid is 2."""
    merge = next(launch for launch in step.launches if launch.op == "dcp_value")
    return dict(merge.arguments).get("lse_base", "2")


def test_D18_the_merge_is_told_the_base_of_the_core_that_was_chosen(tmp_path: Path) -> None:
    """One call site, two kernel families by row count: each plan has exactly one conversion."""
    plan = plan_edited(tmp_path, "dsa_dcp")
    cores = {dict(s.cores)["core"]: told(s) for s in plan.plans}
    assert cores == {"sparse_decode": "2", "prims_ts": "e", "trtllm_gen": "2"}
    assert all(base == CONTRACTS[core].lse_base for core, base in cores.items())


def test_D18_cores_of_two_bases_cannot_feed_one_merge(tmp_path: Path) -> None:
    edit = (BLACKWELL, '{"1-64": [prims_ts, sparse_push]}')
    found = findings_edited(tmp_path, "dsa_dcp", edit)
    assert at(found, "fork") == [
        (
            "KP213",
            "mode `fork`: `sparse_push` writes `lse_mail` as an LSE to base 2, `dcp_value` takes "
            "it as an LSE to base e",
        )
    ]
    assert all(f.related[0][0] == "writer" for f in found)


@pytest.mark.parametrize("cores", ["[trtllm_gen, sparse_push]", "sparse_push", "prims_ts"])
def test_D18_control_cores_of_one_base(cores: str, tmp_path: Path) -> None:
    assert findings_edited(tmp_path, "dsa_dcp", (BLACKWELL, f'{{"1-64": {cores}}}')) == ()


def test_D19_a_pushed_row_without_keys_must_say_so(tmp_path: Path) -> None:
    """Row B of the case: an LSE left at 0 is as good as any other LSE to the merge."""
    leaves = changed("sparse_push", "lse_mail", empty=EmptyRow.UNDEFINED)
    edit = (HOPPER, '{"1-64": sparse_push}')
    assert at(findings_with(tmp_path / "a", "dsa_dcp", leaves, edit), "fork") == [
        (
            "KP214",
            "mode `fork`: `sparse_push` writes `lse_mail` with anything in rows without keys, "
            "`dcp_value` takes it with 0 and LSE -inf in rows without keys",
        )
    ]
    assert findings_with(tmp_path / "b", "dsa_dcp", {}, edit) == ()


@pytest.mark.parametrize("core", ["flashmla_sparse", "tokenspeed_sparse"])
def test_D19_undefined_rows_are_cleared_before_they_travel(core: str, tmp_path: Path) -> None:
    """These leave rows without keys undefined; dcp_value pushes 0 and the empty LSE by `valid`."""
    assert CONTRACTS[core].empty_row == "undefined"
    anywhere = replace(CONTRACTS["sparse_decode"].limits, archs=("sm_90a", "sm_100a"))
    tolerant = {"sparse_decode": replace(CONTRACTS[core], name="sparse_decode", limits=anywhere)}
    assert findings_with(tmp_path / "a", "dsa_dcp", tolerant) == ()
    assert findings_with(tmp_path / "b", "dsa_tp", tolerant) == ()


def test_D30_F_a_list_with_holes_for_a_core_that_counts(tmp_path: Path) -> None:
    """Keys of other ranks marked -1 in place, where the core reads the first `valid` entries."""
    marks = changed("topk_merge", "selected", format=IndexFormat.HOLES)
    found = findings_with(tmp_path, "dsa_dcp", marks)
    assert {f.code for f in found} == {"KP215"}
    assert {message.split("`")[7] for _, message in at(found, "fork")} == set(CORES)
    assert (
        "mode `fork`: `topk_merge` writes `selected` as a list with -1 anywhere, `trtllm_gen` "
        "takes it as a compact prefix and its length"
    ) in [f.message for f in found]


def test_D30_control_a_compact_list_for_a_core_that_skips_holes(tmp_path: Path) -> None:
    skips = changed("sparse_decode", "selected", format=IndexFormat.HOLES)
    assert findings_with(tmp_path, "dsa_dcp", skips) == ()


def test_global_ids_with_a_page_table_of_one_rank(tmp_path: Path) -> None:
    """Ids of the whole request looked up in this rank's table name other tokens' rows."""
    same = changed("topk_local", "scores", space=IndexSpace.GLOBAL)
    found = findings_with(tmp_path, "dsa_dcp", same)
    assert at(found, "wait") == [
        (
            "KP210",
            "mode `wait`: `index_scores` writes `scores` as positions within this rank's share, "
            "`topk_local` takes it as token positions of the request",
        )
    ]
    assert findings_with(tmp_path / "tp", "dsa_tp", same) == ()


def test_a_partial_result_used_as_the_whole(tmp_path: Path) -> None:
    """The o-projection's part of one rank, taken by a reduce that believes it is complete."""
    whole = changed("o_reduce", "o_mail", placement=Placement.REPLICATED)
    found = findings_with(tmp_path, "dsa_dcp", whole)
    assert at(found, "wait") == [
        (
            "KP211",
            "mode `wait`: `o_proj` writes `o_mail` as one rank's part of a result, `o_reduce` "
            "takes it as the same values on every rank",
        )
    ]
