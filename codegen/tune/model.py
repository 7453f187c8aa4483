"""What a tuning run measures, as plain data: steps, their candidates, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kpipe.codegen.ops.contract import Tactic
from kpipe.codegen.plan.modes import Mode

SCHEMA = "kpipe.tune_plan/1"
MODE, TILE = "mode", "tile"
OWN_TILE = "the kernel's own"  # name of the tile of a launch for which nothing names one


@dataclass(frozen=True)
class Options:
    """What is asked of a plan.

    `rows`: those to measure, empty for all that are declared; `modes` and `tiles`: most candidates
    of a step, the present choice included (1 leaves such steps out).
    """

    arch: str = ""
    rows: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()
    modes: int = 8
    tiles: int = 5
    context: int = 32768


@dataclass(frozen=True)
class Candidate:
    """One choice of a step.

    Of a mode step: `module` and `method` of the plan's folder, and the predicted us of a layer.
    Of a tile step: the fields of the tile, empty for the kernel's own.
    """

    name: str
    module: str = ""
    method: str = ""
    predicted: float | None = None
    tactic: Tactic = ()


@dataclass(frozen=True)
class LeftOut:
    """A choice that is not measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class TuneStep:
    """What is measured at one row count: candidates with the present choice first.

    `stands_for` are the declared row counts that take its winner.  A tile step changes one op of
    `method` of `module`; all candidates are timed as whole layers.
    """

    kind: str
    q: int
    rows: int
    stands_for: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...] = ()
    op: str = ""
    module: str = ""
    method: str = ""

    @property
    def key(self) -> str:
        """The name of the step in results."""
        return f"{self.op or self.kind} q{self.q} rows {self.rows}"

    @property
    def present(self) -> str:
        """The name of the choice that the spec makes now."""
        return self.candidates[0].name


@dataclass(frozen=True)
class CandidateMode:
    """A mode that some step may take: its lists as written, and whether the spec declares it."""

    mode: Mode
    streams: tuple[tuple[str, tuple[str, ...]], ...]
    declared: bool
    origin: str = ""  # of a mode that was found: the mode and the place

    @property
    def name(self) -> str:
        """Its name, free in the spec where it was found."""
        return self.mode.name

    @property
    def module(self) -> str:
        """The module of the plan's folder that has its methods."""
        return f"mode_{self.mode.name}"


@dataclass(frozen=True)
class Tuning:
    """A plan: what `kpipe.runtime.tune` reads, and the files that it runs.

    `notes` say what is not in the times.
    """

    pipeline: str
    spec: str
    arch: str
    context: int
    modes: tuple[CandidateMode, ...]
    steps: tuple[TuneStep, ...]
    made_from: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict, repr=False)

    def as_json(self) -> dict[str, Any]:
        """The document of the plan; deterministic."""
        return {
            "schema": SCHEMA,
            "pipeline": self.pipeline,
            "spec": self.spec,
            "arch": self.arch,
            "context": self.context,
            "notes": list(self.notes),
            "made_from": dict(self.made_from),
            "modes": {mode.name: _mode_json(mode) for mode in self.modes},
            "steps": [_step_json(step) for step in self.steps],
        }


def _mode_json(mode: CandidateMode) -> dict[str, Any]:
    return {
        "module": mode.module,
        "declared": mode.declared,
        "origin": mode.origin,
        "streams": {stream: list(words) for stream, words in mode.streams},
        "requires": dict(mode.mode.requires),
    }


def _step_json(step: TuneStep) -> dict[str, Any]:
    return {
        "key": step.key,
        "kind": step.kind,
        "op": step.op,
        "q": step.q,
        "rows": step.rows,
        "stands_for": list(step.stands_for),
        "module": step.module,
        "method": step.method,
        "present": step.present,
        "candidates": [_candidate_json(step, one) for one in step.candidates],
        "left_out": [{"name": one.name, "reason": one.reason} for one in step.left_out],
    }


def _candidate_json(step: TuneStep, one: Candidate) -> dict[str, Any]:
    if step.kind == TILE:
        return {"name": one.name, "tactic": dict(one.tactic)}
    predicted = None if one.predicted is None else round(one.predicted, 3)
    return {
        "name": one.name,
        "module": one.module,
        "method": one.method,
        "predicted_us": predicted,
    }
