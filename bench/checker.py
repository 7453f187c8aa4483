"""How often the checker of schedules is wrong, measured against the explorer.

    python bench/checker.py [--schedules N] [--seed S] [--out FILE] [--mutants] [--processes 2]

Runs N random schedules per rule set (eager, captured, mixed), and every program of two nodes.
Schedules without a conflicting pair of accesses are counted and dropped.  "Safe" and "racy" are
what the explorer finds with the documented reading; "as measured" grants m1 and m3 on top.  Exits
with 1 if the checker's pairs differ from the explorer's anywhere, under any reading, or with
--mutants if a deliberately wrong checker agrees with the explorer everywhere, or if the
abstraction loss (see `abstraction.py`) reaches its limit or has a cause that nothing explains.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import abstraction
from explorer.generator import MODES, random_program, two_kernel_programs, weakenings
from explorer.machine import racy_pairs as explored_pairs

from kpipe.codegen.proof.program import Access, Program

Pairs = frozenset[tuple[int, Access, int, Access]]

READINGS = {
    "doc": frozenset(),
    "m1": frozenset({"m1"}),
    "m3": frozenset({"m3"}),
    "m1_m3": frozenset({"m1", "m3"}),
}
EXHAUSTIVE = "two nodes"
CHUNK = 500
SHARES = 20  # parts of the exhaustive run
EXAMPLES = 3  # disagreements that are kept per rule set

ROWS = (
    ("schedules", "schedules"),
    ("conflict", "with a conflict"),
    ("safe", "safe by the documents"),
    ("clean", "clean as measured (m1 + m3)"),
    ("accepted", "racy accepted, schedules"),
    ("accepted_pairs", "racy accepted, pairs"),
    ("refused", "safe refused, schedules"),
    ("refused_pairs", "safe refused, pairs"),
    ("m1_differs", "pairs that differ under m1"),
    ("m3_differs", "pairs that differ under m3"),
    ("m1_m3_differs", "pairs that differ under m1 + m3"),
    ("policy", "policy refusals (racy by doc, clean)"),
    ("boundary", "safe, racy by one weakening"),
    ("boundary_refused", "  of these refused"),
    ("weakened", "weakened schedules compared"),
    ("weakened_differs", "  pairs that differ"),
    ("values_unsound", "without a race, not safe on values"),
)
ERRORS = (
    "accepted_pairs",
    "refused_pairs",
    "m1_differs",
    "m3_differs",
    "m1_m3_differs",
    "weakened_differs",
    "blocks_differ",
    "values_unsound",
)


@dataclass
class Tally:
    """Counts of one rule set; `mutants` counts (name, what)."""

    counts: Counter[str] = field(default_factory=Counter)
    mutants: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Sum up another part of the same rule set."""
        self.counts.update(other.counts)  # unlike +=, keeps what was counted as zero
        self.mutants.update(other.mutants)
        self.examples = [*self.examples, *other.examples][:EXAMPLES]


def named(program: Program, pairs: frozenset[tuple]) -> Pairs:
    """Pairs with accesses themselves; an access may be given as its position in the node."""
    nodes = [launch.node for launch in program.launches]

    def access(number: int, which: int | Access) -> Access:
        return which if isinstance(which, Access) else nodes[number].accesses[which]

    return frozenset((i, access(i, a), j, access(j, b)) for i, a, j, b in pairs)


def has_conflict(program: Program) -> bool:
    """Whether two launches conflict at all."""
    nodes = [launch.node for launch in program.launches]
    return any(
        a.conflicts(b)
        for j, later in enumerate(nodes)
        for earlier in nodes[:j]
        for a in earlier.accesses
        for b in later.accesses
    )


def compare(tally: Tally, program: Program, checker: Callable[..., frozenset]) -> Pairs:
    """Count one schedule with a conflict; the racy pairs that the explorer documents."""
    counts = tally.counts
    counts["conflict"] += 1
    found = {
        reading: (
            named(program, explored_pairs(program, 1, assumptions)),
            named(program, checker(program, assumptions=assumptions)),
        )
        for reading, assumptions in READINGS.items()
    }
    truth, claimed = found["doc"]
    measured = found["m1_m3"][0]
    counts["safe"] += not truth
    counts["clean"] += not measured
    counts["accepted"] += bool(truth) and not claimed
    counts["refused"] += not truth and bool(claimed)
    counts["accepted_pairs"] += len(truth - claimed)
    counts["refused_pairs"] += len(claimed - truth)
    counts["policy"] += bool(claimed) and not measured
    for reading in ("m1", "m3", "m1_m3"):
        counts[f"{reading}_differs"] += len(found[reading][0] ^ found[reading][1])
    if len(tally.examples) < EXAMPLES:
        for reading, (explored, checked) in found.items():
            if explored != checked:
                tally.examples.append(describe(program, reading, explored, checked))
    return truth


