"""One pipeline on one side of a comparison: its plan, its verdict, what was found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kpipe.codegen.config import display
from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError
from kpipe.codegen.plan.api import resolve_spec
from kpipe.codegen.plan.build import build_plan, refuse_unbuilt
from kpipe.codegen.plan.model import Item, PipelinePlan, StepPlan
from kpipe.codegen.plan.modes import Mode
from kpipe.codegen.plan.report import Report
from kpipe.codegen.proof.proved import decided, remembered

if TYPE_CHECKING:
    from kpipe.codegen.proof.synthesis import Synthesis

Kind = Literal["proved", "assumed", "racy", "refused", "draft"]
Rename = Callable[[str], str]


@dataclass(frozen=True)
class Verdict:
    """What the proof says of a side.

    proved: free of races by the documents.  assumed: every pair that the documents leave open is
    ordered by a reading that was measured and that nobody promises.  racy: some pair is ordered
    by nothing.  refused: there is no plan to prove.  draft: kpipe does not plan it yet.  `basis`
    are the declarations or the readings that it rests on, `codes` the rules of its findings.
    """

    kind: Kind
    basis: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Side:
    """One side; without a plan where the spec could not be read, checked or planned.

    `path` is the spec's as a person types it, `found` its errors.  `modes` are all declared modes,
    selected or not.
    """

    path: str
    verdict: Verdict
    found: tuple[Diagnostic, ...] = ()
    pipeline: PipelinePlan | None = field(default=None, repr=False)
    modes: Mapping[str, Mode] = field(default_factory=dict, repr=False)


def look(path: str, texts: dict[str, str], shown: Rename = str) -> Side:
    """Read, plan and prove a spec; errors are part of the result.

    `texts` receives the text of every file read.  `shown` gives the path under which a file is
    known, where it lies elsewhere.
    """
    own: dict[str, str] = {}
    known = shown(path)
    try:
        resolved = resolve_spec(path, own)
        if resolved.spec.draft is not None:
            return Side(known, Verdict("draft"))
        refuse_unbuilt(resolved)
        pipeline = build_plan(resolved, Report(resolved.source))
    except SpecError as error:
        found = _placed(error.diagnostics, shown)
        return Side(known, Verdict("refused", codes=_codes(found)), found)
    finally:
        texts.update((shown(name), text) for name, text in own.items())
    try:
        pipeline, verdict, found = _proved(_shown_plan(pipeline, shown))
    except SpecError as error:  # the table that reasons cite cannot be used
        found = error.diagnostics
        return Side(known, Verdict("refused", codes=_codes(found)), found)
    return Side(known, verdict, found, pipeline, resolved.modes)


def old_names(old: Path, old_as: str) -> Rename:
    """Paths of files that lie beside an old spec -> where they stood in the tree."""
    base = Path(old_as).resolve().parent

    def shown(path: str) -> str:
        inner = os.path.relpath(Path(path).resolve(), old.resolve().parent)
        if inner == old.name:
            return old_as
        return display(Path(os.path.normpath(base / inner)))

    return shown


def _codes(found: tuple[Diagnostic, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(d.code for d in found if d.severity == "error"))


def _placed(found: tuple[Diagnostic, ...], shown: Rename) -> tuple[Diagnostic, ...]:
    """Findings at the places that people know; repairs are edits of other files and go."""

    def at(span: Span | None) -> Span | None:
        return span if span is None else replace(span, path=shown(span.path))

    if shown is str:
        return found
    return tuple(
        replace(
            finding,
            span=at(finding.span),
            related=tuple((role, at(span)) for role, span in finding.related),
            fix=(),
            repairs=(),
        )
        for finding in found
    )


def _shown_plan(pipeline: PipelinePlan, shown: Rename) -> PipelinePlan:
    """The plan with the paths that people know; an old plan that is equal then proves alike."""
    if shown is str:
        return pipeline
    names: dict[str, str] = {}

    def item(one: Item) -> Item:
        path = one.span.path
        if path not in names:
            names[path] = shown(path)
        return replace(one, span=replace(one.span, path=names[path]))

    def step(plan: StepPlan) -> StepPlan:
        return replace(plan, items=tuple(map(item, plan.items)))

    return replace(
        pipeline,
        path=shown(pipeline.path),
        plans=tuple(map(step, pipeline.plans)),
        methods=tuple(replace(method, plan=step(method.plan)) for method in pipeline.methods),
    )


def _proved(pipeline: PipelinePlan) -> tuple[PipelinePlan, Verdict, tuple[Diagnostic, ...]]:
    known = remembered(pipeline)
    if known is not None:
        return known.pipeline, Verdict("proved", known.assumes), ()
    from kpipe.codegen.proof.prove import prove, synthesise_all

    try:
        proved = prove(pipeline)
        return proved.pipeline, Verdict("proved", proved.assumes), ()
    except SpecError as error:
        found = error.diagnostics
    synthesised = synthesise_all(pipeline, pipeline.methods)
    steps = {identity: synthesis.step for identity, synthesis in synthesised.items()}
    plan = replace(decided(pipeline, steps).pipeline, status="not proved")
    return plan, _unproved(pipeline, synthesised.values(), found), found


def _unproved(
    pipeline: PipelinePlan, synthesised: Iterable[Synthesis], found: tuple[Diagnostic, ...]
) -> Verdict:
    """Racy, or safe under readings that hold where the table was measured."""
    from kpipe.codegen.proof.cite import settled
    from kpipe.codegen.proof.story import CODES
    from kpipe.codegen.proof.tables import table_for

    races = [race for synthesis in synthesised for _, race in synthesis.races]
    codes = _codes(found)
    if races and set(codes) <= set(CODES.values()):
        table = table_for(pipeline.path, pipeline.targets).table
        settled_races = [settled(race, table) for race in races]
        if all(race.verdict == "assumed" for race in settled_races):
            names = sorted({race.assumption for race in settled_races})
            return Verdict("assumed", (*names, table.title), codes)
    return Verdict("racy", (), codes)
