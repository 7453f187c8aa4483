"""Names of the generated methods: one per distinct launch list."""

from __future__ import annotations

from kpipe.codegen.plan.model import Method, StepPlan


def name_methods(plans: tuple[StepPlan, ...]) -> tuple[Method, ...]:
    """Plans grouped by what they launch; named after the mode, and after the ops that differ
    where one mode has several lists."""
    groups: dict[tuple, list[StepPlan]] = {}
    for plan in plans:
        groups.setdefault(plan.identity, []).append(plan)
    by_mode: dict[str, list[list[StepPlan]]] = {}
    for group in groups.values():
        by_mode.setdefault(group[0].mode, []).append(group)
    methods: list[Method] = []
    for mode, siblings in by_mode.items():
        labels = _labels(siblings)
        for label, group in zip(labels, siblings, strict=True):
            name = _free(f"_{mode}_{label}" if label else f"_{mode}", methods)
            methods.append(Method(name, group[0], _uses(group)))
    return tuple(methods)


def _free(name: str, methods: list[Method]) -> str:
    """The name, numbered where a method has it already: mode `a_b` against list `b` of `a`."""
    taken, number, free = {method.name for method in methods}, 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def _labels(siblings: list[list[StepPlan]]) -> list[str]:
    """What tells the lists of one mode apart: the chosen ops, then a number."""
    if len(siblings) == 1:
        return [""]
    choices = [dict(group[0].cores) for group in siblings]
    slots = [slot for slot in choices[0] if len({c.get(slot) for c in choices}) > 1]
    labels = [
        "_".join(choice.get(slot, "").replace("+", "_") for slot in slots) for choice in choices
    ]
    if len(set(labels)) < len(labels):
        labels = [
            "_".join(part for part in (label, _switches(group[0], siblings)) if part)
            for label, group in zip(labels, siblings, strict=True)
        ]
    seen: dict[str, int] = {}
    unique = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        number = str(seen[label]) if seen[label] > 1 or not label else ""
        unique.append("_".join(part for part in (label, number) if part))
    return unique


def _switches(plan: StepPlan, siblings: list[list[StepPlan]]) -> str:
    """Flags that are set in this list and not in every one of its siblings."""

    def flags_of(candidate: StepPlan) -> dict[str, None]:
        return {flag: None for launch in candidate.launches for flag, on in launch.flags if on}

    shared = set.intersection(*(set(flags_of(group[0])) for group in siblings))
    return "_".join(flag for flag in flags_of(plan) if flag not in shared)


def _uses(group: list[StepPlan]) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    rows: dict[tuple[str, int], list[int]] = {}
    for plan in group:
        rows.setdefault((plan.arch, plan.q), []).append(plan.rows)
    return tuple((arch, q, tuple(counts)) for (arch, q), counts in rows.items())
