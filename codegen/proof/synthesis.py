"""PDL synthesis: the strongest overlap that can be proved, launch by launch.

Starting from what each op allows by itself, whatever cannot be ordered loses its overlap: the
launch whose access may come too early is launched plain, which makes it wait for everything ahead
of it in its stream.  Releases are held only for reads that somebody behind a launch that never
waits would overwrite: a read is over at the last exit, so that rests on the documents.  A hold for
written data would rest on a reading that none promises (`held_exit_visible`) and is not derived:
the reader is launched plain instead.  Where TMA reads behind its wait what plain stores have
written, the wait gives the order and the hold the visibility (`proxies.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kpipe.codegen.plan.model import Item, Launch, Pdl, PipelinePlan, StepPlan
from kpipe.codegen.proof.cite import lost_at
from kpipe.codegen.proof.lower import (
    LAYERS,
    STEPS,
    Lowering,
    behind_the_engine,
    lower,
    lower_layers,
)
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Kernel, Program
from kpipe.codegen.proof.program import Launch as Node
from kpipe.codegen.proof.proxies import crossing_pairs, proxy_races, proxy_reasons
from kpipe.codegen.proof.races import Race, check_all, scan

RULE_SETS = (False, True)  # captured?
WHOLE = (LAYERS, STEPS)
SHORT = (2, 1)  # a program that is looked at first
CAPTURED = "captured: "  # in front of a rule that is lost under capture


@dataclass(frozen=True)
class Synthesis:
    """A step with its overlap decided; `races` is empty where it is proved."""

    step: StepPlan
    programs: tuple[Program, ...]
    races: tuple[tuple[Program, Race], ...]


def synthesise(
    pipeline: PipelinePlan, step: StepPlan, lowering: Lowering | None = None
) -> Synthesis:
    """Weaken the step until every rule set is free of races, then give back what was not needed.

    The result is locally strongest: no single launch can have its overlap back.  `races` is left
    where weakening does not help, because the ops themselves are in the wrong order.  `lowering` is
    the pipeline's, where several of its steps are synthesised.
    """
    asked, lowering = step, lowering or Lowering(pipeline)
    if clean := _clean(lowering, asked):
        return clean
    # What is unordered in a short program is so in the whole one, of which it is a part: most of
    # what has to be taken back shows there already, at a third of the work.
    step = _weaken(step, _tried(lowering, step, SHORT).races)
    found = _tried(lowering, step, WHOLE)
    while found.races and (step := _weaken(found.step, found.races)) is not found.step:
        found = _tried(lowering, step, WHOLE)
    if found.races:
        return found
    for name in [launch.name for launch in found.step.launches]:
        for part in ("attribute", "release"):
            stronger = _with_overlap_of(found.step, asked, name, part)
            if stronger is not found.step and not _racy(lowering, stronger):
                again = _tried(lowering, stronger, WHOLE)
                found = found if again.races else again
    return found


def _programs(lowering: Lowering, step: StepPlan, size: tuple[int, int]) -> tuple[Program, Program]:
    """The step's programs by the order of RULE_SETS."""
    layers, steps = size
    bodies = lower_layers(lowering.pipeline, step, layers, lowering)
    eager, captured = (
        lower(
            lowering.pipeline,
            step,
            captured=captured,
            steps=steps,
            released=not captured,
            bodies=bodies,
        )
        for captured in RULE_SETS
    )
    return eager, captured


def _clean(lowering: Lowering, step: StepPlan) -> Synthesis | None:
    """The step as it is, where it can be seen at once that no rule set finds a race in it.

    That is where not even the order with fences, which claims least, leaves anything open.
    """
    programs = _programs(lowering, step, WHOLE)
    for program in programs:
        strict = Order(program, fences=True)
        if scan(strict, stop=True).pairs or crossing_pairs(program, strict):
            return None
    return Synthesis(step, programs, ())


def _tried(lowering: Lowering, step: StepPlan, size: tuple[int, int]) -> Synthesis:
    programs = _programs(lowering, step, size)
    races = tuple((program, race) for program in programs for race in races_of(program))
    return Synthesis(step, programs, races)


def _racy(lowering: Lowering, step: StepPlan) -> bool:
    """Whether a short program of the step has a race; what is cheap to see is looked at first."""
    layers, steps = SHORT
    bodies = lower_layers(lowering.pipeline, step, layers, lowering)
    for captured in reversed(RULE_SETS):
        program = lower(lowering.pipeline, step, captured=captured, steps=steps, bodies=bodies)
        order = Order(program)
        if crossing_pairs(program, order) or scan(order, stop=True).pairs or check_all(program):
            return True
    return False


def _with_overlap_of(step: StepPlan, asked: StepPlan, name: str, part: str) -> StepPlan:
    """The step with one launch's attribute (or release) as it was asked for; the step itself
    where it has it."""
    wanted = next(launch.pdl for launch in asked.launches if launch.name == name)
    given = {key: getattr(wanted, key) for key in (part, f"{part}_reason", f"{part}_rule")}

    def lacks(item: Item) -> bool:
        return (
            isinstance(item, Launch)
            and item.name == name
            and any(getattr(item.pdl, key) != value for key, value in given.items())
        )

    if not any(map(lacks, step.items)):
        return step
    items: tuple[Item, ...] = tuple(
        replace(item, pdl=replace(item.pdl, **given)) if lacks(item) else item
        for item in step.items
    )
    return replace(step, items=items)


