"""Warp roles: who of a kernel's warps waits, and what counts as early because of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from type_edits import plan_with

from kpipe.codegen.ops.contract import (
    Contract,
    Kind,
    Phase,
    Release,
    Role,
    early_roles,
    reads,
    weight,
    writes,
)
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.plan.model import Launch, PipelinePlan
from kpipe.codegen.proof.lower import lower
from kpipe.codegen.proof.prove import prove

LOAD = Role("load", False, ("x",))
MMA = Role("mma", True, ("w", "y"))


@pytest.mark.parametrize(
    ("roles", "early"),
    [
        ((), set()),
        ((MMA,), set()),
        ((LOAD, MMA), {"load"}),
        ((replace(LOAD, waits=True), MMA), set()),
        ((replace(LOAD, after="mma"), MMA), set()),
        ((LOAD, replace(MMA, waits=False, after="load")), {"load", "mma"}),
        (
            (LOAD, MMA, Role("tail", False, ("y",), "relay"), Role("relay", False, (), "mma")),
            {"load"},
        ),
    ],
)  # fmt: skip
def test_who_is_early(roles: tuple[Role, ...], early: set[str]) -> None:
    assert early_roles(roles) == early


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ((MMA, MMA), "two roles have one name"),
        ((replace(LOAD, after="mna"), MMA), "role 'load' stands behind 'mna', which is no role"),
        (
            (replace(LOAD, after="tail"), Role("tail", False, (), "load")),
            "role 'load' stands behind itself",
        ),
    ],
)
def test_roles_that_make_no_sense(roles: tuple[Role, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        early_roles(roles)


OPERANDS = (reads("x", "rows", "i32"), weight("w", "1"), writes("y", "rows", "i32"))


def contract(*roles: Role, waits: bool = True) -> Contract:
    return Contract("op", "", OPERANDS, "", roles=roles, waits=waits)


def test_an_operand_is_early_if_any_role_touches_it_early() -> None:
    shared = contract(LOAD, replace(MMA, operands=("x", "w", "y")))
    assert shared.early_reads == ("x",)
    assert {o.name: shared.phase(o) for o in OPERANDS} == {
        "x": Phase.PROLOGUE,
        "w": Phase.PROLOGUE,
        "y": Phase.BODY,
    }
    assert contract(replace(LOAD, after="mma"), MMA).early_reads == ()
    assert contract().early_reads == ()


@pytest.mark.parametrize(
    ("roles", "waits", "message"),
    [
        ((LOAD,), False, "op: roles and operands differ in w, y"),
        ((replace(LOAD, operands=("x", "z")), MMA), True, "op: roles and operands differ in z"),
        ((LOAD, MMA), False, "op does not wait, its roles say otherwise"),
        ((LOAD, replace(MMA, waits=False)), True, "op waits, its roles say otherwise"),
    ],
)
def test_roles_agree_with_the_contract(roles: tuple[Role, ...], waits: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        contract(*roles, waits=waits)


def split(op: str, *early: str, after: str = "") -> dict[str, Contract]:
    """The contract of `op` with a load role that does not wait and a second one that does."""
    known = CONTRACTS[op]
    rest = tuple(o.name for o in known.operands if o.name not in early)
    assert set(early) < {o.name for o in known.operands}
    return {op: replace(known, roles=(Role("load", False, early, after), Role("mma", True, rest)))}


def launches(plan: PipelinePlan, name: str) -> list[Launch]:
    return [x for method in plan.methods for x in method.plan.launches if x.name == name]


def test_a_role_that_does_not_wait_costs_the_attribute(tmp_path: Path) -> None:
    plan = prove(plan_with(tmp_path / "a", "dsa_tp", split("index_gemm", "q_c"))).pipeline
    found = {(x.pdl.attribute, x.pdl.attribute_reason) for x in launches(plan, "index_gemm")}
    assert found == {(False, "plain: reads `q_c` before its wait")}
    behind = split("index_gemm", "q_c", after="mma")
    plan = prove(plan_with(tmp_path / "b", "dsa_tp", behind)).pipeline
    assert {x.pdl.attribute for x in launches(plan, "index_gemm")} == {True}
    weights = split("index_gemm", "index_q_b")
    plan = prove(plan_with(tmp_path / "c", "dsa_tp", weights)).pipeline
    assert {x.pdl.attribute for x in launches(plan, "index_gemm")} == {True}


def test_roles_become_early_accesses(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, "dsa_tp", split("index_gemm", "q_c"))
    step = next(m.plan for m in plan.methods if m.plan.mode == "fork")
    node = next(
        x.node for x in lower(plan, step, captured=True).launches if x.node.name == "index_gemm"
    )
    assert {(a.buffer, a.early) for a in node.accesses} == {("q_c", True), ("index_q", False)}
    assert node.waits  # one role of every block does: what comes behind it is covered


def test_a_release_by_some_blocks_orders_as_none(tmp_path: Path) -> None:
    some = {"query_norm": replace(CONTRACTS["query_norm"], release=Release.SOME_BLOCKS)}
    plan = prove(plan_with(tmp_path, "dsa_tp", some)).pipeline
    why = "released by some blocks only, so at the last exit"
    assert {(x.pdl.release, x.pdl.release_reason) for x in launches(plan, "query_norm")} == {
        (False, why)
    }
    step = next(m.plan for m in plan.methods if m.plan.mode == "fork")
    nodes = [x.node for x in lower(plan, step, captured=False).launches]
    assert {n.trigger for n in nodes if n.name == "query_norm"} == {"never"}
    assert "early" in {getattr(n, "trigger", "") for n in nodes}


def test_shipped_contracts_have_one_role_each() -> None:
    assert all(c.roles == () for c in CONTRACTS.values())
    assert all(
        c.phase(o) is o.phase for c in CONTRACTS.values() for o in c.operands if o.kind is not None
    )
    assert {o.kind for c in CONTRACTS.values() for o in c.operands} == set(Kind)
