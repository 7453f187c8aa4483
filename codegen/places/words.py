"""Which words of a mode are meant by the name of a stage or of an op."""

from __future__ import annotations

from collections.abc import Sequence

from kpipe.codegen.diagnostics import Diagnostic, SpecError, did_you_mean
from kpipe.codegen.plan.model import StepPlan
from kpipe.codegen.plan.resolve import Resolved


def check_name(resolved: Resolved, name: str) -> None:
    """Make sure that a stage, a word of modes or an op has the name.

    Raises SpecError KP808, with what the spec has, where none does.
    """
    stages, words = tuple(resolved.spec.stages), tuple(resolved.slots)
    ops = tuple(op for slot in resolved.slots.values() for op in slot.choices)
    known = tuple(dict.fromkeys((*stages, *words, *ops)))
    if name in known:
        return
    near = did_you_mean(name, known)
    hint = f"did you mean `{near}`?" if near else ""
    message = f"no stage and no op is called `{name}`"
    raise SpecError((Diagnostic("KP808", message, None, allowed=known, help=hint),))


def words_of(resolved: Resolved, name: str, steps: Sequence[StepPlan]) -> tuple[str, ...]:
    """The words to move in the mode of these steps, all of one mode.

    Those of a stage, as far as the mode launches them; for an op the word that stands for it at
    these rows.  An op that the mode does not launch stands for itself; empty for a stage of which
    the mode launches nothing.
    """
    launched = resolved.modes[steps[0].mode].ops
    if name in resolved.spec.stages:
        return tuple(w for w in launched if resolved.slots[w].stage == name)
    meant = [
        word
        for word, slot in resolved.slots.items()
        if word == name or any(name in slot.ops_at(s.arch, s.q, s.rows) for s in steps)
    ]
    present = tuple(word for word in launched if word in meant)
    if present:
        return present
    return (name,) if name in resolved.slots else tuple(meant[:1])
