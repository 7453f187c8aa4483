"""What library cores touch ahead of their wait: facts about libraries, not ours to change.

The table is written from what is known of the kernels, not from the contracts: prims_ts reads its
query and its row list early, trtllm_gen the per-row counts, tokenspeed nothing, and FlashMLA has no
wait at all, so everything that it touches is early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from spec_project import make_project
from type_edits import plan_with

from kpipe.codegen.ops.contract import Contract, Phase, step
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.proof.prove import prove

EARLY = {
    "prims_ts": {"query", "q_mail", "selected"},  # q_mail: the query under context parallelism
    "trtllm_gen": {"valid"},
    "tokenspeed_sparse": set(),
}
NEVER_WAITS = {"flashmla_sparse"}


def disagreeing(contracts: Mapping[str, Contract]) -> set[str]:
    """Library cores whose contract says something else than the table."""
    cores = {n: c for n, c in contracts.items() if c.lse_base and c.source != "kpipe"}
    assert set(cores) == {*EARLY, *NEVER_WAITS}, "a library core that the table does not know"
    return {
        name
        for name, core in cores.items()
        if core.waits == (name in NEVER_WAITS)
        or (name in EARLY and set(core.early_reads) != EARLY[name])
    }


def declared_away(name: str) -> dict[str, Contract]:
    core = CONTRACTS[name]
    operands = tuple(
        replace(o, phase=Phase.BODY) if o.name in core.early_reads else o for o in core.operands
    )
    return {name: replace(core, operands=operands)}


def test_contracts_state_what_is_known_of_the_libraries() -> None:
    assert disagreeing(CONTRACTS) == set()


@pytest.mark.parametrize("name", [name for name, early in EARLY.items() if early])
def test_an_early_read_that_is_declared_away_is_noticed(name: str) -> None:
    assert disagreeing({**CONTRACTS, **declared_away(name)}) == {name}


SCORER = ("index_table", "lengths")


def test_the_scorer_reads_the_steps_own_early_and_overlaps(tmp_path: Path) -> None:
    """Nothing of a layer writes them, so no predecessor has to hold its release."""
    assert set(CONTRACTS["index_scores"].early_reads) == set(SCORER)
    plan = prove(plan_with(tmp_path, "dsa_tp", {})).pipeline
    launches = [x for m in plan.methods for x in m.plan.launches if x.op == "index_scores"]
    assert launches and all(x.pdl.attribute for x in launches)


@pytest.mark.parametrize("writer", ["packed_gemm", "index_gemm"])
def test_an_early_read_of_what_an_op_writes_is_launched_plain(writer: str, tmp_path: Path) -> None:
    """An op of the layer that rewrites the lengths: where one stands, the scorer waits for it."""
    contract = CONTRACTS[writer]
    operands = (*contract.operands, step("lengths", "requests", "i32", write=True))
    changed = {writer: replace(contract, operands=operands)}
    plan = prove(plan_with(tmp_path, "dsa_tp", changed)).pipeline
    seen = set()
    for method in plan.methods:
        scorer = next(x for x in method.plan.launches if x.op == "index_scores")
        written = any(x.op == writer for x in method.plan.launches)
        seen.add(written)
        assert scorer.pdl.attribute == (not written)
        if written:
            why = "plain: reads `lengths` before its wait"
            assert scorer.pdl.attribute_reason.startswith(why)
    assert True in seen


def test_a_wait_that_a_library_does_not_have_is_noticed() -> None:
    silent = {"flashmla_sparse": replace(CONTRACTS["flashmla_sparse"], waits=True)}
    assert disagreeing({**CONTRACTS, **silent}) == {"flashmla_sparse"}


def test_what_the_table_keeps_from_happening(tmp_path: Path) -> None:
    """Nothing else would notice: the proof believes contracts, and the core would overlap."""
    plan = prove(plan_with(tmp_path, "dsa_dcp", declared_away("prims_ts"))).pipeline
    cores = [launch for s in plan.plans for launch in s.launches if launch.op == "prims_ts"]
    assert cores and any(core.pdl.attribute for core in cores)
    shipped = prove(plan_with(make_project(tmp_path / "b"), "dsa_dcp", {})).pipeline
    cores = [launch for s in shipped.plans for launch in s.launches if launch.op == "prims_ts"]
    assert cores and not any(core.pdl.attribute for core in cores)