def races_of(program: Program) -> tuple[Race, ...]:
    """What the documents do not order, reads that rest on an unfenced trigger included, and what
    they order but do not make visible to TMA."""
    strict = Order(program, fences=True)
    return tuple(dict.fromkeys((*check_all(program, strict), *proxy_races(program, strict))))


def _weaken(step: StepPlan, races: tuple[tuple[Program, Race], ...]) -> StepPlan:
    """The step with the offending overlaps taken back; the step itself where nothing is left."""
    own = {launch.name: launch.pdl for launch in step.launches}
    plain: dict[str, tuple[str, str]] = {}  # launch -> reason, rule
    held: dict[str, tuple[str, str]] = {}
    orders: dict[int, Order] = {}
    for program, race in races:
        if race.kind == "PROXY":
            _weaken_crossing(program, race, own, plain, held)
            continue
        order = orders.get(id(program)) or orders.setdefault(id(program), Order(program))
        culprit, foreign = _culprit(program, race, order)
        first, second = (program.launches[site[0]].node.name for site in (race.first, race.second))
        releases = first in own and own[first].release
        if race.kind == "WAR" and releases and (foreign or culprit is None):
            # A read ends at the last exit, and without a trigger nobody starts before that.
            buffer = race.declared
            why = f"held: {second} rewrites `{buffer}` behind a silent launch"
            held.setdefault(first, (why, "exit"))
        elif culprit is None or (name := program.launches[culprit].node.name) in plain:
            continue
        elif own.get(name):
            rule = lost_at(program, race, order).rule
            if program.segments[-1].captured:
                rule = f"{CAPTURED}{rule}"
            plain[name] = (_reason(program, race, culprit), rule)
    items: tuple[Item, ...] = tuple(
        _weakened(item, plain.get(item.name), held.get(item.name))
        if isinstance(item, Launch)
        else item
        for item in step.items
    )
    return step if items == step.items else replace(step, items=items)


def _weaken_crossing(
    program: Program,
    race: Race,
    own: dict[str, Pdl],
    plain: dict[str, tuple[str, str]],
    held: dict[str, tuple[str, str]],
) -> None:
    """TMA sees the stores of a kernel that has exited before its reader starts: the writer holds
    its release; where that is not ours to hold, or is held already, the reader is plain."""
    first, second = (program.launches[site[0]].node.name for site in (race.first, race.second))
    why_held, why_plain = proxy_reasons(first, second, race.declared)
    if first in own and own[first].release:
        held.setdefault(first, (why_held, ""))
    elif second in own:
        plain.setdefault(second, (why_plain, ""))


def _weakened(
    launch: Launch, plain: tuple[str, str] | None, held: tuple[str, str] | None
) -> Launch:
    pdl = launch.pdl
    if plain and pdl.attribute:
        reason, rule = plain
        pdl = replace(pdl, attribute=False, attribute_reason=reason, attribute_rule=rule)
    if held and pdl.release:
        reason, rule = held
        pdl = replace(pdl, release=False, release_reason=reason, release_rule=rule)
    return launch if pdl is launch.pdl else replace(launch, pdl=pdl)


def _culprit(program: Program, race: Race, order: Order) -> tuple[int | None, bool]:
    """The launch whose overlap lets the second access come too early, and whether the order is
    lost at a launch that is not ours.

    An early access is its own launch's fault.  Otherwise a launch that never waits stands in
    between and the launch behind it trusts it; failing that, the nearest overlap ahead.
    """
    position, site = race.second
    second = program.launches[position]
    if _overlaps(second) and second.node.accesses[site].early:
        return position, False
    gap = order.missing((race.first[0], "E"), (position, "W" if _overlaps(second) else "S"))
    silents = gap.silent if gap else ()
    foreign = behind_the_engine(program, silents)
    for silent in reversed(silents):
        stream = program.launches[silent].stream
        for behind in range(silent + 1, position + 1):
            if program.launches[behind].stream == stream:
                if _overlaps(program.launches[behind]):
                    return behind, foreign
                break
    for ahead in range(position, -1, -1):
        if program.launches[ahead].stream == second.stream and _overlaps(program.launches[ahead]):
            return ahead, foreign
    return None, foreign


def _overlaps(node: Node) -> bool:
    return isinstance(node.node, Kernel) and node.node.pdl


def _reason(program: Program, race: Race, culprit: int) -> str:
    first, second = (program.launches[site[0]].node for site in (race.first, race.second))
    buffer = race.declared
    if culprit == race.second[0] and second.accesses[race.second[1]].early:
        verb = "writes" if second.accesses[race.second[1]].write else "reads"
        return f"plain: {verb} `{buffer}` before its wait"
    if culprit == race.second[0]:
        return f"plain: its wait does not cover {first.name}, which uses `{buffer}`"
    return f"plain: {first.name} and {second.name} share `{buffer}` across it"
