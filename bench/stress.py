"""Racy schedules that go wrong on a GPU, and their repairs that do not.

    python bench/stress.py plan stress.json                       here
    python -m kpipe.runtime.stress --plan stress.json --out F     on the machine with the GPU
    python bench/stress.py judge F [--out judged.json]

Every pair of tests/racebench runs with stand-ins for its kernels.  For each race that the checker
states, the first access is held up, so that the second comes too early wherever nothing holds it
back: alone (`first`), or with everybody but the second held up a little (`crowd`).  A trial is
wrong if a read, or the memory at the end, is not what the host's order leaves there.

Judging exits with 1 if a repaired schedule went wrong, a trial was refused, or fewer than MIN_RULES
rules have a racy one that did.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from racebench_loader import Bench, load, pairs

from kpipe.codegen.proof.program import Program
from kpipe.codegen.proof.schedule_form import encode
from kpipe.runtime.schedules.form import from_json
from kpipe.runtime.schedules.memory import lay_out

PLAN, STRESSED, JUDGED = "kpipe.stress/1", "kpipe.stressed/1", "kpipe.stress_judged/1"
FIRST_US, CROWD_US = 400, 60
HOLD_US = FIRST_US + 200  # for which the second of two writers keeps what it wrote
PATTERNS = ("first", "crowd")
MIN_RULES = 5
NAME = "k"  # of every stand-in: names would only make more kernels to compile


@dataclass(frozen=True)
class Trial:
    """One schedule with one access held up."""

    rule: str
    file: str  # the pair's number in its rule
    side: str  # racy, fixed
    mode: str
    verdict: str  # of the race that is provoked
    race: str
    pattern: str
    schedule: dict[str, Any]
    delays: list[list[Any]]  # position, early, microseconds in front of the accesses
    holds: list[list[int]]  # position, microseconds behind the writes, which are then read back

    @property
    def id(self) -> str:
        """Unique in a plan."""
        parts = (self.rule, self.file, self.side, self.mode, self.race, self.pattern)
        return "/".join(parts)


def trials() -> tuple[list[Trial], dict[str, str]]:
    """Every trial, and why other schedules cannot be stood in for (by file and mode)."""
    found: list[Trial] = []
    left_out: dict[str, str] = {}
    for name, racy, fixed in pairs():
        rule, _, number = name.partition("/")
        benches = {"racy": load(racy), "fixed": load(fixed)}
        for mode, races in benches["racy"].races.items():
            for race in sorted(races):
                for side, bench in benches.items():
                    for pattern in PATTERNS:
                        try:
                            trial = _trial(rule, number, side, mode, race, pattern, bench)
                        except ValueError as error:
                            left_out[f"{name}, {mode}"] = str(error)
                            continue
                        found.append(trial)
    return found, left_out


def _trial(
    rule: str,
    number: str,
    side: str,
    mode: str,
    race: tuple[str, str, str, str, str],
    pattern: str,
    bench: Bench,
) -> Trial:
    program = bench.programs[mode]
    first, second, buffer, kind, verdict = race
    schedule = encode(program, touches=True)
    for segment in schedule["segments"]:
        for action in segment["actions"]:
            if action["do"] == "launch" and action["kind"] == "kernel":
                action["name"] = NAME
    delays = list(_delays(bench, mode, program, first, second, pattern))
    names = [bench.name(mode, position) for position in range(len(program.launches))]
    holds = [[names.index(second), HOLD_US]] if kind == "WAW" and second in names else []
    lay_out(from_json(schedule), {(place, early): us for place, early, us in delays}, dict(holds))
    said = f"{first} before {second}, {buffer}, {kind}"
    return Trial(rule, number, side, mode, verdict, said, pattern, schedule, delays, holds)


def _delays(
    bench: Bench, mode: str, program: Program, first: str, second: str, pattern: str
) -> Iterator[list[Any]]:
    """[position, early, microseconds]: in front of every access of the first, and of others."""
    from kpipe.codegen.proof.program import Kernel

    for position, launch in enumerate(program.launches):
        name = bench.name(mode, position)
        other = pattern == "crowd" and name != second and isinstance(launch.node, Kernel)
        us = FIRST_US if name == first else CROWD_US if other else 0
        if us:
            for early in sorted({access.early for access in launch.node.accesses} or {False}):
                yield [position, early, us]


def plan(path: Path) -> int:
    """Write the plan for the GPU's machine."""
    found, left_out = trials()
    listed = [
        {"id": one.id, "schedule": one.schedule, "delays": one.delays, "holds": one.holds}
        for one in found
    ]
    path.write_text(json.dumps({"schema": PLAN, "trials": listed}) + "\n")
    print(f"{path}: {len(found)} trials", file=sys.stderr)
    for name, why in left_out.items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    return 0


