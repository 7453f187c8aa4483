"""A spec to a tuning plan: which choices are measured at which rows, and the code that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kpipe.codegen.config import load_config
from kpipe.codegen.diagnostics import Diagnostic, SpecError
from kpipe.codegen.plan.api import resolve_spec
from kpipe.codegen.plan.build import build_plan, plan_mode, refuse_unbuilt
from kpipe.codegen.plan.describe import check_declared
from kpipe.codegen.plan.model import Launch, PipelinePlan, StepPlan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.resolve import Resolved
from kpipe.codegen.proof.prove import prove
from kpipe.codegen.proof.proved import ProvedPlan
from kpipe.codegen.tune.fingerprint import made_from
from kpipe.codegen.tune.model import (
    MODE,
    TILE,
    Candidate,
    CandidateMode,
    Options,
    TuneStep,
    Tuning,
)
from kpipe.codegen.tune.modes import (
    Prover,
    Tick,
    declared_modes,
    found_modes,
    mode_candidates,
)
from kpipe.codegen.tune.tiles import tile_candidates

ALONE = (
    "rank 0 of {ranks} is timed alone: what its peers send is there when it polls, so that NVLink "
    "and ranks that are late are not in these times"
)

Steps = Mapping[tuple[int, int], StepPlan]  # by (q, rows), of one architecture


def plan_tuning(path: str, texts: dict[str, str], options: Options, tick: Tick) -> Tuning:
    """What to measure for a spec, with everything that the machine with the GPU needs.

    `tick` hears of progress.  Raises SpecError with every error of the spec; KP808 for rows,
    query lengths and an architecture that it does not declare.
    """
    resolved = resolve_spec(path, texts)
    refuse_unbuilt(resolved)
    proved = prove(build_plan(resolved, Report(resolved.source)))
    plan = proved.pipeline
    arch = options.arch or plan.targets[0]
    _check(plan, options, arch)
    steps = {(s.q, s.rows): s for s in plan.plans if s.arch == arch}
    wanted = _wanted(plan, options)
    modes, mode_steps = _mode_steps(resolved, steps, wanted, options, arch, tick)
    used = _used(modes, mode_steps)
    lists = {mode.name: _proved_mode(resolved, mode, mode_steps, arch) for mode in used}
    named = [_with_methods(step, lists, arch) for step in mode_steps]
    tiles = _tile_steps(plan, steps, wanted, options, named)
    return Tuning(
        plan.name,
        path,
        arch,
        options.context,
        used,
        _in_order(named, tiles, options),
        made_from(resolved, plan),
        (ALONE.format(ranks=plan.parallel["tp"]),) if plan.context_parallel else (),
        files=_files(path, proved, used, lists),
    )


def _check(plan: PipelinePlan, options: Options, arch: str) -> None:
    check_declared(plan.rows, plan.targets, None, None, arch)
    for q in options.queries:
        check_declared(plan.rows, plan.targets, None, q, None)
    for rows in options.rows:
        check_declared(plan.rows, plan.targets, rows, None, None)


def _wanted(plan: PipelinePlan, options: Options) -> dict[int, tuple[int, ...]]:
    """Row counts to measure by query length.  Raises SpecError KP808 where none is left."""
    found = {
        q: tuple(rows for rows in counts if not options.rows or rows in options.rows)
        for q, counts in plan.rows
        if not options.queries or q in options.queries
    }
    found = {q: counts for q, counts in found.items() if counts}
    if not found:
        message = "no selected row count is declared for a selected query length"
        raise SpecError((Diagnostic("KP808", message, None, help="select others"),))
    return found


def stands_for(
    rows: int, measured: Sequence[int], declared: Sequence[int], alike: Callable[[int], object]
) -> tuple[int, ...]:
    """Declared counts that take what is measured at `rows`: those above the next smaller measured
    count for which the spec makes the same choice now."""
    below = max((count for count in measured if count < rows), default=0)
    return tuple(c for c in declared if below < c <= rows and alike(c) == alike(rows))


def _mode_steps(
    resolved: Resolved,
    steps: Steps,
    wanted: Mapping[int, tuple[int, ...]],
    options: Options,
    arch: str,
    tick: Tick,
) -> tuple[list[CandidateMode], list[TuneStep]]:
    prover = Prover(resolved, arch)
    modes, found = declared_modes(resolved), []
    for q, measured in wanted.items():
        declared = resolved.rows[q]
        ranges = {
            rows: stands_for(rows, measured, declared, lambda c, q=q: steps[q, c].mode)
            for rows in measured
        }
        own = _survey_all(resolved, steps, q, ranges, modes, options, tick)
        names = {mode.name for mode in own}
        modes += [mode for mode in own if mode not in modes]
        known = [mode for mode in modes if mode.declared or mode.name in names]
        for rows, counts in ranges.items():
            tick(f"q{q} rows {rows}")
            present = steps[q, rows].mode
            kept, left = mode_candidates(prover, known, present, q, counts, options.modes)
            found.append(TuneStep(MODE, q, rows, counts, kept, left))
    return modes, found


def _survey_all(
    resolved: Resolved,
    steps: Steps,
    q: int,
    ranges: Mapping[int, tuple[int, ...]],
    known: Sequence[CandidateMode],
    options: Options,
    tick: Tick,
) -> list[CandidateMode]:
    """Schedules near the modes that the table selects now; none where modes are not compared."""
    if options.modes < 2:
        return []
    by_mode: dict[str, list[StepPlan]] = {}
    for counts in ranges.values():
        for count in counts:
            by_mode.setdefault(steps[q, count].mode, []).append(steps[q, count])
    found: list[CandidateMode] = []
    for group in by_mode.values():
        found += found_modes(resolved, group, [*known, *found], tick)
    return list(dict.fromkeys(found))


def _used(modes: Sequence[CandidateMode], steps: Sequence[TuneStep]) -> tuple[CandidateMode, ...]:
    names = {one.name for step in steps for one in step.candidates}
    return tuple(mode for mode in modes if mode.name in names)


def _proved_mode(
    resolved: Resolved, mode: CandidateMode, steps: Sequence[TuneStep], arch: str
) -> ProvedPlan:
    """The mode at every measured step that it is a candidate of; only these are declared."""
    places = [
        (arch, step.q, step.rows)
        for step in steps
        if mode.name in [one.name for one in step.candidates]
    ]
    proved = prove(plan_mode(resolved, mode.mode, places, Report(resolved.source)))
    rows: dict[int, tuple[int, ...]] = {}
    for _, q, count in places:
        rows[q] = (*rows.get(q, ()), count)
    pipeline = replace(proved.pipeline, targets=(arch,), rows=tuple(rows.items()))
    return replace(proved, pipeline=pipeline)


def _with_methods(step: TuneStep, lists: Mapping[str, ProvedPlan], arch: str) -> TuneStep:
    def named(one: Candidate) -> Candidate:
        methods = lists[one.name].pipeline.methods
        use = next(m.name for m in methods if (arch, step.q, step.rows) in _places(m.uses))
        return replace(one, method=use)

    return replace(step, candidates=tuple(named(one) for one in step.candidates))


def _places(uses: Sequence[tuple[str, int, tuple[int, ...]]]) -> set[tuple[str, int, int]]:
    return {(arch, q, count) for arch, q, counts in uses for count in counts}


def _tile_steps(
    plan: PipelinePlan,
    steps: Steps,
    wanted: Mapping[int, tuple[int, ...]],
    options: Options,
    mode_steps: Sequence[TuneStep],
) -> list[TuneStep]:
    """Every launch with tiles to choose from; a tile holds for all query lengths, so the smallest
    that has the row count is measured."""
    home = {(step.q, step.rows): step.candidates[0] for step in mode_steps}
    measured = sorted({rows for counts in wanted.values() for rows in counts})
    declared = sorted({rows for _, counts in plan.rows for rows in counts})
    found = []
    for rows in measured if options.tiles > 1 else ():
        q = min(q for q, counts in wanted.items() if rows in counts)
        launches = {launch.op: launch for launch in steps[q, rows].launches}
        for launch in launches.values():
            if not launch.contract.tile_values or not plan.kernel(launch.contract):
                continue
            arch = steps[q, rows].arch
            alike = _tactic_of(plan, launch, arch)
            kept, left = tile_candidates(launch.contract, launch.tactic, rows, options.tiles)
            counts = stands_for(rows, measured, declared, alike)
            at = home[q, rows]
            found.append(
                TuneStep(TILE, q, rows, counts, kept, left, launch.op, at.module, at.method)
            )
    return [step for step in found if len(step.candidates) > 1]


def _tactic_of(plan: PipelinePlan, launch: Launch, arch: str) -> Callable[[int], object]:
    known = [(most, tactic) for place, most, tactic in plan.tactics[launch.op] if place == arch]
    return lambda rows: next((tactic for most, tactic in known if rows <= most), ())


def _in_order(
    mode_steps: Sequence[TuneStep], tiles: Sequence[TuneStep], options: Options
) -> tuple[TuneStep, ...]:
    """Steps of one (q, rows) together, since they share their inputs; modes come first."""
    modes = [s for s in mode_steps if options.modes > 1 and len(s.candidates) > 1]
    places = list(dict.fromkeys((s.q, s.rows) for s in mode_steps))
    ordered = []
    for place in places:
        ordered += [step for step in (*modes, *tiles) if (step.q, step.rows) == place]
    return tuple(ordered)


def _files(
    path: str,
    proved: ProvedPlan,
    modes: Sequence[CandidateMode],
    lists: Mapping[str, ProvedPlan],
) -> dict[str, str]:
    """The pipeline's code as it is generated now, and a module per candidate mode."""
    from kpipe.codegen.render.api import render_layer, render_pipeline

    folders = load_config(Path(path)).templates
    whole = render_pipeline(proved, folders)
    files = {name: text for name, text in whole.items() if name.endswith(".py")}
    for mode in modes:
        files[f"{mode.module}.py"] = render_layer(lists[mode.name], folders)
    return files
