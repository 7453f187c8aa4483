"""`python -m kpipe.runtime.tune PLAN --out results.json`: measures what a tuning plan lists.

Modes and tiles are timed as whole captured layers, chained, with weights and caches of their own:
what a tile leaves of shared memory decides how early the next launch starts, and that shows in
the layer only.  Of ranks that exchange words rank 0 is timed alone.  The candidates of a step are
all captured first, then replayed in rounds, each in another order, so that a machine that drifts
drifts for all of them.  Results are appended as they come; the same command goes on where it was
stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kpipe.runtime.tune_plan import Plan, PlanError, Step, read_plan
from kpipe.runtime.tune_results import SCHEMA, Results, ResultsError

ROUNDS = 7
WRONG = 0.05  # of the present choice's output: a candidate that differs by more is not timed


class Ready(Protocol):
    """A candidate that can be timed; `difference` is its output's distance from the present."""

    difference: float

    def us(self) -> float:
        """Microseconds of a layer, the median of some replays."""


class Bench(Protocol):
    """Makes the candidates of a step ready, on a machine or a stand-in for one."""

    def open(self, step: Step, names: Sequence[str]) -> Mapping[str, Ready | str]:
        """Each of these candidates, or why it cannot run."""

    def alive(self) -> bool:
        """Whether the machine still answers."""


class Lost(RuntimeError):
    """The machine does not answer any more; what was measured before is kept."""


def measure(
    plan: Plan,
    results: Results,
    bench: Bench,
    *,
    rounds: int = ROUNDS,
    late: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[str, ...]:
    """Measure what `results` lacks, until `late()`; returns the keys of steps left unfinished.

    Raises Lost where the machine stops answering; the candidate that ran is noted as failed.
    """
    for number, step in enumerate(plan.steps, 1):
        if _finished(step, results, rounds):
            continue
        if late():
            break
        say(f"{number}/{len(plan.steps)}  {step.key}: {len(step.candidates)} candidates")
        _measure_step(step, results, bench, rounds, late)
    return tuple(step.key for step in plan.steps if not _finished(step, results, rounds))


def _finished(step: Step, results: Results, rounds: int) -> bool:
    """Whether every round is there, or none can be: without the present choice or any other."""
    return not _able(step, results) or len(results.rounds.get(step.key, {})) >= rounds


def _able(step: Step, results: Results) -> list[str]:
    """Names of the candidates that can be compared; none where that is less than two."""
    failed = results.failed.get(step.key, {})
    names = [one.name for one in step.candidates if one.name not in failed]
    return names if len(names) > 1 and names[0] == step.present else []


def _measure_step(
    step: Step, results: Results, bench: Bench, rounds: int, late: Callable[[], bool]
) -> None:
    ready: dict[str, Ready] = {}
    for name, one in bench.open(step, _able(step, results)).items():
        if isinstance(one, str):
            _fail(step, results, name, one)
        elif not one.difference <= WRONG:
            said = f"its output is {one.difference:.3g} away from the present choice's"
            _fail(step, results, name, f"{said}, more than {WRONG:.3g}")
        else:
            ready[name] = one
    found = {name: round(one.difference, 6) for name, one in ready.items()}
    results.add({"step": step.key, "differences": found})
    if not bench.alive():
        raise Lost(f"{step.key}: the device stopped answering while candidates were made ready")
    for number in range(rounds):
        if late() or not _able(step, results):
            return
        if number not in results.rounds.get(step.key, {}):
            us = _round(step, results, bench, ready, number)
            results.add({"step": step.key, "round": number, "us": us})


def _round(
    step: Step, results: Results, bench: Bench, ready: dict[str, Ready], number: int
) -> dict[str, float]:
    """One time of each candidate; rounds begin with different ones."""
    names = list(ready)
    turned = [*names[number % len(names) :], *names[: number % len(names)]]
    us = {}
    for name in turned:
        try:
            us[name] = ready[name].us()
        except Exception as error:  # whatever it was, the others are still worth their times
            _fail(step, results, name, f"{type(error).__name__}: {error}")
            del ready[name]
            if not bench.alive():
                raise Lost(f"{step.key}: the device stopped answering at `{name}`") from None
    return {name: us[name] for name in names if name in us}


def _fail(step: Step, results: Results, name: str, error: str) -> None:
    results.add({"step": step.key, "failed": name, "error": error[:400]})


def main(argv: list[str]) -> int:
    """Run; returns 0 (all measured), 1 (some steps left), 2 (usage), 4 (no device, or lost)."""
    options = _options(argv)
    try:
        plan = read_plan(options.plan)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print(f"error: {plan.pipeline}: this machine has no CUDA device", file=sys.stderr)
        return 4
    return _run(plan, options)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kpipe.runtime.tune", description=__doc__.partition("\n\n")[2].replace("\n", " ")
    )
    parser.add_argument("plan", type=Path, help="a folder that `kpipe tune plan` has written")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="results; resumed")
    parser.add_argument("--minutes", type=float, metavar="N", help="stop after that long")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="compiling processes")
    return parser.parse_args(argv)


def _run(plan: Plan, options: argparse.Namespace) -> int:
    from kpipe.runtime.metadata import LayerError
    from kpipe.runtime.tune_bench import DeviceBench, header

    started = time.monotonic()
    limit = started + 60 * options.minutes if options.minutes else float("inf")

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {line}", file=sys.stderr, flush=True)

    try:
        results = Results(options.out, header(plan, SCHEMA))
        bench = DeviceBench(plan)
        waiting = [s for s in plan.steps if not _finished(s, results, options.rounds)]
        with bench.compiling(waiting, options.jobs, say):
            left = measure(
                plan,
                results,
                bench,
                rounds=options.rounds,
                late=lambda: time.monotonic() > limit,
                say=say,
            )
    except ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Lost, LayerError) as error:
        print(f"error: {error}; what was measured is in {options.out}", file=sys.stderr)
        return 4
    failed = sum(len(names) for names in results.failed.values())
    done = len(plan.steps) - len(left)
    say(f"{done} of {len(plan.steps)} steps measured, {failed} candidates failed: {options.out}")
    if left:
        print("the same command measures the rest", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
