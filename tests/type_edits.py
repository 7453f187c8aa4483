"""Plans with contracts that mean something else: what no shipped op writes, a test op may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from spec_project import make_project

from kpipe.codegen.diagnostics import Diagnostic, SpecError
from kpipe.codegen.ops.contract import Contract
from kpipe.codegen.ops.contract import Path as AccessPath
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.ops.types import OperandType, TypePair, ValueType
from kpipe.codegen.plan.api import resolve_spec
from kpipe.codegen.plan.build import build_plan
from kpipe.codegen.plan.model import PipelinePlan
from kpipe.codegen.plan.report import Report


def retyped(op: str, **types: OperandType | None) -> dict[str, Contract]:
    """The contract of `op` with other types of the named operands."""
    contract = CONTRACTS[op]
    assert set(types) <= {o.name for o in contract.operands}
    operands = tuple(
        replace(o, type=types[o.name]) if o.name in types else o for o in contract.operands
    )
    return {op: replace(contract, operands=operands)}


def changed(op: str, operand: str, **fields: object) -> dict[str, Contract]:
    """The contract of `op` with some fields of one operand's type replaced."""
    found = CONTRACTS[op].operand(operand)
    assert found is not None
    known = found.type
    if isinstance(known, TypePair):
        return retyped(
            op, **{operand: TypePair(replace(known.tp, **fields), replace(known.dcp, **fields))}
        )
    assert isinstance(known, ValueType)
    return retyped(op, **{operand: replace(known, **fields)})


def by_tma(op: str, *operands: str, path: AccessPath = AccessPath.ASYNC) -> dict[str, Contract]:
    """The contract of `op`, reading these operands by TMA, or by `path`."""
    contract = CONTRACTS[op]
    assert set(operands) <= {o.name for o in contract.operands}
    changed = tuple(replace(o, path=path) if o.name in operands else o for o in contract.operands)
    return {op: replace(contract, operands=changed)}


def plan_with(
    root: Path, name: str, contracts: Mapping[str, Contract], *edits: tuple[str, str]
) -> PipelinePlan:
    """The plan of a shipped spec after edits to its file, with these contracts instead."""
    make_project(root, [(f"{name}.yaml", old, new) for old, new in edits])
    resolved = resolve_spec(str(root / "pipelines" / f"{name}.yaml"), {})
    resolved = replace(resolved, contracts={**resolved.contracts, **contracts})
    return build_plan(resolved, Report(resolved.source))


def findings_with(
    root: Path, name: str, contracts: Mapping[str, Contract], *edits: tuple[str, str]
) -> tuple[Diagnostic, ...]:
    """What is wrong with such a plan; empty where it plans."""
    try:
        plan_with(root, name, contracts, *edits)
    except SpecError as error:
        return error.diagnostics
    return ()
