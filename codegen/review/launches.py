"""What differs between two launch lists: launches, their overlap, and edges of the graph."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from kpipe.codegen.plan.model import Launch, StepPlan
from kpipe.codegen.review.captured import Edge, Graph
from kpipe.codegen.review.model import EdgeChange, LaunchChange

Overlaps = tuple[tuple[str, tuple[str, ...]], ...]


def launch_changes(old: StepPlan, new: StepPlan) -> tuple[LaunchChange, ...]:
    """Every change of a launch, replaced, removed, added and moved ones first."""
    before = {launch.name: launch for launch in old.launches}
    after = {launch.name: launch for launch in new.launches}
    gone = [launch for name, launch in before.items() if name not in after]
    come = [launch for name, launch in after.items() if name not in before]
    common = [name for name in after if name in before]
    changes = [*_came_and_went(old, new, gone, come)]
    still = _in_place(
        [name for name in before if name in after],
        common,
        {name: before[name].stream for name in common},
        {name: after[name].stream for name in common},
    )
    for name in common:
        if name not in still:
            places = (_place(old, before[name]), _place(new, after[name]))
            if places[0] != places[1]:
                changes.append(LaunchChange("moved", name, *places))
    for name in common:
        changes += _details(before[name], after[name])
    return tuple(changes)


def edge_changes(old: Graph, new: Graph) -> tuple[EdgeChange, ...]:
    """Edges that went, changed their port, and came; an edge is known by its ends."""
    before = {(edge.first, edge.second): edge for edge in old.edges}
    after = {(edge.first, edge.second): edge for edge in new.edges}
    changes = [
        EdgeChange(edge, None, key in new.ordered)
        for key, edge in before.items()
        if key not in after
    ]
    for key, edge in before.items():
        other = after.get(key)
        if other is not None and other != edge:
            changes.append(EdgeChange(edge, other))
    changes += [
        EdgeChange(None, edge, key in old.ordered)
        for key, edge in after.items()
        if key not in before
    ]
    return tuple(changes)


def overlap_changes(old: Graph, new: Graph) -> tuple[Overlaps, Overlaps]:
    """What may no longer run side by side, and what now may, of launches that both sides have."""
    shared = {*old.nodes} & {*new.nodes}
    before, after = (
        {pair for pair in graph.beside if shared.issuperset(pair)} for graph in (old, new)
    )
    order = {name: number for number, name in enumerate(new.nodes)}
    known = {frozenset(pair) for pair in after}, {frozenset(pair) for pair in before}
    parted = [pair for pair in before if frozenset(pair) not in known[0]]
    met = [pair for pair in after if frozenset(pair) not in known[1]]
    return _grouped(parted, order), _grouped(met, order)


def _grouped(pairs: Iterable[tuple[str, str]], order: dict[str, int]) -> Overlaps:
    """Pairs as few lines: each time the launch with the most partners, and these."""
    left = {frozenset(pair) for pair in pairs}
    found = []
    while left:
        counts: dict[str, int] = {}
        for pair in left:
            for name in pair:
                counts[name] = counts.get(name, 0) + 1
        most = min(counts, key=lambda name: (-counts[name], order[name]))
        others = sorted((next(iter(p - {most})) for p in left if most in p), key=order.__getitem__)
        found.append((most, tuple(others)))
        left = {pair for pair in left if most not in pair}
    return tuple(found)


def edge_text(edge: Edge) -> str:
    """`a -> b (fork or join, programmatic)`."""
    return f"{edge.first} -> {edge.second} ({edge_way(edge)})"


def edge_way(edge: Edge) -> str:
    """What makes the edge, and its port."""
    return f"{'fork or join' if edge.event else 'stream order'}, {edge.port}"


def computes(launch: Launch) -> bool:
    """Whether a launch makes numbers; one that only polls, or stores sentinels, does not."""
    return any(binding.access.writes for binding in launch.bindings)


def replacements(
    gone: Iterable[Launch], come: Iterable[Launch]
) -> tuple[list[tuple[list[Launch], list[Launch]]], list[Launch], list[Launch]]:
    """What stands in the place of what, then what is gone and what is new without such a pair.

    New launches replace the old ones whose results they write; failing that, those of their stage.
    """
    left, pairs, alone = list(gone), [], []
    for launch in come:
        written = _written(launch)
        old = [one for one in left if _written(one) & written]
        stage = [one for one in left if one.stage == launch.stage]
        old = [one for one in left if one in old or (one in stage and old)] or stage
        if old:
            pairs.append((old, [launch]))
            left = [one for one in left if one not in old]
            continue
        behind = next((pair for pair in pairs if pair[0][0].stage == launch.stage), None)
        if behind is not None:
            behind[1].append(launch)
        else:
            alone.append(launch)
    return pairs, left, alone


def _written(launch: Launch) -> set[str]:
    return {binding.target for binding in launch.bindings if binding.access.writes}


def _came_and_went(
    old: StepPlan, new: StepPlan, gone: Sequence[Launch], come: Sequence[Launch]
) -> Iterable[LaunchChange]:
    pairs, removed, added = replacements(gone, come)
    for before, after in pairs:
        yield LaunchChange(
            "replaced",
            " + ".join(launch.name for launch in after),
            " + ".join(launch.name for launch in before),
            _place(new, after[0]),
        )
    for launch in removed:
        yield LaunchChange("removed", launch.name, _place(old, launch), "")
    for launch in added:
        yield LaunchChange("added", launch.name, "", _place(new, launch))


def _place(step: StepPlan, launch: Launch) -> str:
    """Stream and predecessor: `side, first`, or `main, behind topk_select`."""
    ahead = ""
    for one in step.launches:
        if one.name == launch.name:
            break
        if one.stream == launch.stream:
            ahead = one.name
    return f"{launch.stream}, behind {ahead}" if ahead else f"{launch.stream}, first"


def _in_place(
    old: Sequence[str], new: Sequence[str], before: dict[str, str], after: dict[str, str]
) -> frozenset[str]:
    """Launches that kept their stream and their order in it: the longest such selection."""
    kept: set[str] = set()
    for stream in dict.fromkeys(before.values()):
        places = {name: number for number, name in enumerate(old) if before[name] == stream}
        listed = [name for name in new if after[name] == stream and name in places]
        kept |= _rising(listed, places)
    return frozenset(kept)


def _rising(listed: Sequence[str], places: dict[str, int]) -> set[str]:
    """A longest selection of names whose places rise."""
    ends: list[int] = []
    last: list[str] = []
    before: dict[str, str | None] = {}
    for name in listed:
        at = bisect_left(ends, places[name])
        before[name] = last[at - 1] if at else None
        ends[at : at + 1] = [places[name]]
        last[at : at + 1] = [name]
    found: set[str] = set()
    name = last[-1] if last else None
    while name is not None:
        found.add(name)
        name = before[name]
    return found


def _details(old: Launch, new: Launch) -> list[LaunchChange]:
    name = new.name
    changes = []
    for kind, before, after in (
        ("flags", _flags(old), _flags(new)),
        ("options", _pairs(old.options), _pairs(new.options)),
        ("tile", _pairs(old.tactic), _pairs(new.tactic)),
        ("operands", _operands(old), _operands(new)),
    ):
        if before != after:
            texts = _only_differing(before, after)
            if kind == "operands":  # an operand bound to what has its name is said once
                texts = tuple(", ".join(map(_shortly, filter(None, t.split(", ")))) for t in texts)
            changes.append(LaunchChange(kind, name, *texts))  # type: ignore[arg-type]
    start = (old.pdl.attribute, old.pdl.attribute_reason)
    changes += _overlap("start", name, start, (new.pdl.attribute, new.pdl.attribute_reason))
    release = (old.pdl.release, old.pdl.release_reason)
    changes += _overlap("release", name, release, (new.pdl.release, new.pdl.release_reason))
    return changes


def _overlap(
    kind: str, name: str, old: tuple[bool, str], new: tuple[bool, str]
) -> list[LaunchChange]:
    """gained: it overlaps now.  dropped: it does no more.  weakened: it releases later than it
    did.  reason: it is held back, or released, for another reason."""
    if old == new:
        return []
    if old[0] != new[0]:
        effect = "gained" if new[0] else "dropped"
    elif new[0] and kind == "release":
        effect = "weakened" if _lateness(new[1]) > _lateness(old[1]) else "reason"
    else:
        effect = "reason"
    return [LaunchChange(kind, name, old[1], new[1], effect)]  # type: ignore[arg-type]


def _lateness(release: str) -> int:
    order = ("after_weights", "after_wait", "after_loads")
    return order.index(release) if release in order else len(order)


def _flags(launch: Launch) -> dict[str, str]:
    return {name: "on" if value else "off" for name, value in launch.flags}


def _pairs(pairs: Iterable[tuple[str, object]]) -> dict[str, str]:
    return {name: str(value) for name, value in pairs}


def _operands(launch: Launch) -> dict[str, str]:
    return {binding.operand: binding.target for binding in launch.bindings}


def _shortly(pair: str) -> str:
    operand, _, target = pair.partition("=")
    return operand if operand == target else pair


def _only_differing(before: dict[str, str], after: dict[str, str]) -> tuple[str, str]:
    names = [
        name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)
    ]
    return (
        ", ".join(f"{name}={before[name]}" for name in names if name in before),
        ", ".join(f"{name}={after[name]}" for name in names if name in after),
    )
