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

from kpipe.codegen.ops.contract import Contract, Phase
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
