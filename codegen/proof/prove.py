"""From plan to proved plan: the only thing that can be rendered.

Every distinct launch list is lowered to programs (eager and captured, three layers, two steps,
what runs between layers as declared), its overlap is synthesised, and every conflicting pair of
accesses must be ordered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from kpipe.codegen.diagnostics import Diagnostic, SpecError
from kpipe.codegen.plan.model import Method, PipelinePlan, StepPlan
from kpipe.codegen.proof.cite import lost_at, rests_of
from kpipe.codegen.proof.lower import Lowering, behind_the_engine
from kpipe.codegen.proof.mailboxes import mailbox_findings
from kpipe.codegen.proof.memory_rules import dirty_findings, memory_finding
from kpipe.codegen.proof.order import Missing, Order
from kpipe.codegen.proof.program import Access, Program, Reuse
from kpipe.codegen.proof.proved import ProvedPlan, decided, remember
from kpipe.codegen.proof.proxies import proxy_finding
from kpipe.codegen.proof.races import Race
from kpipe.codegen.proof.story import CODES, race_sentence, race_story
from kpipe.codegen.proof.synthesis import Synthesis, synthesise

if TYPE_CHECKING:
    from kpipe.codegen.proof.semantics import Table


def prove(pipeline: PipelinePlan) -> ProvedPlan:
    """Decide every launch's overlap and prove the result.

    Raises SpecError with one finding per pair of ops and buffer that no order covers, and one per
    launch list whose mailbox protocol fails.
    """
    proved = synthesise_all(pipeline, pipeline.methods)
    findings = [*race_findings(pipeline, proved), *mailbox_findings(pipeline)]
    if findings:
        raise SpecError(findings)
    steps = {identity: synthesis.step for identity, synthesis in proved.items()}
    remember(pipeline, steps)
    programs = tuple(program for synthesis in proved.values() for program in synthesis.programs)
    return decided(pipeline, steps, programs)


def synthesise_all(pipeline: PipelinePlan, methods: Iterable[Method]) -> dict[tuple, Synthesis]:
    """The decided overlap of each method's launch list, by identity."""
    lowering = Lowering(pipeline)
    return {method.plan.identity: synthesise(pipeline, method.plan, lowering) for method in methods}


def race_findings(pipeline: PipelinePlan, proved: Mapping[tuple, Synthesis]) -> list[Diagnostic]:
    """One finding per pair of ops and buffer that is left unordered, or per dirty counter.

    Raises SpecError KP801 or KP809 where there is one and the table that the settings name cannot
    be used.
    """
    dirty = [d for s in proved.values() for d in dirty_findings(s.step, s.programs)]
    racy = [synthesis for synthesis in proved.values() if synthesis.races]
    if not racy:
        return dirty
    from kpipe.codegen.proof.tables import table_for  # read only where something is cited

    table = table_for(pipeline.path, pipeline.targets).table
    return [*(finding for synthesis in racy for finding in _findings(synthesis, table)), *dirty]


def orders(proved: ProvedPlan) -> int:
    """Conflicting pairs of accesses that were proved ordered, over all programs."""
    return sum(conflicts(program) for program in proved.programs)


def conflicts(program: Program) -> int:
    """Conflicting pairs of accesses of different launches; each must be ordered."""
    shapes: dict[str, Counter[Access]] = {}
    own = 0
    for launch in program.launches:
        if isinstance(launch.node, Reuse):  # checked besides, and not counted
            continue
        accesses = [replace(access, early=False) for access in launch.node.accesses]
        for access in accesses:
            shapes.setdefault(access.buffer, Counter())[access] += 1
        own += sum(first.conflicts(second) for first, second in combinations(accesses, 2))
    total = 0
    for counted in shapes.values():
        for access, count in counted.items():
            total += count * (count - 1) // 2 if access.conflicts(access) else 0
        for (first, many), (second, more) in combinations(counted.items(), 2):
            total += many * more if first.conflicts(second) else 0
    return total - own


def _findings(synthesis: Synthesis, table: Table) -> list[Diagnostic]:
    found: dict[tuple[str, str, str, str], Diagnostic] = {}
    orders: dict[int, Order] = {}
    for program, race in synthesis.races:
        names = tuple(program.launches[site[0]].node.name for site in (race.first, race.second))
        key = (*names, race.declared, race.kind)
        if key not in found:
            order = orders.get(id(program)) or orders.setdefault(id(program), Order(program))
            found[key] = (
                memory_finding(synthesis.step, program, race)
                or proxy_finding(synthesis.step, program, race)
                or _finding(synthesis.step, program, race, order, table)
            )
    return list(found.values())


def _finding(
    step: StepPlan, program: Program, race: Race, order: Order, table: Table
) -> Diagnostic:
    first, second = (program.launches[site[0]].node for site in (race.first, race.second))
    spans = {launch.name: launch.span for launch in step.launches}
    gap = order.missing((race.first[0], "E"), (race.second[0], "S"))
    same = first.name == second.name
    other = f"`{first.name}` of an earlier layer" if same else f"`{first.name}`"
    related = [("first access", spans[first.name])] if first.name in spans else []
    captured = program.segments[-1].captured
    rests = rests_of(race, lost_at(program, race, order), table, captured=captured)
    return Diagnostic(
        CODES[race.kind],
        f"mode `{step.mode}`: {race_sentence(race, other, f'`{second.name}`')}",
        spans.get(second.name) or spans.get(first.name),
        help=_repair(program, first.name, second.name, gap),
        related=tuple(related),
        story=race_story(program, race, gap.silent if gap else ()),
        rests=rests,
    )


def _repair(program: Program, first: str, second: str, gap: Missing | None) -> str:
    if gap and behind_the_engine(program, gap.silent):
        return (
            "what runs between two layers never waits, so nothing behind it covers this one; say "
            "`environment: {between_layers: waits}` if it does wait"
        )
    why = f"; {gap.text}" if gap else ""
    return f"join the stream of `{first}` ahead of `{second}`, or put both on one stream{why}"
