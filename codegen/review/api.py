"""The front door: specs and an old side in, a review out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kpipe.codegen.config import Config, display, load_config
from kpipe.codegen.diagnostics import Diagnostic, SpecError
from kpipe.codegen.evidence import DEVICE, LaunchEvidence, evidence_of, summary
from kpipe.codegen.plan.describe import matching_steps
from kpipe.codegen.plan.model import StepPlan
from kpipe.codegen.proof.replay import replay_warnings
from kpipe.codegen.proof.shared import prove_together
from kpipe.codegen.review.base import Base, Pair, opened, pairs_of
from kpipe.codegen.review.difference import Selected, difference, lone
from kpipe.codegen.review.files import (
    Folder,
    comparable,
    file_changes,
    new_folder,
    old_folder,
)
from kpipe.codegen.review.launch_evidence import evidence_changes
from kpipe.codegen.review.model import Difference, Files, Review, State
from kpipe.codegen.review.side import Side, look, old_names

Selection = tuple[int | None, int | None, str | None]


def review(
    specs: Sequence[str],
    against: str,
    texts: dict[str, str],
    selection: Selection = (None, None, None),
    *,
    all_of_project: bool = False,
    progress: Callable[[int, str], None] = lambda number, name: None,
) -> Review:
    """Compare specs of the working tree with the old side that `against` names.

    `texts` receives the text of every file read of the working tree; `selection` are rows, query
    length and architecture of the steps that are looked at, None for all.  With `all_of_project`
    specs that the project's settings name count as deleted where only the old side has them.
    `progress` is told which pipeline is looked at, by number and name.

    Raises UsageError for an old side that cannot be used, SpecError KP100 for a spec that neither
    side has and KP808 for rows, a query length or an architecture that no spec declares.
    """
    with opened(against, specs) as base:
        pairs = pairs_of(base, specs, all_of_project=all_of_project)
        runs = [_Run(base, pair, texts, selection) for pair in pairs]
        pipelines = []
        for number, run in enumerate(runs, 1):
            progress(number, run.name)
            pipelines.append(run.difference())
        words = " ".join(specs) if not all_of_project else ""
        command = f"kpipe plan {words + ' ' if words else ''}--against {against}"
        together = _together(runs, pipelines)
        return Review(base.label, command, tuple(together))


class _Run:
    """One pair while it is compared."""

    def __init__(
        self,
        base: Base,
        pair: Pair,
        texts: dict[str, str],
        selection: Selection,
    ) -> None:
        self.base, self.pair, self.selection = base, pair, selection
        self.texts = texts
        self.own: dict[str, str] = {}  # texts of the new side
        self.new: Side | None = None
        self.old: Side | None = None

    def look(self) -> None:
        """Plan and prove both sides."""
        pair, base = self.pair, self.base
        if pair.new is not None:
            self.new = look(pair.new, self.own)
            self.texts.update(self.own)
        if pair.old is not None and pair.old_as is not None:
            self.old = _labelled(
                look(str(pair.old), {}, old_names(pair.old, pair.old_as)), base, pair
            )

    @property
    def name(self) -> str:
        """The spec, as typed."""
        return self.pair.new or self.pair.old_as or ""

    def difference(self) -> Difference:
        """The pair's difference, files and evidence included."""
        self.look()
        new, old = self.new, self.old
        selected = self._selected()
        if new is None:
            assert old is not None
            if old.pipeline is None:
                return Difference(_stem(old), old.path, "deleted", old.verdict, None)
            return self._with_orphan(lone(old, "deleted", selected), old)
        if new.pipeline is None:
            before = old.verdict if old else None
            name = old.pipeline.name if old and old.pipeline else _stem(new)
            state: State = "draft" if new.verdict.kind == "draft" else "refused"
            return Difference(name, new.path, state, before, new.verdict, found=new.found)
        if old is None or old.pipeline is None:
            found = lone(new, "no base" if old else "new", selected)
            if old is not None:
                found = replace(found, before=old.verdict, old_found=old.found)
        else:
            found = difference(old, new, selected)
        found = replace(found, warnings=replay_warnings(new.pipeline))
        return self._with_files(found)

    def _with_orphan(self, found: Difference, old: Side) -> Difference:
        """Says where the generated folder of a deleted pipeline is still there."""
        assert old.pipeline is not None
        folder = load_config(Path(old.path)).output / old.pipeline.name
        if not folder.is_dir():
            return found
        fact = f"`{display(folder)}` is still there, and no spec generates it: delete it"
        return replace(found, facts=(*found.facts, fact))

    def _selected(self) -> Selected:
        """Which steps the user asked for; at least one side declares them."""
        rows, q, arch = self.selection
        plans = [side.pipeline for side in (self.new, self.old) if side and side.pipeline]
        errors = []
        for plan in plans:
            try:
                matching_steps(plan, rows, q, arch)
            except SpecError as error:
                errors.append(error)
        if errors and len(errors) == len(plans):
            raise errors[0]

        def selected(step: StepPlan) -> bool:
            wanted = ((rows, step.rows), (q, step.q), (arch, step.arch))
            return all(asked in (None, has) for asked, has in wanted)

        return selected

    def _with_files(self, found: Difference) -> Difference:
        new, old, pair = self.new, self.old, self.pair
        assert new is not None and new.pipeline is not None and pair.new is not None
        config = load_config(Path(pair.new))
        after = new_folder(pair.new, new, self.own, config)
        if after is None:
            return found
        path = None
        before = Folder(None, {}, {}, None, {})
        if old is not None and old.pipeline is not None:
            path = self.base.bring(config.output / old.pipeline.name)
            same = after if old.pipeline == new.pipeline else None
            before = old_folder(old, path, config, same)
        files: Files | None = None
        if comparable(before, after):
            files = file_changes(before, after, new, config)
        evidence = self._evidence(before, after, config)
        return replace(
            found,
            files=files,
            evidence=evidence_changes(*evidence),
            evidence_totals=tuple(summary(evidence[1])),
        )

    def _evidence(
        self, before: Folder, after: Folder, config: Config
    ) -> tuple[tuple[LaunchEvidence, ...], tuple[LaunchEvidence, ...]]:
        new, old = self.new, self.old
        assert new is not None and new.pipeline is not None and after.path is not None
        if not (after.path / "evidence").is_dir():
            return (), ()
        now = evidence_of(new.pipeline, after.path, after.kernel_digests())
        if old is None or old.pipeline is None:
            return (), now
        if before.manifest is None or before.path is None:  # judged by the records of today
            return evidence_of(old.pipeline, after.path, before.kernel_digests()), now
        for beside in sorted(config.output.glob("*/evidence")):  # the same kernels may lie there
            self.base.bring(beside)
        blocks = self.base.bring(DEVICE) or DEVICE
        then = evidence_of(old.pipeline, before.path, before.kernel_digests(), blocks)
        return then, now


