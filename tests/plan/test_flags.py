"""Derived flags of every shipped mode, against a table written down from the protocol.

q_c = RMSNorm(q_a) has one writer: query_norm where the mode launches it, else mla_query where
somebody reads q_c; index_front norms q_a itself unless q_c is complete when it starts.  Under
context parallelism a serial mla_query polls for the other ranks' heads; with query_wait in the
mode it only publishes.  dcp_value pushes the rows of a core that has not pushed them itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_project import plan_edited

from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.plan.model import PipelinePlan

TP_TABLE = (
    '    sm_90a:  {q1: {"1-4": front, "5-32": fork, "33-64": fork_split}, '
    'q4: {"4-8": front, "9-32": fork, "33-64": fork_split}}\n'
    '    sm_100a: {q1: {"1-4": late_front, "5-32": fork, "33-64": fork_split}, '
    'q4: {"4-32": fork, "33-64": fork_split}}\n'
)
DCP_TABLE = (
    '    sm_90a:  {q1: {"1-4": wait, "5-64": fork}, q4: {"4-64": fork}}\n'
    '    sm_100a: {q1: {"1-4": wait, "5-64": fork}, q4: {"4-64": fork}}\n'
)


def flags_at(plan: PipelinePlan, rows: int, arch: str = "sm_90a") -> dict[str, set[str]]:
    """Launch -> flags that are set; launches without any are left out."""
    step = next(s for s in plan.plans if (s.rows, s.q, s.arch) == (rows, 1, arch))
    found = {x.name: {name for name, on in x.flags if on} for x in step.launches}
    return {name: flags for name, flags in found.items() if flags}


def plan_tp(root: Path, mode: str) -> PipelinePlan:
    table = f'    "1-32": {mode}\n    "33-64": fork_split\n'
    return plan_edited(root, "dsa_tp", (TP_TABLE, table))


def plan_dcp(root: Path, mode: str, *edits: tuple[str, str]) -> PipelinePlan:
    return plan_edited(root, "dsa_dcp", (DCP_TABLE, f"    {{q1: {mode}, q4: {mode}}}\n"), *edits)


SERIAL = {"mla_query": {"writes_q_c"}, "index_front": {"normalized"}}
WRITES = {"mla_query": {"writes_q_c"}}
TENSOR_PARALLEL = {  # mode -> (flags at 2 rows, flags at 16 rows)
    "serial": (SERIAL, WRITES),
    "wait": (SERIAL, WRITES),
    "fork": ({}, {}),
    "fork_split": ({}, {}),
    "front": ({}, {}),
    "late": ({}, {}),
    "late_front": ({}, {}),
}


@pytest.mark.parametrize("mode", TENSOR_PARALLEL)
def test_tensor_parallel(mode: str, tmp_path: Path) -> None:
    if mode == "fork_split":  # its query is the split one, from 33 rows on
        plan = plan_tp(tmp_path, "fork")
        assert flags_at(plan, 64) == {}
        return
    plan = plan_tp(tmp_path, mode)
    assert (flags_at(plan, 2), flags_at(plan, 16)) == TENSOR_PARALLEL[mode]


REST = {"sparse_decode": {"dcp"}, "dcp_value": {"pushes"}, "o_proj": {"dcp"}}
FORKED = {"mla_query": {"dcp"}, **REST}
NORMALIZED = {"index_front": {"normalized"}}
SHARDED = {  # mode -> (flags at 2 rows, flags at 16 rows)
    "serial": (
        {"mla_query": {"dcp", "polls", "writes_q_c"}, **NORMALIZED, **REST},
        {"mla_query": {"dcp", "polls", "writes_q_c"}, **REST},
    ),
    "wait": (
        {"mla_query": {"dcp", "writes_q_c"}, **NORMALIZED, **REST},
        {"mla_query": {"dcp", "writes_q_c"}, **REST},
    ),
    "fork": (FORKED, FORKED),
    "front": (FORKED, FORKED),
}


@pytest.mark.parametrize("mode", SHARDED)
def test_context_parallel(mode: str, tmp_path: Path) -> None:
    plan = plan_dcp(tmp_path, mode)
    assert (flags_at(plan, 2), flags_at(plan, 16)) == SHARDED[mode]


def test_two_shot_is_the_option_of_both_ends(tmp_path: Path) -> None:
    plan = plan_dcp(tmp_path, "fork")
    at_64 = flags_at(plan, 64)
    assert at_64["o_proj"] == {"dcp", "two_shot"}
    assert at_64["o_reduce"] == {"two_shot"}
    assert "o_reduce" not in flags_at(plan, 32)


def test_a_core_that_pushes_leaves_the_merge_to_dcp_value(tmp_path: Path) -> None:
    edits = ('{"1-64": sparse_decode}', '{"1-64": sparse_push}')
    plan = plan_dcp(tmp_path, "fork", edits)
    flags = flags_at(plan, 16)
    assert "dcp_value" not in flags
    step = next(s for s in plan.plans if (s.rows, s.arch) == (16, "sm_90a"))
    value = next(launch for launch in step.launches if launch.op == "dcp_value")
    assert value.binding("partial") is None
    assert value.binding("partial_mail") is not None


def test_a_mode_that_may_not_stand_here_is_replaced(tmp_path: Path) -> None:
    plan = plan_dcp(tmp_path, "late")
    assert plan.fallbacks == (("late", "fork", "it excludes dcp"),)
    assert {(s.asked_mode, s.mode) for s in plan.plans} == {("late", "fork")}


def plan_apart(root: Path, start: str) -> PipelinePlan:
    """Modes with gate_gemm up to 8 rows; `start` is how the mode begins."""
    mode = (
        f"    apart:\n      main: [{start}, topk_select, core, join gates, value, o_proj]\n"
        "      gates: [gate_gemm]\n  fallback: {late"
    )
    table = '    "1-8": apart\n    "9-32": serial\n    "33-64": fork_split\n'
    return plan_edited(root, "dsa_tp", (TP_TABLE, table), ("  fallback: {late", mode))


@pytest.mark.parametrize(
    "start",
    [
        "packed_gemm, fork gates, mla_query, index, index_scores",
        "packed_gemm, mla_query, index, index_scores, fork gates",
    ],
)
def test_the_gate_is_left_to_whoever_makes_it(start: str, tmp_path: Path) -> None:
    """Wherever behind packed_gemm; modes without gate_gemm keep the whole product."""
    plan = plan_apart(tmp_path, start)
    assert flags_at(plan, 2) == {"packed_gemm": {"without_gate"}, **SERIAL}
    assert flags_at(plan, 16) == WRITES


def test_the_gate_is_not_made_beside_the_rest(tmp_path: Path) -> None:
    """The contract of packed_gemm says that it writes the row, so nobody may write in it then."""
    with pytest.raises(SpecError) as refused:
        plan_apart(tmp_path, "fork gates, packed_gemm, mla_query, index, index_scores")
    finding, *others = refused.value.diagnostics  # one a list of launches
    assert {other.message for other in others} <= {finding.message}
    assert finding.code == "KP303"
    assert finding.message == (
        "mode `apart`: `gate_gemm` writes `projected` before `packed_gemm` has written it"
    )


def test_q_c_follows_the_flags(tmp_path: Path) -> None:
    """Who writes and who reads q_c at 16 rows, mode by mode."""
    plan = plan_tp(tmp_path, "serial")
    step = next(s for s in plan.plans if (s.rows, s.arch) == (16, "sm_90a"))
    bound = {x.name for x in step.launches if any(b.target == "q_c" for b in x.bindings)}
    assert bound == {"mla_query", "index_gemm"}
