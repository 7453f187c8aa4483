"""Findings with their repairs: candidates tried out, and what is left ranked by predicted cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kpipe.codegen.diagnostics import Diagnostic, Repair, SpecError
from kpipe.codegen.plan.api import resolve_spec
from kpipe.codegen.plan.cost import layer_time
from kpipe.codegen.plan.describe import row_list
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.repair.candidates import (
    REPAIRED,
    Context,
    candidates,
    first_of_each,
    for_all,
    mode_of,
)
from kpipe.codegen.repair.moves import Candidate, Words
from kpipe.codegen.repair.trial import Outcome, planned, tried
from kpipe.codegen.spec.load import load_source

TRIALS = 8  # of one group of findings
OTHER_TRIALS = 2  # of these, with another mode or another claim about the engine
ALL_TRIALS = 16  # of one spec: a failing check stays below about two seconds
KEPT = 6  # repairs of one finding
_Key = tuple[str, str]
_At = tuple[str, int, int]  # arch, q, rows


@dataclass(frozen=True)
class _Passed:
    """A candidate after its trial; `clears` are the findings that it makes go."""

    candidate: Candidate
    number: int
    clears: frozenset[_Key]
    times: Mapping[_At, float]


def with_repairs(
    path: str, texts: Mapping[str, str], found: Sequence[Diagnostic]
) -> tuple[Diagnostic, ...]:
    """The findings, those about order and mailboxes with repairs that were tried out.

    `texts` are the files as they were checked.  A repair makes the finding go and brings no other.
    Where one is found, `help` is the best one's sentence and `fix` its edits; all other findings
    stay as they are.  Findings of one mode are repaired together: what clears all of them comes
    first, and among those what keeps the mode, then what the layer is predicted to be fastest with.
    """
    wanted = [finding for finding in found if finding.code in REPAIRED]
    if not wanted or any(finding.fix for finding in found if finding.code not in REPAIRED):
        return tuple(found)  # words to correct come first: they may be the cause of the rest
    try:
        source = load_source(path, {}, texts)
    except SpecError:
        return tuple(found)
    context = Context(source, Words(source.root), None)
    before: PipelinePlan | None = None
    try:
        context = replace(context, resolved=resolve_spec(path, {}, texts))
        before = planned(path, texts)
    except SpecError:
        pass  # then there are fewer candidates, and nothing to compare their time with
    known = frozenset(_key(finding) for finding in found)
    groups: dict[str, list[Diagnostic]] = {}
    for finding in wanted:
        groups.setdefault(mode_of(finding, context.words), []).append(finding)
    repaired: dict[Diagnostic, Diagnostic] = {}
    outcomes: dict[Candidate, Outcome] = {}
    for mode, group in groups.items():
        chosen = _candidates(group, context)
        new = [candidate for candidate in chosen if candidate not in outcomes]
        for candidate in new[: ALL_TRIALS - len(outcomes)]:
            outcomes[candidate] = tried(path, texts, candidate.edits, candidate.modes)
        passed = _passed([(one, outcomes[one]) for one in chosen if one in outcomes], known)
        repaired |= _ranked(group, mode, passed, before)
    return tuple(repaired.get(finding, finding) for finding in found)


def _key(finding: Diagnostic) -> _Key:
    return finding.code, finding.message


def _candidates(group: Sequence[Diagnostic], context: Context) -> list[Candidate]:
    """Those of all findings in turns, so that each has its likeliest ones tried; by rank.

    Where there are many, some of those that change more than the mode are among them.
    """
    lists = [candidates(finding, context) for finding in group]
    longest = max(map(len, lists), default=0)
    mixed = [one[turn] for turn in range(longest) for one in lists if turn < len(one)]
    mixed = [*for_all(group, context), *mixed]
    ranked = sorted(first_of_each(mixed), key=lambda candidate: candidate.rank)
    own = [candidate for candidate in ranked if candidate.rank == 0]
    others = ranked[len(own) :]
    kept = own[: TRIALS - min(len(others), OTHER_TRIALS)]
    return [*kept, *others][:TRIALS]


def _passed(outcomes: Sequence[tuple[Candidate, Outcome]], known: frozenset[_Key]) -> list[_Passed]:
    passed = []
    for number, (candidate, outcome) in enumerate(outcomes):
        after = frozenset(_key(finding) for finding in outcome.found)
        if not after - known and known - after:
            passed.append(_Passed(candidate, number, known - after, _times(outcome)))
    return passed


def _times(outcome: Outcome) -> dict[_At, float]:
    """Predicted time of a layer for every step of the first target that was proved, in us."""
    if outcome.pipeline is None:
        return {}
    return _layer_times(outcome.pipeline, outcome.steps)


def _layer_times(pipeline: PipelinePlan, steps: Sequence[StepPlan]) -> dict[_At, float]:
    first = [step for step in steps if step.arch == pipeline.targets[0]]
    return {(step.arch, step.q, step.rows): layer_time(pipeline, step) for step in first}


def _ranked(
    group: Sequence[Diagnostic],
    mode: str,
    passed: Sequence[_Passed],
    before: PipelinePlan | None,
) -> dict[Diagnostic, Diagnostic]:
    """Each finding of the group that has repairs, with them."""
    steps = [step for step in before.plans if step.mode == mode or not mode] if before else []
    written = _layer_times(before, steps) if before and passed else {}
    in_mode = [one.times for one in passed if one.candidate.rank == 0 and one.times]
    places = sorted(written or (in_mode[0] if in_mode else {}))
    own = frozenset(_key(finding) for finding in group)
    means = {
        one.number: sum(one.times[place] for place in places) / len(places)
        for one in passed
        if places and all(place in one.times for place in places)
    }

    def order(one: _Passed) -> tuple[bool, int, float, int]:
        mean = round(means.get(one.number, 0.0), 1)
        return not own <= one.clears, one.candidate.rank, mean, one.number

    ranked = sorted(passed, key=order)
    first = next((means[one.number] for one in ranked if one.number in means), 0.0)
    base = sum(written.values()) / len(written) if written else first
    against = "the schedule as written" if written else "the first repair"
    costs = {number: round(mean - base, 3) + 0.0 for number, mean in means.items()}
    found = {}
    for finding in group:
        helps = [one for one in ranked if _key(finding) in one.clears]
        repairs = tuple(
            Repair(
                one.candidate.text,
                one.candidate.edits,
                costs.get(one.number),
                _basis(against, places) if one.number in costs else "",
                claim=one.candidate.rank == 2,
            )
            for one in helps[:KEPT]
        )
        if repairs:
            fix = () if repairs[0].claim else repairs[0].edits
            found[finding] = replace(finding, help=repairs[0].text, fix=fix, repairs=repairs)
    return found


def _basis(against: str, places: Sequence[_At]) -> str:
    rows: dict[int, list[int]] = {}
    for _, q, count in places:
        rows.setdefault(q, []).append(count)
    listed = "; ".join(f"q {q} rows {row_list(counts)}" for q, counts in sorted(rows.items()))
    return f"predicted microseconds a layer over {against}, mean of {places[0][0]} {listed}"