def _labelled(side: Side, base: Base, pair: Pair) -> Side:
    """The old side with its findings placed where its files are: `HEAD (1f2e): pipelines/x.yaml`
    for a commit, else as files on disk."""
    assert pair.old is not None and pair.old_as is not None

    def place(path: str) -> str:
        if base.top is not None:
            return f"{base.label}: {path}"
        if path == pair.old_as:
            return display(pair.old)
        return display(pair.old.parent / os.path.relpath(path, Path(pair.old_as).parent))

    found = []
    for finding in side.found:
        span = finding.span
        if span is not None:
            span = replace(span, path=place(span.path))
        found.append(replace(finding, span=span, fix=(), repairs=()))
    return replace(side, found=tuple(found))


def _stem(side: Side) -> str:
    return Path(side.path).stem


def _together(runs: Sequence[_Run], pipelines: Sequence[Difference]) -> list[Difference]:
    """The differences with what follows from memory that pipelines of this run share."""
    plans = [
        run.new.pipeline
        for run in runs
        if run.new is not None and run.new.pipeline is not None and not run.new.found
    ]
    if not any(plan.shares_memory for plan in plans):
        return list(pipelines)
    shared = prove_together(plans).found
    listed: list[Difference] = []
    left = list(shared)
    for one in pipelines:
        own = [d for d in left if d.span is not None and d.span.path == one.path]
        left = [d for d in left if d not in own]
        listed.append(_racy(one, own))
    if left and listed:
        listed[-1] = _racy(listed[-1], left)
    return listed


def _racy(one: Difference, found: Sequence[Diagnostic]) -> Difference:
    if not found or one.after is None:
        return one
    codes = tuple(dict.fromkeys((*one.after.codes, *(d.code for d in found))))
    verdict = replace(one.after, kind="racy", codes=codes)
    return replace(one, found=(*one.found, *found), after=verdict)