def describe(program: Program, reading: str, explored: Pairs, checked: Pairs) -> str:
    """A disagreement in words: the program, then what each side has alone."""
    lines = [f"reading {reading}"]
    for segment in program.segments:
        lines.append(f"segment captured={segment.captured} stream={segment.stream}")
        lines += [f"  {action}" for action in segment.actions]
    lines += [f"explorer alone: {pair}" for pair in explored - checked]
    lines += [f"checker alone: {pair}" for pair in checked - explored]
    return "\n".join(lines)


def boundary(
    tally: Tally, program: Program, checker: Callable[..., frozenset], rng: random.Random
) -> None:
    """For a safe schedule: look for a weakening that makes it racy, and compare on the way."""
    weaker = list(weakenings(program))
    rng.shuffle(weaker)
    for changed in weaker:
        truth = named(changed, explored_pairs(changed))
        claimed = named(changed, checker(changed))
        tally.counts["weakened"] += 1
        tally.counts["weakened_differs"] += len(truth ^ claimed)
        if truth != claimed and len(tally.examples) < EXAMPLES:
            tally.examples.append(describe(changed, "doc", truth, claimed))
        if truth:
            tally.counts["boundary"] += 1
            tally.counts["boundary_refused"] += bool(checker(program))
            return


def random_part(seed: int, mode: str, start: int, stop: int, mutants: bool) -> Tally:
    """Schedules start to stop of a rule set; each has its own seed."""
    from kpipe.codegen.proof.races import racy_pairs as checker

    wrong = load_mutants() if mutants else {}
    tally = Tally()
    for number in range(start, stop):
        rng = random.Random(f"{seed}:{mode}:{number}")
        program = random_program(rng, mode)
        tally.counts["schedules"] += 1
        if not has_conflict(program):
            continue
        truth = compare(tally, program, checker)
        if not truth:
            boundary(tally, program, checker, rng)
        draw = random.Random(f"{seed}:{mode}:{number}:triggers")
        abstraction.measure(tally.counts, program, bool(truth), checker(program), draw)
        for name, rule in wrong.items():
            claimed = named(program, rule(program))
            tally.mutants[name, "accepted"] += bool(truth) and not claimed
            tally.mutants[name, "refused"] += not truth and bool(claimed)
            tally.mutants[name, "pairs"] += len(truth ^ claimed)
    return tally


def exhaustive_part(number: int) -> Tally:
    """One share of the two-node programs, with one and with two blocks per kernel."""
    from kpipe.codegen.proof.races import racy_pairs as checker

    tally = Tally()
    for program in two_kernel_programs(slice(number, None, SHARES)):
        tally.counts["schedules"] += 1
        truth = compare(tally, program, checker)
        two_blocks = named(program, explored_pairs(program, 2))
        tally.counts["blocks_differ"] += len(truth ^ two_blocks)
    return tally


def load_mutants() -> dict[str, Callable[[Program], frozenset]]:
    """The wrong checkers, or none where the module is missing."""
    try:
        return importlib.import_module("kpipe.codegen.proof.mutants").MUTANTS
    except ModuleNotFoundError as error:
        if error.name != "kpipe.codegen.proof.mutants":
            raise
        return {}


def part(task: tuple) -> tuple[str, Tally]:
    """Run one task in a worker."""
    mode, *arguments = task
    if mode == EXHAUSTIVE:
        return mode, exhaustive_part(*arguments)
    seed, start, stop, mutants = arguments
    return mode, random_part(seed, mode, start, stop, mutants)


def parts(tasks: list[tuple], processes: int) -> Iterator[tuple[str, Tally]]:
    """Results of all tasks as they come."""
    if processes == 1:
        yield from map(part, tasks)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap_unordered(part, tasks)


