"""SCHEDULE.md and its pictures: the schedule for a reader of the pull request."""

from __future__ import annotations

from typing import Any

from kpipe.codegen.plan.model import Launch, Method, PipelinePlan
from kpipe.codegen.render.context import table_lines, uses_text
from kpipe.codegen.render.timeline import timeline
from kpipe.codegen.review.timed_schedule import timed_schedule
from kpipe.codegen.review.timeline_picture import timeline_svg


def schedule_context(plan: PipelinePlan) -> dict[str, Any]:
    """Context of schedule.md.jinja."""
    return {
        "table": table_lines(plan),
        "fallbacks": plan.fallbacks,
        "methods": [_method(method) for method in plan.methods],
        "missing": plan.missing_kernels,
        "libraries": [op.name for op in plan.ops if op.source != "kpipe"],
        "environment": dict(plan.environment),
    }


def picture_path(method: Method) -> str:
    """Where a launch list's picture lies below the generated folder, e.g. schedule/fork.svg."""
    return f"schedule/{method.name.removeprefix('_')}.svg"


def picture(plan: PipelinePlan, method: Method) -> str:
    """A launch list in time, with estimated durations: it follows from the specification alone."""
    return timeline_svg([timed_schedule(plan, method.plan, method.name)])


def _method(method: Method) -> dict[str, Any]:
    uses = uses_text(method)
    return {
        "name": method.name,
        "rows": uses[0].upper() + uses[1:],
        "mode": method.plan.mode,
        "picture": picture_path(method),
        "timeline": timeline(method.plan),
        "launches": [_launch(launch) for launch in method.plan.launches],
        "head_rows": method.plan.head_rows,
    }


def _launch(launch: Launch) -> dict[str, Any]:
    flags = ", ".join(name for name, on in launch.flags if on)
    return {
        "name": launch.name,
        "stream": launch.stream,
        "stage": launch.stage,
        "flags": flags or "-",
        "start": launch.pdl.attribute_reason,
        "release": launch.pdl.release_reason,
        "line": launch.span.line,
    }