@dataclass
class Tally:
    """Schedules of one rule: how many ran, and how many went wrong at least once."""

    racy: int = 0
    racy_wrong: int = 0
    assumed: int = 0
    assumed_wrong: int = 0
    fixed: int = 0
    fixed_wrong: int = 0
    runs: int = 0
    wrong_runs: int = 0  # of racy schedules


def judge(
    results: list[dict[str, Any]], refused: Collection[str] = ()
) -> tuple[dict[str, Tally], list[str], list[str]]:
    """Tallies by rule; repaired schedules that went wrong; racy ones that never did.

    A schedule is one side of one pair in one mode; its trials count together, without those that
    were `refused` (their ids).  ValueError where the results are not those of today's plan.
    """
    by_id = {one["id"]: one for one in results}
    grouped: dict[tuple[str, str, str, str], list[Trial]] = defaultdict(list)
    for trial in trials()[0]:
        if trial.id in refused:
            continue
        if trial.id not in by_id:
            raise ValueError(f"the results lack {trial.id}: run today's plan")
        grouped[trial.rule, trial.file, trial.side, trial.mode].append(trial)
    tallies: dict[str, Tally] = defaultdict(Tally)
    broken, unseen = [], []
    for (rule, file, side, mode), members in grouped.items():
        tally = tallies[rule]
        wrong = sum(by_id[one.id]["wrong"] for one in members)
        runs = sum(by_id[one.id]["repetitions"] for one in members)
        name = f"{rule}/{file}, {mode}: {wrong} of {runs}"
        if side == "fixed":
            tally.fixed += 1
            tally.fixed_wrong += bool(wrong)
            broken += [name] if wrong else []
        elif any(one.verdict in ("racy", "dirty") for one in members):
            tally.racy += 1
            tally.racy_wrong += bool(wrong)
            tally.runs += runs
            tally.wrong_runs += wrong
            unseen += [] if wrong else [name]
        else:
            tally.assumed += 1
            tally.assumed_wrong += bool(wrong)
    return dict(tallies), broken, unseen


def table(tallies: dict[str, Tally]) -> list[str]:
    """Markdown, one rule a line."""
    lines = [
        "| rule | racy, seen wrong | wrong runs of these | assumed, seen wrong | repaired, wrong |",
        "|---|---|---|---|---|",
    ]
    for rule, one in tallies.items():
        assumed = f"{one.assumed_wrong} of {one.assumed}" if one.assumed else "-"
        racy = f"{one.racy_wrong} of {one.racy}" if one.racy else "-"
        runs = f"{one.wrong_runs} of {one.runs}" if one.racy else "-"
        cells = (rule, racy, runs, assumed, f"{one.fixed_wrong} of {one.fixed}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def judge_file(path: Path, out: Path | None) -> int:
    """Judge what came back; 1 for a repaired schedule that went wrong, a trial that was refused,
    or too few rules."""
    document = json.loads(path.read_text())
    if document.get("schema") != STRESSED:
        raise ValueError(f"{path} is not of schema {STRESSED}")
    refused = {one["id"]: one["error"] for one in document.get("refused", ())}
    tallies, broken, unseen = judge(document["results"], refused)
    print(f"{document['gpu']}, driver {document['driver']}")
    for line in table(tallies):
        print(line)
    shown = [rule for rule, one in tallies.items() if one.racy_wrong]
    for title, names in (("repaired and wrong", broken), ("racy and never wrong", unseen)):
        for name in names:
            print(f"{title}: {name}")
    for name, error in refused.items():
        print(f"refused: {name}: {error}")
    if out:
        head = {key: document[key] for key in ("gpu", "arch", "driver", "versions")}
        payload = {
            "schema": JUDGED,
            **head,
            "rules": {rule: vars(one) for rule, one in tallies.items()},
            "repaired_and_wrong": broken,
            "racy_and_never_wrong": unseen,
            "refused": refused,
            "results": [
                [one["id"], one["repetitions"], one["wrong"]] for one in document["results"]
            ],
        }
        out.write_text(json.dumps(payload, indent=1) + "\n")
    print(f"{len(shown)} rules with a schedule that went wrong, {len(broken)} broken repairs")
    return int(bool(broken or refused) or len(shown) < MIN_RULES)


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    planning = verbs.add_parser("plan")
    planning.add_argument("file", type=Path)
    judging = verbs.add_parser("judge")
    judging.add_argument("file", type=Path)
    judging.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.verb == "plan":
        return plan(options.file)
    return judge_file(options.file, options.out)


if __name__ == "__main__":
    sys.exit(main())
