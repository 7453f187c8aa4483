"""Compares the orders that a GPU broke with the orders that the checker and its mutants claim.

    python bench/fuzz/judge.py fuzz.json [--out judged.json]

An order says that a moment of one launch (trigger T, exit X, completion E) precedes a moment of a
later one (start S, wait W).  Counted are only orders that an execution can be seen to break.  Exits
with 1 if the checker claims an order that was broken, or if no claim of a mutant was broken that
a GPU refutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from schedules import SOURCES, TARGETS, bit, decode, mode_of, observable, pairs

from kpipe.codegen.proof.mutants import MUTANTS
from kpipe.codegen.proof.order import Order

MODES = ("eager", "captured", "mixed")
DOCUMENTED = "the documents"
READINGS = ("m1", "m3", "m1 and m3")
EXAMPLES = 5

_M1 = frozenset({"m1"})


class Judgement:
    """Counts per (rule, mode): orders claimed, those of them that the documents do not claim, and
    broken ones, which for every other rule are among those that the documents do not claim."""

    def __init__(self) -> None:
        self.claimed: Counter[tuple[str, str]] = Counter()
        self.extra: Counter[tuple[str, str]] = Counter()
        self.broken: Counter[tuple[str, str]] = Counter()
        self.open: Counter[str] = Counter()  # orders that the documents leave open ...
        self.seen: Counter[str] = Counter()  # ... and that were seen broken
        self.examples: list[str] = []

    def add(self, line: str, broken: bytes) -> None:
        """Judge one schedule.  Raises ValueError if the results do not fit it."""
        program = decode(line)
        mode = mode_of(program)
        places = pairs(len(program.launches))
        if len(broken) != len(places):
            raise ValueError(f"{len(broken)} results for {len(places)} pairs of {line!r}")
        masks = [observable(program, *place) for place in places]
        if any(found & ~mask for found, mask in zip(broken, masks, strict=True)):
            raise ValueError(f"an order of {line!r} was broken that nobody can see")
        order = Order(program)
        right = claims(order, masks)
        self._count(DOCUMENTED, mode, right, right, broken)
        for found, mask, claim in zip(broken, masks, right, strict=True):
            self.open[mode] += (mask & ~claim).bit_count()
            self.seen[mode] += (found & ~claim).bit_count()
            if found & claim and len(self.examples) < EXAMPLES:
                self.examples.append(describe(line, order, right, broken))
        m1 = claims(Order(program, _M1), masks)
        for name, claim in zip(
            READINGS, (m1, visible_at_exit(right, masks), visible_at_exit(m1, masks)), strict=True
        ):
            self._count(name, mode, claim, right, broken)
        for name, mutant in MUTANTS.items():
            self._count(name, mode, claims(mutant.order(program), masks), right, broken)

    def _count(
        self, rule: str, mode: str, claim: list[int], right: list[int], broken: bytes
    ) -> None:
        key = rule, mode
        for mine, documented, found in zip(claim, right, broken, strict=True):
            self.claimed[key] += mine.bit_count()
            self.extra[key] += (mine & ~documented).bit_count()
            counted = mine if rule == DOCUMENTED else mine & ~documented
            self.broken[key] += (counted & found).bit_count()

    def total(self, rule: str) -> int:
        """Broken claims of a rule in all modes."""
        return sum(self.broken[rule, mode] for mode in MODES)


def claims(order: Order, masks: list[int]) -> list[int]:
    """Orders that hold, as bits of one number per pair, restricted to `masks`."""
    launches = len(order.launches)
    moments = [
        {letter: order.number((position, letter)) for letter in (*SOURCES, *TARGETS)}
        for position in range(launches)
    ]
    found = []
    for (first, second), mask in zip(pairs(launches), masks, strict=True):
        claim = 0
        for target in TARGETS:
            before = order.before[moments[second][target]]
            for source in SOURCES:
                if before >> moments[first][source] & 1:
                    claim |= bit(source, target)
        found.append(claim & mask)
    return found


def visible_at_exit(claim: list[int], masks: list[int]) -> list[int]:
    """The claims under m3: where an exit precedes, the completion does."""
    completed = []
    for mine, mask in zip(claim, masks, strict=True):
        for target in TARGETS:
            if mine & bit("X", target):
                mine |= bit("E", target)
        completed.append(mine & mask)
    return completed


def describe(line: str, order: Order, right: list[int], broken: bytes) -> str:
    """The first claimed order of a schedule that was broken, with the reasons to claim it."""
    for (first, second), claim, found in zip(
        pairs(len(order.launches)), right, broken, strict=True
    ):
        for source in SOURCES:
            for target in TARGETS:
                if claim & found & bit(source, target):
                    steps = order.chain((first, source), (second, target))
                    reasons = "".join(f"\n  {step.text}" for step in steps)
                    return f"{line}\n{source}#{first} before {target}#{second}{reasons}"
    raise ValueError(f"no claimed order of {line!r} was broken")


def judge(raw: dict) -> Judgement:
    """The judgement of a whole file; ValueError if it is of another kind."""
    if raw.get("schema") != "kpipe.bench.fuzz/1":
        raise ValueError(f"not a file of run_gpu.py: schema {raw.get('schema')!r}")
    judgement = Judgement()
    for line, broken in raw["results"]:
        judgement.add(line, bytes.fromhex(broken))
    return judgement


def failures(judgement: Judgement) -> list[str]:
    """What is wrong: broken claims of the checker, and refuted mutants that got away."""
    found = [
        f"{judgement.broken[DOCUMENTED, mode]} claims broken in mode {mode}"
        for mode in MODES
        if judgement.broken[DOCUMENTED, mode]
    ]
    return found + [
        f"no claim of {name} was broken"
        for name, mutant in MUTANTS.items()
        if mutant.refuted and not judgement.total(name)
    ]


def print_table(judgement: Judgement) -> None:
    """Claims and broken ones; for the other rules, claims that the documents do not make."""
    print(f"{'claims / broken':<30}" + "".join(f"{mode:>20}" for mode in MODES))
    for rule in (DOCUMENTED, *READINGS, *MUTANTS):
        counts = judgement.claimed if rule == DOCUMENTED else judgement.extra
        title = rule if rule == DOCUMENTED else f"+ {rule}"
        cells = [f"{counts[rule, m]:,} / {judgement.broken[rule, m]:,}" for m in MODES]
        print(f"{title:<30}" + "".join(f"{cell:>20}" for cell in cells))
    cells = [f"{judgement.open[m]:,} / {judgement.seen[m]:,}" for m in MODES]
    print(f"{'left open / seen broken':<30}" + "".join(f"{cell:>20}" for cell in cells))


def payload(raw: dict, judgement: Judgement) -> dict[str, object]:
    """The numbers, without the schedules."""
    rules = {
        rule: {
            mode: {
                "claimed": judgement.claimed[rule, mode],
                "extra": judgement.extra[rule, mode],
                "broken": judgement.broken[rule, mode],
            }
            for mode in MODES
        }
        for rule in (DOCUMENTED, *READINGS, *MUTANTS)
    }
    head = {name: value for name, value in raw.items() if name not in ("results", "schema")}
    return {
        "schema": "kpipe.bench.fuzz_judged/1",
        "run": head,
        "rules": rules,
        "left_open": {m: {"orders": judgement.open[m], "broken": judgement.seen[m]} for m in MODES},
        "failures": failures(judgement),
        "examples": judgement.examples,
    }


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("raw", type=Path)
    parser.add_argument("--out", type=Path, help="JSON file of the counts")
    options = parser.parse_args()
    raw = json.loads(options.raw.read_text())
    judgement = judge(raw)
    print(f"{raw['device']}, driver {raw['driver'] or '-'}: {raw['schedules']} schedules")
    print_table(judgement)
    if options.out:
        options.out.write_text(json.dumps(payload(raw, judgement), indent=2) + "\n")
    for example in judgement.examples:
        print(f"\nbroken\n{example}")
    wrong = failures(judgement)
    for text in wrong:
        print(f"failure: {text}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
