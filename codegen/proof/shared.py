"""Buffers that several pipelines share: scope `model` (those of one geometry) or `device` (all).

The proof of one pipeline knows only its own layers.  Where pipelines of one run share a buffer,
their layers are proved in alternation as well: A B A and B A B for each two, A B C and A C B for
each three, for every combination of launch lists that one step can select.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from kpipe.codegen.diagnostics import Diagnostic, Span
from kpipe.codegen.ops.contract import Access as Touch
from kpipe.codegen.ops.contract import Kind
from kpipe.codegen.plan.model import SHARED_SCOPES, BufferPlan, PipelinePlan, StepPlan
from kpipe.codegen.proof.lower import behind_the_engine, lower_together
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Program
from kpipe.codegen.proof.races import Race
from kpipe.codegen.proof.story import CODES, race_sentence, race_story
from kpipe.codegen.proof.synthesis import races_of

Group = tuple[PipelinePlan, ...]
Steps = tuple[StepPlan, ...]


@dataclass(frozen=True)
class Together:
    """What the alternation of a run's pipelines has shown.

    `found` are findings, `combinations` the number of sets of launch lists that were proved, and
    `notes` say for each path what was looked at and what was not.
    """

    found: tuple[Diagnostic, ...]
    combinations: int
    notes: dict[str, tuple[str, ...]]


def shared_buffers(first: PipelinePlan, second: PipelinePlan) -> tuple[str, ...]:
    """Names of the buffers that are one memory for both, in order of the first's declaration."""
    return tuple(mine.name for mine, _ in _pairs(first, second) if mine.scope in SHARED_SCOPES)


def prove_together(plans: Sequence[PipelinePlan]) -> Together:
    """Prove every group of pipelines that shares a buffer; `plans` are proved one by one.

    Findings: KP202 where two declarations of one buffer differ, KP607 where two pipelines assume
    different neighbours, KP301 to KP303 for accesses that no order covers where layers alternate,
    with the places in both specs.
    """
    found: list[Diagnostic] = []
    for first, second in combinations(plans, 2):
        pairs = list(_pairs(first, second))
        for mine, theirs in pairs:
            found += _declarations(first, mine, second, theirs)
        if pairs:
            found += _environments(first, second, pairs[0][0].name)
    count = 0
    if not found:
        races: dict[tuple[str, ...], Diagnostic] = {}
        for group in _groups(plans):
            for steps in _steps(group):
                count += 1
                for key, finding in _alternate(group, steps):
                    races.setdefault(key, finding)
        found = list(races.values())
    notes = {} if found else {plan.path: _notes(plan, plans) for plan in plans}
    return Together(tuple(found), count, notes)


def _pairs(first: PipelinePlan, second: PipelinePlan) -> Iterator[tuple[BufferPlan, BufferPlan]]:
    """Buffers of equal name that both declare as shared, where their scopes can meet.

    Two specs of one pipeline's name are one pipeline said twice; `generate` refuses them (KP807).
    """
    if first.name == second.name:
        return
    others = {buffer.name: buffer for buffer in second.buffers if buffer.scope in SHARED_SCOPES}
    for mine in first.buffers:
        theirs = others.get(mine.name)
        if theirs is None or mine.scope not in SHARED_SCOPES:
            continue
        if first.geometry == second.geometry or "device" in (mine.scope, theirs.scope):
            yield mine, theirs


def _declarations(
    first: PipelinePlan, mine: BufferPlan, second: PipelinePlan, theirs: BufferPlan
) -> Iterator[Diagnostic]:
    here, there = _declared(second, theirs), _declared(first, mine)
    if here == there:
        return
    differs = next(key for key in here if here[key] != there[key])
    yield Diagnostic(
        "KP202",
        f"buffer `{mine.name}` is shared with `{first.name}`, whose {differs} is "
        f"{there[differs]}, here {here[differs]}",
        _place(second, "buffers", mine.name),
        help="declare it alike in both, or give it the scope `kind`, which nobody else shares",
        related=(("other declaration", _place(first, "buffers", mine.name)),),
    )


def _environments(first: PipelinePlan, second: PipelinePlan, buffer: str) -> Iterator[Diagnostic]:
    here, there = (str(plan.environment["between_layers"]) for plan in (second, first))
    if here == there:
        return
    places = [_place(plan, "environment", "between_layers") for plan in (second, first)]
    yield Diagnostic(
        "KP607",
        f"`{second.name}` shares `{buffer}` with `{first.name}` and assumes other neighbours: "
        f"between_layers is {here}, there {there}",
        places[0],
        help="what runs between their layers is one thing: declare the weaker word in both "
        "(silent, then waits, then full)",
        related=(("other declaration", places[1]),),
    )


def _declared(plan: PipelinePlan, buffer: BufferPlan) -> dict[str, str]:
    """What two declarations of one memory have to agree on."""
    axes = (plan.rows_cap if axis == "rows" else axis for axis in buffer.shape)
    columns = ", ".join(f"{name} {offset}+{width}" for name, offset, width in buffer.columns)
    return {
        "scope": buffer.scope,
        "dtype": buffer.dtype,
        "shape": f"[{', '.join(map(str, axes))}]",
        "list of columns": f"[{columns}]",
        "init": "zeros" if buffer.zeroed else "empty",
    }


