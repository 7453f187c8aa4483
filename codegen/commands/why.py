"""`kpipe why`: the chain of edges that orders one op before another, or what it lacks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

import click

from kpipe.codegen.commands.common import WIDTH, aligned, exit_code, show_findings, wrapped
from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.plan.api import plan_pipeline
from kpipe.codegen.plan.describe import matching_steps, row_list
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.proof.synthesis import RULE_SETS, synthesise
from kpipe.codegen.proof.why import Answer, check_op, why

NARROWEST = 40  # of the column of reasons


def run(
    first: str,
    second: str,
    spec: str,
    rows: int | None,
    q: int | None,
    arch: str | None,
    captured: bool,
    color: str,
) -> int:
    """Print the answer for every selected launch list; returns the exit code.

    0 where the ops are ordered in all lists that launch both, 1 where they are not in one or no
    list launches both, 2 for an op that none launches.  The spec need not be free of races: the
    question is asked about what is refused, too.
    """
    texts: dict[str, str] = {}
    try:
        plan = plan_pipeline(spec, texts)
        steps = matching_steps(plan, rows, q, arch)
        for word in (first, second):
            check_op(steps, word)
    except SpecError as error:
        show_findings(error.diagnostics, texts, "text", color=color, err=True)
        return exit_code(error.diagnostics)
    verdicts: list[bool] = []
    for number, (title, step) in enumerate(_lists(plan, steps)):
        decided = synthesise(plan, step).step
        rule_sets = (True,) if captured else RULE_SETS
        answers = [why(plan, decided, first, second, captured=one) for one in rule_sets]
        found = [answer for answer in answers if answer is not None]
        verdicts += [answer.ordered for answer in found]
        click.echo(("\n" if number else "") + "\n".join(wrapped(title, "")))
        for line in _lines(step, first, second, found):
            click.echo(line)
    return 0 if verdicts and all(verdicts) else 1


def _lists(plan: PipelinePlan, steps: Iterable[StepPlan]) -> Iterator[tuple[str, StepPlan]]:
    """One step per launch list, with the list's name and where it is used."""
    names = {method.plan.identity: method.name for method in plan.methods}
    groups: dict[tuple, list[StepPlan]] = {}
    for step in steps:
        groups.setdefault(step.identity, []).append(step)
    for identity, group in groups.items():
        uses: dict[tuple[str, int], list[int]] = {}
        for step in group:
            uses.setdefault((step.arch, step.q), []).append(step.rows)
        listed = "; ".join(f"{a} q {q} rows {row_list(counts)}" for (a, q), counts in uses.items())
        yield f"{names[identity]}, for {listed}", group[0]


def _lines(step: StepPlan, first: str, second: str, answers: list[Answer]) -> list[str]:
    if not answers:
        launched = {word for launch in step.launches for word in (launch.name, launch.word)}
        lacking = " nor ".join(f"`{name}`" for name in (first, second) if name not in launched)
        return [f"  does not launch {lacking}"]
    where = "of the next layer" if answers[0].next_layer else "of the same layer"
    first, second = answers[0].first, answers[0].second
    lines = wrapped(f"{first}, then {second} {where}{_need(answers[0])}")
    for answer in answers:
        lines += ["", f"  {'captured' if answer.captured else 'eager'}: {_verdict(answer)}"]
        if answer.ordered:
            start = (f"completion of {first}", "", "")
            links = [(link.instant, link.rule, link.reason) for link in answer.chain]
            lines += _table([start, *links])
        else:
            lines += [line for part in answer.missing for line in wrapped(part, "    ")]
    return lines


def _need(answer: Answer) -> str:
    if not answer.shared:
        return "; neither writes what the other touches"
    return "; both touch " + ", ".join(f"`{name}`" for name in answer.shared)


def _verdict(answer: Answer) -> str:
    if not answer.ordered:
        return "not ordered"
    if answer.in_time:
        return f"ordered in time only; reads of {answer.second} would need a release fence"
    if answer.from_wait:
        return f"ordered behind the wait of {answer.second}, not in front of it"
    return f"ordered before {answer.second} starts"


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    """Rows in columns, the last one wrapped."""
    taken = sum(max(len(row[column]) + 2 for row in rows) for column in (0, 1))
    width = max(WIDTH - 4 - taken, NARROWEST)
    split: list[tuple[str, str, str]] = []
    for instant, rule, reason in rows:
        first, *more = textwrap.wrap(reason, width) or [""]
        split += [(instant, rule, first), *(("", "", line) for line in more)]
    return aligned(split, "    ")
