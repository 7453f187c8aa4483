"""What a value means: every kind of mismatch is refused by name, and nothing else is."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from spec_project import PIPELINES, SHIPPED, findings_edited, make_project, plan_of
from type_edits import changed, findings_with, plan_with, retyped

from kpipe.codegen.diagnostics import Diagnostic, SpecError
from kpipe.codegen.ops.contract import Contract, step
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.ops.types import (
    EmptyRow,
    IndexFormat,
    IndexSpace,
    LseBase,
    Placement,
    ValueType,
)
from kpipe.codegen.plan.api import resolve_spec
from kpipe.codegen.plan.build import build_plan
from kpipe.codegen.plan.report import Report

CORES = '{"1-15": prims_ts, "16-64": trtllm_gen}'
HOPPER = '{"1-64": sparse_decode}'


def said(found: tuple[Diagnostic, ...], mode: str) -> list[tuple[str, str, str]]:
    """Code, message and help of the findings in one mode."""
    prefix = f"mode `{mode}`: "
    return [
        (f.code, f.message.removeprefix(prefix), f.help)
        for f in found
        if f.message.startswith(prefix)
    ]


def test_a_replicated_column_is_not_this_ranks_gate(tmp_path: Path) -> None:
    """Both are BF16 of 1536 columns: q_lora, and 12 heads of 128."""
    edit = ("    ops: [value]\n", "    ops: [value]\n    with: {gate: q_a}\n")
    found = findings_edited(tmp_path, "dsa_tp", edit)
    assert {f.code for f in found} == {"KP211"}
    assert said(found, "front") == [
        (
            "KP211",
            "`packed_gemm` writes `q_a` as the same values on every rank, `mla_value` takes it "
            "as this rank's heads",
            "nothing converts these; bind `mla_value` to a tensor that holds this rank's heads",
        )
    ]
    (related,) = {f.related[0][0] for f in found}
    assert related == "writer"


def test_this_ranks_gate_is_not_a_replicated_column(tmp_path: Path) -> None:
    ops = "    ops: [query_norm, mla_query]\n"
    edit = (ops, f"{ops}    with: {{q_a: gate}}\n")
    found = findings_edited(tmp_path, "dsa_tp", edit)
    assert {f.code for f in found} == {"KP211"}
    assert said(found, "front") == [
        (
            "KP211",
            "`packed_gemm` writes `gate` as this rank's heads, `mla_query` takes it as the same "
            "values on every rank",
            "gather the heads first: publish them to a mailbox of every rank, as `mla_query` does "
            "under context parallelism",
        )
    ]


TO_ROWS = (
    "put `topk_select` (under context parallelism `topk_local` and `topk_merge`) between the two: "
    "it maps positions to physical cache rows"
)
COMPACT = (
    "let `topk_select` (under context parallelism `topk_merge`) write the list, or choose a core "
    "that skips -1 anywhere (`flashmla_sparse`)"
)


@pytest.mark.parametrize(
    ("name", "contracts", "mode", "code", "message", "help"),
    [
        (
            "dsa_dcp",
            changed("topk_merge", "selected", space=IndexSpace.LOCAL),
            "wait",
            "KP210",
            "`topk_merge` writes `selected` as positions within this rank's share, "
            "`sparse_decode` takes it as physical cache rows",
            TO_ROWS,
        ),
        (
            "dsa_tp",
            changed("topk_select", "selected", space=IndexSpace.GLOBAL),
            "front",
            "KP210",
            "`topk_select` writes `selected` as token positions of the request, `sparse_decode` "
            "takes it as physical cache rows",
            TO_ROWS,
        ),
        (
            "dsa_dcp",
            changed("topk_local", "candidates", space=IndexSpace.LOCAL),
            "fork",
            "KP210",
            "`topk_local` writes `candidates` as positions within this rank's share, `topk_merge` "
            "takes it as token positions of the request",
            "put `topk_local` between the two: it turns positions of this rank's share into token "
            "positions",
        ),
        (
            "dsa_dcp",
            changed("topk_local", "candidates", space=IndexSpace.PHYSICAL),
            "fork",
            "KP210",
            "`topk_local` writes `candidates` as physical cache rows, `topk_merge` takes it as "
            "token positions of the request",
            "nothing converts these; bind `topk_merge` to a tensor of token positions of the "
            "request",
        ),
        (
            "dsa_dcp",
            changed("index_scores", "scores", placement=Placement.REPLICATED),
            "fork",
            "KP211",
            "`index_scores` writes `scores` as the same values on every rank, `topk_local` takes "
            "it as this rank's share of the context",
            "nothing converts these; bind `topk_local` to a tensor that holds this rank's share "
            "of the context",
        ),
        (
            "dsa_dcp",
            changed("dcp_value", "partial", placement=Placement.HEAD_SHARDED),
            "wait",
            "KP211",
            "`sparse_decode` writes `partial` as all heads over this rank's share of the context, "
            "`dcp_value` takes it as this rank's heads",
            "put `dcp_value` between the two: it sends every head to its owner and merges the "
            "shares",
        ),
        (
            "dsa_tp",
            changed("topk_select", "selected", format=IndexFormat.HOLES),
            "front",
            "KP215",
            "`topk_select` writes `selected` as a list with -1 anywhere, `sparse_decode` takes it "
            "as a compact prefix and its length",
            COMPACT,
        ),
    ],
)
def test_an_op_that_means_something_else(
    name: str,
    contracts: dict[str, Contract],
    mode: str,
    code: str,
    message: str,
    help: str,
    tmp_path: Path,
) -> None:
    found = findings_with(tmp_path, name, contracts)
    assert {f.code for f in found} == {code}
    assert (code, message, help) in said(found, mode)


def test_a_step_tensor_means_the_same_to_all_its_readers(tmp_path: Path) -> None:
    found = findings_with(
        tmp_path, "dsa_dcp", changed("dcp_value", "lengths", space=IndexSpace.LOCAL)
    )
    assert said(found, "wait") == [
        (
            "KP210",
            "`index_scores` reads `lengths` as token positions of the request, `dcp_value` takes "
            "it as positions within this rank's share",
            "put an op between the two that keeps the tokens of this rank and renumbers them, as "
            "`topk_merge` does",
        )
    ]
    assert found[0].related[0][0] == "other reader"


RESIDUAL = Contract(
    "residual",
    "Adds the layer's output to the residual stream.",
    (step("out", "rows, hidden", "bf16", type=ValueType()),),
    "",
)
READS_OUT = (
    ("parallel: {tp: 8}\n", "parallel: {tp: 8}\ndraft: {missing: [residual]}\n"),
    ("  o_proj: {ops: [o_proj]}", "  o_proj: {ops: [o_proj, residual]}"),
    (
        "    front:\n      main: [packed_gemm, fork side, index_front, index_scores, topk_select, "
        "join side, core, value, o_proj]",
        "    front:\n      main: [packed_gemm, fork side, index_front, index_scores, topk_select, "
        "join side, core, value, o_proj, residual]",
    ),
)


def test_the_output_of_a_tensor_parallel_layer_is_a_part_of_a_sum(tmp_path: Path) -> None:
    found = findings_with(tmp_path, "dsa_tp", {"residual": RESIDUAL}, *READS_OUT)
    assert [(f.code, f.message, f.help) for f in found] == [
        (
            "KP211",
            "mode `front`: `o_proj` writes `out` as one rank's part of a result, `residual` takes "
            "it as the same values on every rank",
            "put `o_reduce` between the two: it adds up the parts of all ranks; without context "
            "parallelism the engine does so behind the layer",
        )
    ]


def test_one_rank_has_the_whole_sum(tmp_path: Path) -> None:
    edits = [(old, new.replace("tp: 8", "tp: 1")) for old, new in READS_OUT]
    plan = plan_with(tmp_path, "dsa_tp", {"residual": RESIDUAL}, *edits)
    assert any(launch.op == "residual" for s in plan.plans for launch in s.launches)


def test_what_the_mode_does_not_write_counts_for_nothing(tmp_path: Path) -> None:
    """Under context parallelism o_proj publishes its part and o_reduce alone writes the output."""
    edits = (
        ("environment:", "draft: {missing: [residual]}\nenvironment:"),
        ("    ops: [o_proj, o_reduce]", "    ops: [o_proj, o_reduce, residual]"),
        (
            "query_wait, core, dcp_value, o_proj, o_reduce]",
            "query_wait, core, dcp_value, o_proj, o_reduce, residual]",
        ),
    )
    plan = plan_with(tmp_path, "dsa_dcp", {"residual": RESIDUAL}, *edits)
    assert any(launch.op == "residual" for s in plan.plans for launch in s.launches)


def test_cores_of_two_bases_in_one_plan(tmp_path: Path) -> None:
    """The core that pushes writes base 2; the other one makes the planner tell base e."""
    found = findings_edited(tmp_path, "dsa_dcp", (CORES, '{"1-64": [prims_ts, sparse_push]}'))
    assert {f.code for f in found} == {"KP213"}
    assert said(found, "wait") == [
        (
            "KP213",
            "`sparse_push` writes `lse_mail` as an LSE to base 2, `dcp_value` takes it as an LSE "
            "to base e",
            "choose cores of one base, since a merge is told a single one: `prims_ts` writes base "
            "e and `sparse_push` writes base 2",
        )
    ]


def test_two_cores_that_feed_one_mailbox(tmp_path: Path) -> None:
    e = changed("sparse_push", "lse_mail", lse=LseBase.E)["sparse_push"]
    other = {"sparse_push_e": replace(e, name="sparse_push_e", lse_base="e")}
    edits = (
        ("environment:", "draft: {missing: [sparse_push_e]}\nenvironment:"),
        (HOPPER, '{"1-64": [sparse_push, sparse_push_e]}'),
    )
    found = findings_with(tmp_path, "dsa_dcp", other, *edits)
    assert {f.code for f in found} == {"KP213"}
    ((_, message, _),) = said(found, "wait")
    assert message == (
        "`sparse_push` writes `lse_mail` as an LSE to base 2, `dcp_value` takes it as an LSE to "
        "base e"
    )


def test_a_merge_that_is_not_told_the_base(tmp_path: Path) -> None:
    merge = changed("dcp_value", "partial_lse", lse=LseBase.TWO)["dcp_value"]
    constants = tuple(c for c in merge.constants if c != "lse_base")
    found = findings_with(tmp_path, "dsa_dcp", {"dcp_value": replace(merge, constants=constants)})
    assert said(found, "wait") == [
        (
            "KP213",
            "`prims_ts` writes `partial_lse` as an LSE to base e, `dcp_value` takes it as an LSE "
            "to base 2",
            "`dcp_value` knows base 2 only and `prims_ts` writes base e: choose a core of base 2, "
            "or a merge that is told the base (`dcp_value`)",
        )
    ]


def test_a_core_that_pushes_rows_without_keys_as_they_are(tmp_path: Path) -> None:
    """In the mailbox nobody can tell any more; so both the row and its LSE are refused."""
    rows = changed("sparse_push", "partial_mail", empty=EmptyRow.UNDEFINED)
    found = findings_with(tmp_path, "dsa_dcp", rows, (HOPPER, '{"1-64": sparse_push}'))
    assert said(found, "wait") == [
        (
            "KP214",
            "`sparse_push` writes `partial_mail` with anything in rows without keys, `dcp_value` "
            "takes it with 0 and LSE -inf in rows without keys",
            "choose a core that clears rows without keys (`sparse_decode`, "
            "`sparse_decode_wide`, `sparse_push`, `trtllm_gen`, `prims_ts`), or a core that leaves "
            "the push to `dcp_value`, which clears them by `valid`",
        )
    ]
    lse = changed("sparse_push", "lse_mail", empty=EmptyRow.UNDEFINED)
    found = findings_with(tmp_path, "dsa_dcp", lse, (HOPPER, '{"1-64": sparse_push}'))
    assert [code for code, _, _ in said(found, "wait")] == ["KP214"]


def undefined(op: str, *operands: str) -> dict[str, Contract]:
    """`op` with undefined rows without keys in these operands."""
    contract = CONTRACTS[op]
    types = {o.name: o.type for o in contract.operands}
    return retyped(op, **{o: replace(types[o], empty=EmptyRow.UNDEFINED) for o in operands})


def test_what_is_fixed_up_behind_the_read_may_be_undefined(tmp_path: Path) -> None:
    """dcp_value clears by `valid` what it pushes itself, mla_value and mla_gate by `lengths`."""
    contracts = {
        **undefined("sparse_decode", "partial", "partial_lse", "latent"),
        **undefined("prims_ts", "partial", "partial_lse", "latent"),
    }
    assert findings_with(tmp_path / "dcp", "dsa_dcp", contracts) == ()
    assert findings_with(tmp_path / "tp", "dsa_tp", contracts) == ()


def test_a_merge_that_needs_cleared_rows_refuses_undefined_ones(tmp_path: Path) -> None:
    strict = changed("dcp_value", "partial", empty=EmptyRow.ZERO_NEG_INF)
    assert findings_with(tmp_path / "a", "dsa_dcp", strict) == ()
    both = {**strict, **undefined("trtllm_gen", "partial")}
    found = findings_with(tmp_path / "b", "dsa_dcp", both)
    assert {(f.code, f.message) for f in found} == {
        (
            "KP214",
            "mode `fork`: `trtllm_gen` writes `partial` with anything in rows without keys, "
            "`dcp_value` takes it with 0 and LSE -inf in rows without keys",
        )
    }


def test_what_the_mode_does_not_read_is_not_checked(tmp_path: Path) -> None:
    """Behind a core that pushes, dcp_value leaves `partial` alone."""
    strict = changed("dcp_value", "partial", empty=EmptyRow.ZERO_NEG_INF)
    both = {**strict, **undefined("trtllm_gen", "partial")}
    edit = (CORES, '{"1-64": [trtllm_gen, sparse_push]}')
    assert findings_with(tmp_path, "dsa_dcp", both, edit) == ()


def test_operands_without_a_type_are_not_checked(tmp_path: Path) -> None:
    wrong = changed("topk_select", "selected", space=IndexSpace.LOCAL)
    assert {f.code for f in findings_with(tmp_path / "a", "dsa_tp", wrong)} == {"KP210"}
    readers = {
        op: retyped(op, selected=None)[op] for op in ("sparse_decode", "prims_ts", "trtllm_gen")
    }
    assert findings_with(tmp_path / "b", "dsa_tp", {**wrong, **readers}) == ()
    untyped = retyped("topk_select", selected=None)
    assert findings_with(tmp_path / "c", "dsa_tp", untyped) == ()


@pytest.mark.parametrize("name", PIPELINES)
def test_shipped_pipelines_agree(name: str, tmp_path: Path) -> None:
    make_project(tmp_path)
    assert plan_of(tmp_path, name).plans


@pytest.mark.parametrize("path", sorted((SHIPPED / "drafts").glob("*.yaml")), ids=lambda p: p.stem)
def test_drafts_agree_as_far_as_their_ops_exist(path: Path) -> None:
    """Ops without a contract stand in as ops that touch nothing; what they would write is missing,
    which is found, but no two ops that exist mean different things."""
    resolved = resolve_spec(str(path), {})
    absent = {op: Contract(op, "", (), "") for op in resolved.missing}
    report = Report(resolved.source)
    complete = replace(resolved, contracts={**resolved.contracts, **absent})
    with contextlib.suppress(SpecError):
        build_plan(complete, report)
    assert {f.code for f in report.found} & {"KP210", "KP211", "KP213", "KP214", "KP215"} == set()