def run(options: argparse.Namespace) -> dict[str, Tally]:
    """All tasks, with a progress line on stderr when they take longer than two seconds."""
    tasks: list[tuple] = [(EXHAUSTIVE, share) for share in range(SHARES)]
    for start in range(0, options.schedules, CHUNK):
        stop = min(start + CHUNK, options.schedules)
        tasks += [(mode, options.seed, start, stop, options.mutants) for mode in MODES]
    tallies = {mode: Tally() for mode in (*MODES, EXHAUSTIVE)}
    started = time.monotonic()
    shown = False
    for done, (mode, tally) in enumerate(parts(tasks, options.processes), start=1):
        tallies[mode].add(tally)
        elapsed = time.monotonic() - started
        if elapsed > 2:
            print(f"\r{done} of {len(tasks)} parts, {elapsed:.0f} s", end="", file=sys.stderr)
            shown = True
    if shown:
        print(file=sys.stderr)
    return tallies


def print_table(tallies: dict[str, Tally]) -> None:
    """One column per rule set; the bounds are three over the number of schedules without error."""
    print(f"{'':<38}" + "".join(f"{mode:>12}" for mode in tallies))
    for key, title in ROWS:
        cells = "".join(f"{tally.counts[key]:>12,}" for tally in tallies.values())
        print(f"{title:<38}{cells}")
    for key, title in (("conflict", "policy refusals, % of clean"), ("bound", "95 % bounds, %")):
        cells = []
        for tally in tallies.values():
            racy = tally.counts["conflict"] - tally.counts["safe"]
            if key == "bound":
                bounds = [300 / max(1, n) for n in (racy, tally.counts["safe"])]
                cells.append(f"{bounds[0]:.3f}/{bounds[1]:.3f}")
            else:
                cells.append(f"{100 * tally.counts['policy'] / max(1, tally.counts['clean']):.2f}")
        print(f"{title:<38}" + "".join(f"{cell:>12}" for cell in cells))
    blocks = tallies[EXHAUSTIVE].counts["blocks_differ"]
    print(f"two blocks per kernel against one, {EXHAUSTIVE}: {blocks} pairs differ")


def print_mutants(tallies: dict[str, Tally]) -> list[str]:
    """One row per wrong checker: racy accepted / safe refused per rule set; names that survived."""
    names = list(load_mutants())
    if not names:
        print("no mutants: kpipe.codegen.proof.mutants does not exist", file=sys.stderr)
        return []
    print(f"\n{'wrong rule, accepted / refused':<38}" + "".join(f"{mode:>12}" for mode in MODES))
    survivors = []
    for name in names:
        counts = [tallies[mode].mutants for mode in MODES]
        cells = [f"{c[name, 'accepted']}/{c[name, 'refused']}" for c in counts]
        if not any(c[name, "pairs"] for c in counts):
            survivors.append(name)
        print(f"{name:<38}" + "".join(f"{cell:>12}" for cell in cells))
    print(f"{len(names) - len(survivors)} of {len(names)} killed")
    return survivors


def payload(options: argparse.Namespace, tallies: dict[str, Tally], seconds: float) -> dict:
    """The raw numbers."""
    return {
        "schema": "kpipe.bench.checker/1",
        "schedules": options.schedules,
        "seed": options.seed,
        "python": platform.python_version(),
        "seconds": round(seconds, 1),
        "results": {
            mode: {key: n for key, n in sorted(tally.counts.items()) if "loss" not in key}
            for mode, tally in tallies.items()
        },
        "abstraction_loss": {mode: abstraction.raw(tallies[mode].counts) for mode in MODES},
        "mutants": {
            mode: {f"{name}: {what}": n for (name, what), n in sorted(tally.mutants.items())}
            for mode, tally in tallies.items()
        },
        "disagreements": {mode: tally.examples for mode, tally in tallies.items()},
    }


def main() -> None:
    """Measure, print, write; see the top of the file for the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=20_000, help="per rule set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file of the raw numbers")
    parser.add_argument("--mutants", action="store_true", help="try the wrong checkers, too")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    started = time.monotonic()
    tallies = run(options)
    print_table(tallies)
    losses = {mode: tallies[mode].counts for mode in MODES}
    abstraction.print_losses(losses)
    missed = abstraction.misses(losses)
    survivors = print_mutants(tallies) if options.mutants else []
    if options.out:
        raw = payload(options, tallies, time.monotonic() - started)
        options.out.write_text(json.dumps(raw, indent=2) + "\n")
    for name in survivors:
        print(f"survived: {name}")
    for miss in missed:
        print(f"missed: {miss}")
    wrong = any(tally.counts[key] for tally in tallies.values() for key in ERRORS)
    for tally in tallies.values():
        for example in tally.examples[:1]:
            print(f"\ndisagreement\n{example}")
    sys.exit(1 if wrong or survivors or missed else 0)


if __name__ == "__main__":
    main()
