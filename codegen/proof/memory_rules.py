"""Rules about memory rather than about ops: allocators, private workspaces, zeroed counters.

The same races, told by what the memory is: what has to be done about it differs.
"""

from __future__ import annotations

from collections.abc import Sequence

from kpipe.codegen.diagnostics import Diagnostic
from kpipe.codegen.plan.model import StepPlan
from kpipe.codegen.proof.lower import WORKSPACE
from kpipe.codegen.proof.program import Program, Reuse
from kpipe.codegen.proof.races import Race
from kpipe.codegen.proof.story import race_story
from kpipe.codegen.proof.zeros import Dirty, dirty


def memory_rule(program: Program, race: Race) -> str:
    """The rule of a race by its memory, KP602, KP603 or KP606; empty where it is an op's affair."""
    if isinstance(program.launches[race.second[0]].node, Reuse):
        return "KP602"
    if isinstance(program.launches[race.first[0]].node, Reuse):
        return "KP606"
    return "KP603" if race.buffer.startswith(WORKSPACE) else ""


def memory_finding(step: StepPlan, program: Program, race: Race) -> Diagnostic | None:
    """The finding of a race that one of these rules tells better; None for all others."""
    rule = memory_rule(program, race)
    first, second = (program.launches[site[0]].node.name for site in (race.first, race.second))
    spans = {launch.name: launch.span for launch in step.launches}
    streams = {launch.name: launch.stream for launch in step.launches}
    buffer = race.declared.removeprefix(WORKSPACE)
    if rule == "KP602":
        verb = "read" if race.kind == "WAR" else "written"
        message = (
            f"mode `{step.mode}`: the engine may hand out `{buffer}` again before `{first}` has "
            f"{verb} it: main does not wait for stream `{streams.get(first, '')}`"
        )
        span = spans.get(first)
        help = f"join stream `{streams.get(first, '')}` into main before the layer ends"
    elif rule == "KP603":
        message = (
            f"mode `{step.mode}`: `{first}` and `{second}` use the workspace `{buffer}` at once"
        )
        span = spans.get(second) or spans.get(first)
        help = (
            f"put both on one stream, or join the stream of `{first}` ahead of `{second}`: an "
            "op has one workspace for all its launches"
        )
    else:
        return None
    related = [("first launch", spans[first])] if first in spans and span != spans[first] else []
    story = race_story(program, race, ())
    return Diagnostic(rule, message, span, help=help, related=tuple(related), story=story)


def dirty_findings(step: StepPlan, programs: Sequence[Program]) -> list[Diagnostic]:
    """KP605 for every op that may find its zeroed memory dirty, once per pair of ops."""
    spans = {launch.name: launch.span for launch in step.launches}
    found: dict[tuple[str, str, str], Diagnostic] = {}
    for program in programs:
        for pair in dirty(program):
            first, second = _names(program, pair)
            buffer = pair.buffer.partition("@")[0].removeprefix(WORKSPACE)
            found.setdefault(
                (first, second, buffer),
                Diagnostic(
                    "KP605",
                    f"mode `{step.mode}`: `{second}` expects zeros in `{buffer}`, which `{first}` "
                    "leaves dirty",
                    spans.get(second) or spans.get(first),
                    help=f"give `{first}` memory of its own, or clear `{buffer}` between the two",
                ),
            )
    return list(found.values())


def _names(program: Program, pair: Dirty) -> tuple[str, str]:
    first, second = (program.launches[site[0]].node.name for site in (pair.first, pair.second))
    return first, second
