"""The proof's front door: a path in, a proved plan out."""

from __future__ import annotations

from kpipe.codegen.plan.api import plan_pipeline
from kpipe.codegen.proof.proved import ProvedPlan, remembered


def prove_pipeline(path: str, texts: dict[str, str] | None = None) -> ProvedPlan:
    """Plan and prove a spec.  Raises SpecError with the plan's errors, or else the proof's."""
    pipeline = plan_pipeline(path, texts)
    known = remembered(pipeline)
    if known is not None:
        return known
    from kpipe.codegen.proof.prove import prove

    return prove(pipeline)
