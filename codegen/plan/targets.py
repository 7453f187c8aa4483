"""GPU architectures: spelled one way, never compared as numbers."""

from __future__ import annotations

import re

from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.models import Pipeline

# What the kernels are written and compiled for; the suffix is part of the name, because wgmma,
# setmaxnreg and tcgen05 exist in the architecture-specific targets only.
KNOWN = ("sm_90a", "sm_100a")
_VERSION = re.compile(r"^(\d+)\.(\d)([af]?)$")


def normalise(text: str) -> str:
    """`9.0a` and `sm_90a` are the same target; anything else is returned as written."""
    match = _VERSION.match(text)
    return f"sm_{match[1]}{match[2]}{match[3]}" if match else text


def resolve_targets(spec: Pipeline, report: Report) -> tuple[str, ...]:
    """The targets that kpipe can emit; unknown ones are reported."""
    targets: list[str] = []
    for position, text in enumerate(spec.targets):
        target = normalise(str(text))
        span = report.source.span("targets", position)
        if target in targets:
            message = f"target `{target}` is listed twice"
            report.error("KP104", message, span, help="delete one of the two")
        elif target in KNOWN:
            targets.append(target)
        elif f"{target}a" in KNOWN:
            report.error(
                "KP104",
                f"needs {target}a (architecture-specific instructions); got {target}",
                span,
                allowed=KNOWN,
                help=f"write `{target}a`",
            )
        else:
            report.error(
                "KP104",
                f"kpipe cannot emit `{target}`; known: {', '.join(KNOWN)}",
                span,
                allowed=KNOWN,
                help="delete the target, or name one that kpipe knows",
            )
    return tuple(targets)
