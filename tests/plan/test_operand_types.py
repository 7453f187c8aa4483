"""The types that contracts state: complete, in step with the other promises, rightly resolved."""

from __future__ import annotations

import re
from dataclasses import replace

from kpipe.codegen.ops.contract import Contract, Kind, reads
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.ops.types import (
    ROW_LIST,
    EmptyRow,
    IndexFormat,
    IndexSpace,
    LseBase,
    Placement,
    TypePair,
    ValueType,
    resolve_type,
)
from kpipe.codegen.plan.type_repairs import CONVERSIONS, OTHERWISE


def types_of(contract: Contract) -> list[ValueType]:
    """Every type that an operand of the contract can have, by parallelism."""
    return [
        t
        for o in contract.operands
        for context_parallel in (False, True)
        if (t := resolve_type(o.type, o.name, context_parallel, 8))
    ]


def test_operand_types_agree_with_the_contract() -> None:
    bases = {"2": LseBase.TWO, "e": LseBase.E}
    rows = {"zero, -inf": EmptyRow.ZERO_NEG_INF, "undefined": EmptyRow.UNDEFINED}
    cores = [c for c in CONTRACTS.values() if c.lse_base]
    assert len(cores) == 7
    for core in cores:
        written = {t.lse for t in types_of(core)} - {LseBase.NONE}
        assert written == {bases[core.lse_base]}, core.name
        assert {t.empty for t in types_of(core)} - {EmptyRow.NONE} == {rows[core.empty_row]}
        assert core.operand("selected").type.dcp.space is IndexSpace.PHYSICAL


def test_every_tensor_between_ops_has_a_type() -> None:
    untyped = {
        f"{c.name}.{o.name}"
        for c in CONTRACTS.values()
        for o in c.operands
        if o.kind in (Kind.BUFFER, Kind.STEP) and o.access.name != "REARM" and o.type is None
    }
    assert untyped == set()


def test_only_flashmla_takes_a_list_with_holes() -> None:
    holes = replace(ROW_LIST.tp, format=IndexFormat.HOLES)
    takes = {
        name
        for name, c in CONTRACTS.items()
        if c.lse_base and c.operand("selected").type.tp.refuses(holes) == ()
    }
    assert takes == {"flashmla_sparse"}
    assert all(
        c.operand("selected").type.tp.refuses(ROW_LIST.tp) == ()
        for c in CONTRACTS.values()
        if c.lse_base
    )


def test_repairs_name_ops_that_do_what_they_say() -> None:
    texts = [*CONVERSIONS.values(), *OTHERWISE.values()]
    named = {w for text in texts for w in re.findall(r"`(\w+)`", text)} - {"valid"}
    assert named and named <= set(CONTRACTS)
    clearing = set(re.findall(r"`(\w+)`", OTHERWISE["empty"])) - {"valid", "dcp_value"}
    assert clearing == {n for n, c in CONTRACTS.items() if c.empty_row == "zero, -inf"}


def test_a_pair_follows_the_parallelism_and_a_single_rank_has_no_shares() -> None:
    pair = TypePair(ValueType(IndexSpace.GLOBAL), ValueType(IndexSpace.LOCAL, Placement.GATHERED))
    assert resolve_type(pair, "x", False, 8) == pair.tp
    assert resolve_type(pair, "x", True, 8) == pair.dcp
    assert resolve_type(pair, "x", True, 1) == pair.tp
    assert resolve_type(None, "x", True, 8) is None
    projected = CONTRACTS["packed_gemm"].operand("projected").type
    assert resolve_type(projected, "gate", False, 8).placement is Placement.HEAD_SHARDED
    assert resolve_type(projected, "q_a", False, 8) == ValueType()
    assert resolve_type(projected, "projected", False, 8) is None


def test_helpers_keep_the_type_apart_from_the_phase() -> None:
    operand = reads("x", "rows", "i32", early=True, when="dcp", type=ROW_LIST)
    assert (operand.phase.value, operand.when, operand.type) == ("prologue", "dcp", ROW_LIST)