def _place(plan: PipelinePlan, *keys: str) -> Span:
    """The place of a key.  The plan does not keep it, so the spec is read once more."""
    from kpipe.codegen.spec.load import load_source

    return load_source(plan.path, {}).span(*keys, key=True)


def _groups(plans: Sequence[PipelinePlan]) -> Iterator[Group]:
    """Two that share a buffer; three of which each shares one with another of them."""
    together = cache(lambda i, j: bool(shared_buffers(plans[i], plans[j])))
    for size in (2, 3):
        for chosen in combinations(range(len(plans)), size):
            if sum(together(i, j) for i, j in combinations(chosen, 2)) >= size - 1:
                yield tuple(plans[i] for i in chosen)


def _steps(group: Group) -> Iterator[Steps]:
    """The distinct combinations of launch lists that one step can select.

    Every pipeline pads the step's rows to its own next declared size.
    """
    seen = set()
    tables = [
        {(plan.arch, plan.q, plan.rows): plan for plan in pipeline.plans} for pipeline in group
    ]
    for arch, q, rows in dict.fromkeys(key for table in tables for key in table):
        steps = []
        for table in tables:
            sizes = [size for a, p, size in table if (a, p) == (arch, q) and size >= rows]
            if sizes:
                steps.append(table[arch, q, min(sizes)])
        identity = tuple(step.identity for step in steps)
        if len(steps) == len(group) and identity not in seen and _meet(group, steps):
            seen.add(identity)
            yield tuple(steps)


def _meet(group: Group, steps: Sequence[StepPlan]) -> bool:
    """Whether some two of the launch lists touch one shared buffer, and one of them writes it."""
    touched = [_touched(plan, step) for plan, step in zip(group, steps, strict=True)]
    for i, j in combinations(range(len(group)), 2):
        for name in shared_buffers(group[i], group[j]):
            uses = [touched[k].get(name) for k in (i, j)]
            if None not in uses and True in uses:
                return True
    return False


def _touched(plan: PipelinePlan, step: StepPlan) -> dict[str, bool]:
    """Buffers of a launch list -> whether it writes them."""
    columns = {name: buffer.name for buffer in plan.buffers for name, _, _ in buffer.columns}
    found: dict[str, bool] = {}
    for launch in step.launches:
        for binding in launch.bindings:
            if binding.kind is Kind.BUFFER and binding.access is not Touch.LAYOUT:
                name = columns.get(binding.target, binding.target)
                found[name] = found.get(name, False) or binding.access.writes
    return found


def _alternate(group: Group, steps: Steps) -> Iterator[tuple[tuple[str, ...], Diagnostic]]:
    """Races of one combination of launch lists, keyed by launches, buffer and kind."""
    pairs = list(zip(group, steps, strict=True))
    orders = ([0, 1, 0], [1, 0, 1]) if len(group) == 2 else ([0, 1, 2], [0, 2, 1])
    forks = any(len(step.streams) > 1 for step in steps)
    for order in orders:
        layers = [pairs[number] for number in order]
        for captured in (False, True):
            for own_streams in (False, True) if forks else (False,):
                program = lower_together(layers, captured=captured, own_streams=own_streams)
                for race in races_of(program):
                    names = _names(program, race)
                    buffer = race.declared
                    yield (*names, buffer, race.kind), _finding(pairs, program, race)


def _names(program: Program, race: Race) -> tuple[str, str]:
    first, second = (program.launches[site[0]].node.name for site in (race.first, race.second))
    return first, second


def _finding(
    pairs: Sequence[tuple[PipelinePlan, StepPlan]], program: Program, race: Race
) -> Diagnostic:
    first, second = _names(program, race)
    spans = {
        f"{plan.name}.{launch.name}": launch.span
        for plan, step in pairs
        for launch in step.launches
    }
    modes = " and ".join(f"`{step.mode}` of `{plan.name}`" for plan, step in pairs)
    gap = Order(program).missing((race.first[0], "E"), (race.second[0], "S"))
    silent = gap.silent if gap else ()
    help = (
        "what runs between two layers never waits, so nothing behind it covers this one; say "
        "`environment: {between_layers: waits}` in each spec if it does wait"
        if behind_the_engine(program, silent)
        else f"join the stream of `{first}` into main within its layer, or give "
        f"`{race.declared}` the scope `kind`, which nobody else shares"
    )
    related = [("first access", spans[first])] if first in spans else []
    return Diagnostic(
        CODES[race.kind],
        f"modes {modes}, layers in turn: {race_sentence(race, f'`{first}`', f'`{second}`')}",
        spans.get(second) or spans.get(first),
        help=help,
        related=tuple(related),
        story=race_story(program, race, silent),
    )


def _notes(plan: PipelinePlan, plans: Sequence[PipelinePlan]) -> tuple[str, ...]:
    """Whom a pipeline shares buffers with in this run."""
    if not plan.shares_memory:
        return ()
    named = ", ".join(
        f"`{buffer.name}` (scope {buffer.scope})"
        for buffer in plan.buffers
        if buffer.scope in SHARED_SCOPES
    )
    others = [o.name for o in plans if o is not plan and shared_buffers(plan, o)]
    partners = f"proved in turn with {', '.join(others)}; " if others else ""
    outside = "no pipeline outside this run was looked at"
    return (f"shared with other pipelines: {named}; {partners}{outside}",)
