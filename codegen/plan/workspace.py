"""Private workspaces of ops: bytes that prepare() must set aside before a graph is captured."""

from __future__ import annotations

from dataclasses import dataclass

from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.spec.expressions import evaluate, parse


@dataclass(frozen=True)
class Workspace:
    """One workspace of one launch; `zero_once` means cleared once and self-resetting."""

    op: str
    name: str
    bytes: int
    zero_once: bool


def workspaces(plan: PipelinePlan, step: StepPlan) -> tuple[Workspace, ...]:
    """Workspaces of a step's launches.  Without a tactic `splits` counts as 1."""
    found = []
    for launch in step.launches:
        names = {
            **plan.dims,
            "rows": step.rows,
            "rows_cap": plan.rows_cap,
            "core_heads": step.head_rows,
            "splits": dict(launch.tactic).get("splits", 1),
        }
        for scratch in launch.contract.scratch:
            size = evaluate(parse(scratch.bytes), names)
            found.append(Workspace(launch.name, scratch.name, size, scratch.zero_once))
    return tuple(found)
