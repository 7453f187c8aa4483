"""What a change does to the numbers, in words."""

from __future__ import annotations

from collections.abc import Iterable

from kpipe.codegen.ops.contract import Kind
from kpipe.codegen.plan.model import Launch, PipelinePlan, StepPlan
from kpipe.codegen.review.launches import computes, replacements

ROUNDING = "agrees within the declared rounding, not bit for bit"


def step_numerics(old: StepPlan, new: StepPlan) -> tuple[str, ...]:
    """What two launch lists compute differently; empty where they are bitwise equal."""
    before = {launch.name: launch for launch in old.launches if computes(launch)}
    after = {launch.name: launch for launch in new.launches if computes(launch)}
    gone = [launch for name, launch in before.items() if name not in after]
    come = [launch for name, launch in after.items() if name not in before]
    pairs, removed, added = replacements(gone, come)
    lines = [
        f"{_sum(new_ones)} {'replace' if len(new_ones) > 1 else 'replaces'} {_sum(old_ones)}"
        + _conventions(old_ones, new_ones)
        for old_ones, new_ones in pairs
    ]
    lines += [f"{launch.name} is gone{_taken_over(launch, new)}" for launch in removed]
    lines += [f"{launch.name} is new{_taken_from(launch, old)}" for launch in added]
    for name, launch in after.items():
        if name in before:
            lines += _words(before[name], launch)
    return tuple(lines)


def declared_numerics(old: PipelinePlan, new: PipelinePlan) -> tuple[str, ...]:
    """Rounding points, quantisers and scalars that differ, in words."""
    lines = []
    for name in dict.fromkeys((*old.numerics, *new.numerics)):
        before, after = old.numerics.get(name, "-"), new.numerics.get(name, "-")
        if before != after:
            lines.append(f"{_numeric_word(name)}: {before} -> {after}")
    for name in dict.fromkeys((*old.scalars, *new.scalars)):
        first, second = old.scalars.get(name), new.scalars.get(name)
        if first != second:
            lines.append(f"scalar {name}: {_scalar(first)} -> {_scalar(second)}")
    formats = {cache.name: cache.format for cache in old.caches}
    for cache in new.caches:
        before = formats.get(cache.name, cache.format)
        if before != cache.format:
            lines.append(f"cache {cache.name}: format {before} -> {cache.format}")
    return tuple(lines)


def _numeric_word(name: str) -> str:
    point = name.removeprefix("round_")
    return f"rounding point {point}" if point != name else name


def _scalar(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"


def _sum(launches: Iterable[Launch]) -> str:
    return " + ".join(launch.name for launch in launches)


def _taken_over(launch: Launch, new: StepPlan) -> str:
    """Who writes what a removed launch wrote."""
    written = _results(launch)
    heirs = [one.name for one in new.launches if written & _results(one)]
    return f", {' and '.join(heirs)} writes {', '.join(sorted(written))}" if heirs else ""


def _taken_from(launch: Launch, old: StepPlan) -> str:
    """Who wrote before what an added launch writes."""
    written = _results(launch)
    known = [one.name for one in old.launches if written & _results(one)]
    return f", {' and '.join(known)} wrote {', '.join(sorted(written))} before" if known else ""


def _results(launch: Launch) -> set[str]:
    return {binding.target for binding in launch.bindings if binding.access.writes}


def _conventions(old: Iterable[Launch], new: Iterable[Launch]) -> str:
    """LSE base and empty rows, where one op states them otherwise than the other."""
    words = []
    for what, key in (("LSE base", "lse_base"), ("rows without keys", "empty_row")):
        before = {getattr(one.contract, key) for one in old} - {""}
        after = {getattr(one.contract, key) for one in new} - {""}
        if before and after and before != after:
            words.append(f"{what} {'/'.join(sorted(before))} -> {'/'.join(sorted(after))}")
    return f" ({'; '.join(words)})" if words else ""


def _words(old: Launch, new: Launch) -> list[str]:
    lines = []
    options = dict(old.options)
    for name, value in new.options:
        if options.get(name, value) != value:
            lines.append(f"{new.name}: {name} {options[name]} -> {value}")
    lost, won = _inputs(old) - _inputs(new), _inputs(new) - _inputs(old)
    if lost and won:
        taken = f"{', '.join(sorted(won))} in place of {', '.join(sorted(lost))}"
        lines.append(f"{new.name} starts from {taken}")
    if old.tactic != new.tactic:
        lines.append(f"{new.name}: another tile, sums may be taken in another order")
    return lines


def _inputs(launch: Launch) -> set[str]:
    """Activations that the launch reads, by operand."""
    return {
        binding.operand
        for binding in launch.bindings
        if binding.kind is Kind.BUFFER and binding.access.reads
    }
