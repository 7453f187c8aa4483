"""A plan for tools: the same content as `describe_text`, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kpipe.codegen.plan.describe import select_plans, table_rows
from kpipe.codegen.plan.describe_wire import wire_json
from kpipe.codegen.plan.model import Fork, Item, Launch, PipelinePlan, StepPlan, TensorPlan
from kpipe.codegen.plan.workspace import workspaces

if TYPE_CHECKING:
    from kpipe.codegen.plan.wire_report import WireReport

SCHEMA = "kpipe.plan/1"


def describe_json(
    plan: PipelinePlan,
    rows: int | None = None,
    q: int | None = None,
    arch: str | None = None,
    wire: WireReport | None = None,
) -> str:
    """The plan as JSON, with the launches of the selected steps; `wire` is null without ranks that
    exchange words.

    Raises SpecError KP808 as `select_plans`.
    """
    names = {method.plan.identity: method.name for method in plan.methods}
    payload = {
        "schema": SCHEMA,
        "pipeline": plan.name,
        "doc": plan.doc,
        "spec": plan.path,
        "geometry": plan.geometry,
        "status": plan.status,
        "parallel": dict(plan.parallel),
        "targets": list(plan.targets),
        "rows": {f"q{query}": list(counts) for query, counts in plan.rows},
        "rows_cap": plan.rows_cap,
        "environment": dict(plan.environment),
        "numerics": dict(plan.numerics),
        "scalars": dict(plan.scalars),
        "dims": dict(plan.dims),
        "streams": [{"name": name, "priority": priority} for name, priority in plan.streams],
        "modes": list(plan.modes),
        "fallbacks": [
            {"mode": mode, "replacement": other, "reason": reason}
            for mode, other, reason in plan.fallbacks
        ],
        "table": [_entry(*entry) for entry in table_rows(plan)],
        **_memory(plan),
        "ops": [
            {"name": op.name, "source": op.source, "kernel": plan.kernel(op) or None, "doc": op.doc}
            for op in plan.ops
        ],
        "wire": wire_json(wire) if wire else None,
        "steps": [
            _step(plan, step, names[step.identity]) for step in select_plans(plan, rows, q, arch)
        ],
    }
    return json.dumps(payload, indent=2) + "\n"


def _entry(step: StepPlan, method: str, counts: tuple[int, ...]) -> dict[str, Any]:
    return {
        "arch": step.arch,
        "q": step.q,
        "rows": list(counts),
        "asked_mode": step.asked_mode,
        "mode": step.mode,
        "method": method,
        "variants": dict(step.cores),
        "head_rows": step.head_rows,
    }


def _memory(plan: PipelinePlan) -> dict[str, Any]:
    return {
        "buffers": [
            {
                "name": buffer.name,
                "shape": list(buffer.shape),
                "dtype": buffer.dtype,
                "scope": buffer.scope,
                "zeroed": buffer.zeroed,
                "bytes": buffer.bytes,
                "columns": [
                    {"name": name, "offset": offset, "width": width}
                    for name, offset, width in buffer.columns
                ],
            }
            for buffer in plan.buffers
        ],
        "mailboxes": [
            {
                "name": box.name,
                "shape": list(box.shape),
                "dtype": box.dtype,
                "sentinel": box.sentinel,
                "parities": box.parities,
                "rearmed_by": box.rearmed_by,
                "bytes": box.bytes,
            }
            for box in plan.mailboxes
        ],
        "caches": [asdict(cache) for cache in plan.caches],
        "weights": [_tensor(tensor) for tensor in plan.weights],
        "step_inputs": [_tensor(tensor) for tensor in plan.step],
    }


def _tensor(tensor: TensorPlan) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "written": tensor.written,
    }


def _step(plan: PipelinePlan, step: StepPlan, method: str) -> dict[str, Any]:
    return {
        "arch": step.arch,
        "q": step.q,
        "rows": step.rows,
        "mode": step.mode,
        "method": method,
        "head_rows": step.head_rows,
        "workspaces": [asdict(workspace) for workspace in workspaces(plan, step)],
        "items": [_item(item) for item in step.items],
    }


def _item(item: Item) -> dict[str, Any]:
    place = {"path": item.span.path, "line": item.span.line}
    if not isinstance(item, Launch):
        fork = isinstance(item, Fork)
        return {
            "kind": "fork" if fork else "join",
            "stream": item.stream,
            "other": item.origin if isinstance(item, Fork) else item.target,
            "place": place,
        }
    return {
        "kind": "launch",
        "index": item.index,
        "op": item.op,
        "name": item.name,
        "stage": item.stage,
        "stream": item.stream,
        "bindings": {binding.operand: binding.target for binding in item.bindings},
        "flags": dict(item.flags),
        "options": dict(item.options),
        "tactic": dict(item.tactic),
        "pdl": {
            "attribute": item.pdl.attribute,
            "attribute_reason": item.pdl.attribute_reason,
            "release": item.pdl.release,
            "release_reason": item.pdl.release_reason,
        },
        "place": place,
    }
