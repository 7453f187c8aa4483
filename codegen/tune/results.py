"""Results that come back from the machine with the GPU, and what they say about each step."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from kpipe.codegen.commands.measured import wrong_document
from kpipe.codegen.tune.model import SCHEMA as PLAN_SCHEMA

SCHEMA = "kpipe.tune_results/1"
MIN_ROUNDS = 3  # fewer say nothing of a spread
LEAST = 0.01  # a gain below that is not worth another table
_PLAIN = re.compile(r"[\w .,:+()/-]{1,80}", re.ASCII)  # what may stand in a comment of the spec


@dataclass(frozen=True)
class Results:
    """One file: where and when it was measured, the plan, and the rounds by step."""

    name: str  # of the file
    gpu: str
    date: str
    plan: Mapping[str, Any]
    rounds: Mapping[str, Sequence[Mapping[str, float]]]
    failed: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Verdict:
    """What was found for one step of the plan.

    `us` are medians by candidate; `gain` and `spread` are shares of the present time: of the
    fastest candidate, in the median over the rounds, and between the best and the worst round.
    """

    step: Mapping[str, Any]
    us: Mapping[str, float]
    best: str
    gain: float
    spread: float
    failed: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""  # why nothing can be said

    @property
    def present(self) -> str:
        """The choice that the spec made when the plan was written."""
        return str(self.step["present"])

    @property
    def winner(self) -> str:
        """The choice to make: the present one unless another is better by more than the spread."""
        better = not self.missing and self.gain > max(self.spread, LEAST)
        return self.best if better else self.present

    @property
    def changes(self) -> bool:
        """Whether the winner is another one than the present choice."""
        return self.winner != self.present

    @property
    def candidate(self) -> Mapping[str, Any]:
        """The winner as the plan has it."""
        return next(one for one in self.step["candidates"] if one["name"] == self.winner)


def read_results(path: str) -> Results:
    """A file of results.  Raises SpecError KP820 for anything else, and for results of what the
    plan in it does not have."""
    try:
        lines = Path(path).read_bytes().decode("utf-8").splitlines()
        documents = [_line(path, number, text) for number, text in enumerate(lines, 1)]
    except OSError as error:
        raise wrong_document(path, f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise wrong_document(path, "is not UTF-8") from None
    header = documents[0] if documents else {}
    if header.get("schema") != SCHEMA:
        raise wrong_document(path, f"`schema` is {header.get('schema')!r}, not {SCHEMA!r}")
    try:
        return _results(path, header, documents[1:])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise wrong_document(path, f"cannot be used: {_said(error)}") from None


def _line(path: str, number: int, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        raise wrong_document(path, f"line {number} is not JSON", number) from None
    if not isinstance(found, dict):
        raise wrong_document(path, f"line {number} is no object", number)
    return found


def _said(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _results(path: str, header: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Results:
    plan = header["plan"]
    if plan["schema"] != PLAN_SCHEMA:
        raise ValueError(f"its plan is of schema {plan['schema']!r}, not {PLAN_SCHEMA!r}")
    for name in ("gpu", "date"):
        if not _PLAIN.fullmatch(header[name]):
            raise ValueError(f"`{name}` is {header[name]!r:.60}")
    known = {step["key"]: {one["name"] for one in step["candidates"]} for step in plan["steps"]}
    rounds: dict[str, list[Mapping[str, float]]] = {key: [] for key in known}
    failed: dict[str, dict[str, str]] = {key: {} for key in known}
    for line in lines:
        step = line["step"]
        if step not in known:
            raise ValueError(f"step {step!r} is not in its plan")
        names = [line["failed"]] if "failed" in line else [*(line.get("us") or ())]
        if unknown := [name for name in names if name not in known[step]]:
            raise ValueError(f"{step}: {unknown[0]!r} is no candidate of its plan")
        if "failed" in line:
            failed[step][line["failed"]] = str(line["error"])
        elif "round" in line:
            rounds[step].append({name: _positive(step, us) for name, us in line["us"].items()})
    return Results(Path(path).name, header["gpu"], header["date"], plan, rounds, failed)


def _positive(step: str, us: object) -> float:
    if isinstance(us, bool) or not isinstance(us, int | float) or not 0 < us < math.inf:
        raise ValueError(f"{step}: {us!r} is no time")
    return float(us)


def verdicts(results: Results) -> list[Verdict]:
    """What the rounds say, step by step in the order of the plan.

    Candidates are compared round by round, since a round times all of them one behind the other.
    """
    return [_verdict(results, step) for step in results.plan["steps"]]


def _verdict(results: Results, step: Mapping[str, Any]) -> Verdict:
    key, present = step["key"], step["present"]
    failed = results.failed[key]
    rounds = [one for one in results.rounds[key] if present in one]
    names = [one["name"] for one in step["candidates"] if one["name"] not in failed]
    whole = [name for name in names if sum(name in one for one in rounds) >= MIN_ROUNDS]
    us = {name: median(one[name] for one in rounds if name in one) for name in whole}
    if present in failed:
        return Verdict(
            step, us, present, 0.0, 0.0, failed, f"the present choice failed: {failed[present]}"
        )
    if len(whole) < 2 or present not in whole:
        many = f"{len(rounds)} of at least {MIN_ROUNDS} rounds"
        missing = "no other candidate ran" if len(names) < 2 else many
        return Verdict(step, us, present, 0.0, 0.0, failed, missing)
    best = min((name for name in whole if name != present), key=lambda name: us[name])
    ratios = [one[best] / one[present] for one in rounds if best in one]
    return Verdict(step, us, best, 1 - median(ratios), max(ratios) - min(ratios), failed)
