"""A review for tools."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from kpipe.codegen.diagnostics import Diagnostic, render_json
from kpipe.codegen.review.model import Difference, Review
from kpipe.codegen.review.verdict import verdict_line
from kpipe.codegen.version import __version__

SCHEMA = "kpipe.review/1"


def review_json(review: Review, code: int) -> str:
    """The whole difference as JSON; `code` is the exit code of the run.

    Times are microseconds a layer, predicted, rounded to a nanosecond; memory is bytes.
    """
    reasons = {0: "fine", 1: "findings", 2: "unreadable"}
    payload = {
        "schema": SCHEMA,
        "kpipe": __version__,
        "base": review.base,
        "verdict": verdict_line(review),
        "pipelines": [_pipeline(one) for one in review.pipelines],
        "exit": {"code": code, "reason": reasons[code]},
    }
    return json.dumps(payload, indent=2) + "\n"


def _pipeline(one: Difference) -> dict[str, Any]:
    data = asdict(one)
    for key in ("found", "warnings", "old_found"):
        data[key] = _findings(getattr(one, key))
    for entry in data["ranges"]:
        for key in ("times_before", "times_after"):
            entry[key] = [round(time, 3) for time in entry[key]]
    if one.memory is not None:
        data["memory"] = {
            side: {**asdict(memory), "total": memory.total}
            for side, memory in zip(("before", "after"), one.memory, strict=True)
        }
    return data


def _findings(found: tuple[Diagnostic, ...]) -> list[Any]:
    return json.loads(render_json(sorted(found)))
