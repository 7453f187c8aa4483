"""Modes that a step may take: those of the spec, and those that a survey of its stages finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.places.survey import laid_out, layout_of, schedule_key, survey
from kpipe.codegen.places.words import words_of
from kpipe.codegen.plan.build import illegal, plan_mode
from kpipe.codegen.plan.cost import layer_time
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.resolve import Resolved
from kpipe.codegen.plan.step import choices
from kpipe.codegen.repair.trial import proved_outcome
from kpipe.codegen.tune.model import Candidate, CandidateMode, LeftOut

PER_STAGE = 3  # schedules of one survey that are looked at further
Tick = Callable[[str], None]


@dataclass(frozen=True)
class Proved:
    """A mode at one step: its proved plan and predicted us, or why it is not possible."""

    step: StepPlan | None = None
    predicted: float = 0.0
    reason: str = ""


@dataclass
class Prover:
    """Plans and proves modes at single steps of one architecture; remembers what came of it."""

    resolved: Resolved
    arch: str
    known: dict[tuple[object, ...], tuple[PipelinePlan | None, Proved]] = field(
        default_factory=dict
    )

    def at(self, mode: CandidateMode, q: int, rows: int) -> Proved:
        """The mode at that step; steps with the same choices of ops are proved once."""
        if mode.declared and (reason := illegal(self.resolved, mode.name)):
            return Proved(reason=reason)
        key = mode.name, q, *choices(self.resolved, self.arch, q, rows, mode.mode)
        if key not in self.known:
            self.known[key] = self._proved(mode, q, rows)
        pipeline, proved = self.known[key]
        if pipeline is None or proved.step is None:
            return proved
        step = replace(proved.step, rows=rows)
        return Proved(step, layer_time(pipeline, step))

    def _proved(self, mode: CandidateMode, q: int, rows: int) -> tuple[PipelinePlan | None, Proved]:
        try:
            report = Report(self.resolved.source)
            pipeline = plan_mode(self.resolved, mode.mode, [(self.arch, q, rows)], report)
            outcome = proved_outcome(pipeline, pipeline.plans)
        except SpecError as error:
            return None, Proved(reason=error.diagnostics[0].message)
        if outcome.found:
            return None, Proved(reason=outcome.found[0].message)
        return pipeline, Proved(outcome.steps[0])


def declared_modes(resolved: Resolved) -> list[CandidateMode]:
    """Every mode of the spec."""
    return [
        CandidateMode(mode, layout_of(resolved, name).streams, declared=True)
        for name, mode in resolved.modes.items()
    ]


def found_modes(
    resolved: Resolved, steps: Sequence[StepPlan], known: Sequence[CandidateMode], tick: Tick
) -> list[CandidateMode]:
    """The fastest predicted schedules that moving one stage gives, for steps of one mode.

    Each is proved for all these steps.  One that is among `known` is that mode; others have names
    that are free.
    """
    name, found = steps[0].mode, []
    by_lists = {frozenset(mode.streams): mode for mode in known}
    names = {mode.name for mode in known}
    for stage in resolved.spec.stages:
        tick(f"{name}: {stage}")
        words = words_of(resolved, stage, steps)
        if not words:
            continue
        surveyed = survey(resolved, steps, words, lambda number, total: None)
        legal = [one for one in surveyed.legal if not one.current][:PER_STAGE]
        for one in legal:
            lists = frozenset(one.place.layout.streams)
            if lists in by_lists:
                found.append(by_lists[lists])
                continue
            free = _free(f"{name}_{stage}", names)
            names.add(free)
            report = Report(resolved.source)
            mode = replace(
                laid_out(resolved, resolved.modes[name], one.place.layout, report), name=free
            )
            origin = f"{name}, {', '.join(one.place.moved)} {one.place.text}"
            by_lists[lists] = CandidateMode(mode, one.place.layout.streams, False, origin)
            found.append(by_lists[lists])
    return found


def _free(name: str, taken: set[str]) -> str:
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def mode_candidates(
    prover: Prover,
    modes: Sequence[CandidateMode],
    present: str,
    q: int,
    rows: Sequence[int],
    most: int,
) -> tuple[tuple[Candidate, ...], tuple[LeftOut, ...]]:
    """The present mode and the fastest predicted others at the last of `rows`, `most` in all.

    A candidate is proved for all `rows`.  Of modes that come to the same schedule the first counts.
    """
    ordered = sorted(modes, key=lambda mode: mode.name != present)
    seen: dict[tuple, str] = {}
    fine: list[Candidate] = []
    left_out: list[LeftOut] = []
    for mode in ordered:
        proved = [prover.at(mode, q, count) for count in rows]
        reason = next((one.reason for one in proved if one.reason), "")
        if reason:
            left_out.append(LeftOut(mode.name, reason))
            continue
        key = schedule_key([one.step for one in proved if one.step is not None])
        if key in seen:
            left_out.append(LeftOut(mode.name, f"the same schedule as {seen[key]}"))
            continue
        seen[key] = mode.name
        fine.append(Candidate(mode.name, mode.module, predicted=proved[-1].predicted))
    fine[1:] = sorted(fine[1:], key=lambda one: round(one.predicted or 0.0, 2))
    for one in fine[most:]:
        left_out.append(LeftOut(one.name, f"predicted {one.predicted:.1f} us, beyond the limit"))
    return tuple(fine[:most]), tuple(left_out)
