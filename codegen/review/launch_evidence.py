"""Which launches gain or lose valid evidence by a change."""

from __future__ import annotations

from collections.abc import Iterable

from kpipe.codegen.evidence import STATES, LaunchEvidence
from kpipe.codegen.review.model import EvidenceChange

_Key = tuple[str, str, int]


def evidence_changes(
    old: Iterable[LaunchEvidence], new: Iterable[LaunchEvidence]
) -> tuple[EvidenceChange, ...]:
    """Launches whose state differs, rows merged; a launch that only one side has is empty there."""
    before, after = _states(old), _states(new)
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for key in dict.fromkeys((*after, *before)):
        states = (before.get(key, ""), after.get(key, ""))
        if states[0] != states[1]:
            arch, op, rows = key
            found.setdefault((arch, op, *states), []).append(rows)
    return tuple(
        EvidenceChange(arch, op, tuple(sorted(rows)), first, second)
        for (arch, op, first, second), rows in found.items()
    )


def _states(found: Iterable[LaunchEvidence]) -> dict[_Key, str]:
    """The worst state of each launch: it may be launched with several sets of flags."""
    worst: dict[_Key, str] = {}
    for one in found:
        key = (one.arch, one.op, one.rows)
        worst[key] = max(worst.get(key, STATES[0]), one.state, key=STATES.index)
    return worst
