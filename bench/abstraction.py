"""What the checker refuses although a finer truth than its contracts knows it to be safe.

Three truths, each measured on the random schedules of `bench/checker.py`:

values    every execution reads and leaves what host order does (`explorer.values`)
consumed  a read in front of its kernel's trigger is over at the trigger, not at the exit; where
          the trigger lies among the accesses is drawn, each cut equally likely
both      values, with reads consumed like that

The first two are gated.  Two more for comparison: `latest`, consumed with each trigger behind all
that may lie in front of it, and `fenced`, in which a store in front of a trigger with a release
fence is over at the trigger (drawn as for `consumed`; half of the random kernels are fenced).
"""

from __future__ import annotations

import math
import random
from collections import Counter

from explorer.machine import Pair
from explorer.machine import racy_pairs as explored_pairs
from explorer.placement import Site, fenced_writes, latest_cut, random_cut, reads
from explorer.values import CellValues, cell_values, value_safe

from kpipe.codegen.proof.program import Program

LIMIT = 2.0  # percent of the schedules that are safe in the finer truth
ENOUGH = 1000  # safe schedules; fewer decide nothing about a percentage
GATED = ("values", "consumed")
TRUTHS = {
    "values": "values",
    "consumed": "reads consumed before the trigger",
    "both": "both together, not gated",
    "latest": "consumed, triggers as late as can be, not gated",
    "fenced": "fenced triggers publish, not gated",
}
DEAD = "dead write"
OWN = "write that its own kernel alone reads"
CONSUMED = "read consumed before the trigger"
PUBLISHED = "store published by a fenced trigger"
UNEXPLAINED = "unexplained"


def measure(
    counts: Counter[str], program: Program, racy: bool, claimed: frozenset[Pair], rng: random.Random
) -> None:
    """Count one schedule with a conflict: `racy` by the documents, and what the checker says.

    A schedule without a race has to be safe on values, or one of the two is wrong.
    """
    if not racy:
        counts["values_unsound"] += not value_safe(program)
        return
    if not claimed:
        return
    cut, latest = random_cut(program, rng), latest_cut(program)
    consumed = reads(program, cut)
    for name, truth in (
        ("consumed", consumed),
        ("latest", reads(program, latest)),
        ("fenced", fenced_writes(program, cut)),
    ):
        left = explored_pairs(program, released=truth) if truth else claimed
        if not left:
            _count(counts, name, {_over_at_trigger(program, pair, truth) for pair in claimed})
    for name, sites in (("values", frozenset()), ("both", consumed)):
        if value_safe(program, sites):
            left = explored_pairs(program, released=sites) if sites else claimed
            seen = cell_values(program, sites)
            early = {_over_at_trigger(program, pair, sites) for pair in claimed - left}
            _count(counts, name, early | {_unseen(program, pair, seen) for pair in left & claimed})


def _count(counts: Counter[str], truth: str, classes: set[str]) -> None:
    counts[f"loss {truth}"] += 1
    counts[f"loss {truth}: {' and '.join(sorted(classes))}"] += 1


def _over_at_trigger(program: Program, pair: Pair, sites: frozenset[Site]) -> str:
    """Why a pair is safe if the accesses of `sites` are over at their kernels' triggers."""
    launch, place = pair[:2]
    if (launch, place) not in sites:
        return UNEXPLAINED
    return PUBLISHED if program.launches[launch].node.accesses[place].write else CONSUMED


def _unseen(program: Program, pair: Pair, seen: tuple[CellValues, ...]) -> str:
    """Why nobody notices that two accesses are unordered: both write what nobody else reads."""
    first, second = pair[:2], pair[2:]
    if not all(program.launches[i].node.accesses[a].write for i, a in (first, second)):
        return UNEXPLAINED
    readers: set[tuple[int, int]] = set()  # who reads whose tag
    for cell in seen:
        if first in cell.cell and second in cell.cell:
            if {first, second} & cell.finals:
                return UNEXPLAINED
            readers |= {(i, tag[0]) for i, _, tag in cell.reads if tag in (first, second)}
    if any(reader != author for reader, author in readers):
        return UNEXPLAINED
    return OWN if readers else DEAD


def percent(counts: Counter[str], truth: str) -> float:
    """Refused, of all schedules that are safe in the truth."""
    refused = counts[f"loss {truth}"]
    return 100 * refused / max(1, counts["safe"] + refused)


def upper_bound(found: int, tried: int) -> float:
    """One-sided 95 % bound on a probability, exact (Clopper and Pearson), for found < tried."""

    def at_most_found(chance: float) -> float:
        yes, no = math.log(chance), math.log1p(-chance)
        return sum(
            math.exp(
                math.lgamma(tried + 1)
                - math.lgamma(k + 1)
                - math.lgamma(tried - k + 1)
                + k * yes
                + (tried - k) * no
            )
            for k in range(found + 1)
        )

    low, high = found / tried, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most_found(middle) > 0.05 else (low, middle)
    return high


def raw(counts: Counter[str]) -> dict[str, dict[str, object]]:
    """Figures of one rule set: schedules, percent of the safe ones, its bound, and classes."""
    figures: dict[str, dict[str, object]] = {}
    for truth in TRUTHS:
        refused = counts[f"loss {truth}"]
        safe = counts["safe"] + refused
        figures[truth] = {
            "safe": safe,
            "refused": refused,
            "percent": round(percent(counts, truth), 3),
            "bound_95": round(100 * upper_bound(refused, safe), 3) if counts["safe"] else 100.0,
            "classes": _classes(counts, truth),
        }
    return figures


def _classes(counts: Counter[str], truth: str) -> dict[str, int]:
    prefix = f"loss {truth}: "
    return {key.removeprefix(prefix): n for key, n in counts.items() if key.startswith(prefix)}


def print_losses(counts: dict[str, Counter[str]]) -> None:
    """One column per rule set and one for all: refused, percent with its bound, the classes."""
    counts = {**counts, "all": sum(counts.values(), Counter())}
    figures = {mode: raw(column) for mode, column in counts.items()}
    print(f"\n{'abstraction loss, refused but safe':<54}" + "".join(f"{m:>12}" for m in counts))
    for truth, title in TRUTHS.items():
        gate = f", gate {LIMIT:g} %" if truth in GATED else ""
        columns = [figure[truth] for figure in figures.values()]
        _row(title + gate, [f"{column['refused']:,}" for column in columns])
        cells = [f"{column['percent']:.2f}/{column['bound_95']:.2f}" for column in columns]
        _row("  % of safe / 95 % bound", cells)
        for name in sorted(_classes(counts["all"], truth)):
            _row(f"  {name}", [f"{_classes(c, truth).get(name, 0):,}" for c in counts.values()])


def _row(title: str, cells: list[str]) -> None:
    print(f"{title:<54}" + "".join(f"{cell:>12}" for cell in cells))


def misses(counts: dict[str, Counter[str]]) -> list[str]:
    """Gated figures that reach the limit, and losses that nothing explains, in words."""
    found = []
    for mode, column in counts.items():
        for truth in GATED:
            figure = percent(column, truth)
            if column["safe"] >= ENOUGH and figure >= LIMIT:
                found.append(f"abstraction loss, {mode}, {TRUTHS[truth]}: {figure:.2f} %")
        unexplained = sum(n for key, n in column.items() if UNEXPLAINED in key)
        if unexplained:
            found.append(f"abstraction loss, {mode}: {unexplained} unexplained")
    return found
