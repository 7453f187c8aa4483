"""Mutation of the shipped schedules: take each order away and see whether the proof notices.

    python bench/mutation.py [SPEC...] [--out FILE]

One mutant per launch list and rule set: drop a fork or join, drop a launch's wait, give a plain
launch the attribute, move a trigger to the front of its kernel.  A mutant is either flagged, or
redundant: everything is still ordered without what was taken away, which the list shows.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kpipe.codegen.plan.model import Fork, Item, Launch, PipelinePlan, StepPlan
from kpipe.codegen.proof.api import prove_pipeline
from kpipe.codegen.proof.lower import lower
from kpipe.codegen.proof.program import Kernel, Program, Segment
from kpipe.codegen.proof.program import Launch as Node
from kpipe.codegen.proof.synthesis import RULE_SETS, races_of

PIPELINES = Path(__file__).resolve().parents[1] / "pipelines"


def plan_mutants(step: StepPlan) -> Iterator[tuple[str, str, StepPlan]]:
    """(kind, what, mutated step) for changes of streams and attributes."""
    for item in step.items:
        if not isinstance(item, Launch):
            kind = "drop fork" if isinstance(item, Fork) else "drop join"
            others = tuple(other for other in step.items if other is not item)
            yield kind, item.stream, replace(step, items=others)
        elif not item.pdl.attribute:
            pdl = replace(item.pdl, attribute=True)
            yield "add attribute", item.name, replace(step, items=_swapped(step, item, pdl))


def _swapped(step: StepPlan, launch: Launch, pdl: object) -> tuple[Item, ...]:
    return tuple(
        replace(launch, pdl=pdl) if item is launch else item  # type: ignore[arg-type]
        for item in step.items
    )


def program_mutants(program: Program, names: list[str]) -> Iterator[tuple[str, str, Program]]:
    """(kind, what, mutated program) for changes inside kernels: waits and triggers."""
    kernels = {n.node.name: n.node for n in program.launches if isinstance(n.node, Kernel)}
    for name in names:
        node = kernels[name]
        if node.pdl and node.waits:
            yield "drop wait", name, _with(program, name, replace(node, waits=False))
        if node.trigger == "after_wait":
            yield "early trigger", name, _with(program, name, replace(node, trigger="early"))


def _with(program: Program, name: str, node: Kernel) -> Program:
    def changed(segment: Segment) -> Segment:
        actions = tuple(
            replace(
                action,
                node=replace(action.node, waits=node.waits, trigger=node.trigger),
            )
            if isinstance(action, Node) and action.node.name == name
            else action
            for action in segment.actions
        )
        return replace(segment, actions=actions)

    return Program(tuple(changed(segment) for segment in program.segments))


def mutants(pipeline: PipelinePlan, step: StepPlan) -> Iterator[tuple[str, str, bool]]:
    """(kind, what, flagged) of every mutant; flagged if any rule set notices."""
    for kind, what, mutated in plan_mutants(step):
        programs = (lower(pipeline, mutated, captured=captured) for captured in RULE_SETS)
        yield kind, what, any(races_of(program) for program in programs)
    names = [launch.name for launch in step.launches]
    both = [
        list(program_mutants(lower(pipeline, step, captured=captured), names))
        for captured in RULE_SETS
    ]
    for eager, captured in zip(*both, strict=True):
        yield eager[0], eager[1], any(races_of(program) for program in (eager[2], captured[2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: Counter[tuple[str, str, str, bool]] = Counter()
    for spec in options.specs or sorted(map(str, PIPELINES.glob("*.yaml"))):
        pipeline = prove_pipeline(spec).pipeline
        for method in pipeline.methods:
            for kind, what, flagged in mutants(pipeline, method.plan):
                found[(Path(spec).stem, kind, what, flagged)] += 1
    for kind in dict.fromkeys(kind for _, kind, _, _ in found):
        mine = {key: count for key, count in found.items() if key[1] == kind}
        flagged = sum(count for key, count in mine.items() if key[3])
        total = sum(mine.values())
        print(f"{kind:<14} {total:>4} mutants {flagged:>4} flagged {total - flagged:>4} redundant")
    spared: Counter[tuple[str, str]] = Counter()
    for (_, kind, what, flagged), count in found.items():
        spared[(kind, what)] += 0 if flagged else count
    for (kind, what), count in sorted(spared.items()):
        if count:
            print(f"  redundant: {kind} {what} ({count} lists)")
    if options.out:
        keys = ("spec", "kind", "what", "flagged", "lists")
        records = [dict(zip(keys, (*key, count), strict=True)) for key, count in found.items()]
        document = {"schema": "kpipe.bench.mutation/1", "records": records}
        options.out.write_text(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
