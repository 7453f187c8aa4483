"""The plan of a tuning run, as `kpipe tune plan` writes it into a folder of generated code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = "kpipe.tune_plan/1"
FILE_NAME = "plan.json"


class PlanError(ValueError):
    """A folder that is no tuning plan; the text says why."""


@dataclass(frozen=True)
class Candidate:
    """One choice: a method of a module with the mode's name, or the fields of a tile."""

    name: str
    module: str
    method: str
    tactic: Mapping[str, int]


@dataclass(frozen=True)
class Step:
    """What is measured at one row count.

    With `op` the candidates are tiles of that op in `method` of `module`, else modes; all are timed
    as whole layers.  The first candidate is the present choice.
    """

    key: str
    op: str
    q: int
    rows: int
    module: str
    method: str
    candidates: tuple[Candidate, ...]

    @property
    def present(self) -> str:
        """The name of the present choice."""
        return self.candidates[0].name


@dataclass(frozen=True)
class Plan:
    """A plan and the folder that it lies in; `document` is the whole text as data."""

    folder: Path
    pipeline: str
    arch: str
    context: int
    steps: tuple[Step, ...]
    document: Mapping[str, Any]


def read_plan(folder: Path) -> Plan:
    """The plan of a folder.  Raises PlanError."""
    path = folder / FILE_NAME
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise PlanError(f"`{path}` cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise PlanError(f"`{path}` is not JSON") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise PlanError(f"`{path}`: `schema` is {schema!r}, not {SCHEMA!r}")
    try:
        steps = tuple(_step(entry) for entry in data["steps"])
        where = data["pipeline"], data["arch"], int(data["context"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"`{path}` lacks something: {error!r}") from None
    return Plan(folder, *where, steps, data)


def _step(entry: Mapping[str, Any]) -> Step:
    tiles = bool(entry["op"])
    candidates = tuple(
        Candidate(
            one["name"],
            entry["module"] if tiles else one["module"],
            entry["method"] if tiles else one["method"],
            dict(one.get("tactic", {})),
        )
        for one in entry["candidates"]
    )
    where = int(entry["q"]), int(entry["rows"]), entry["module"], entry["method"]
    if not candidates:
        raise ValueError(f"step {entry['key']} has no candidates")
    return Step(entry["key"], entry["op"], *where, candidates)
