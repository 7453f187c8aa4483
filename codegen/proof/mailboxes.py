"""Mailboxes of a plan: every distinct protocol explored, and what is wrong as findings.

A verdict depends on the protocol alone, so a proof is remembered between runs under the hash of
protocol, bounds and explorer.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from kpipe.codegen.cache import cache_folder
from kpipe.codegen.diagnostics import Diagnostic, Span
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.proof.mailbox.explorer import bounds_to_check, explore
from kpipe.codegen.proof.mailbox.ladder import ladder
from kpipe.codegen.proof.mailbox.protocol import Op, Protocol, protocol_of
from kpipe.codegen.proof.mailbox.verdict import Verdict

RANKS = 2  # what every run explores; the tests explore three and prove four
_REPAIRS = {
    "KP701": "put the ops in the order publish, poll, read, re-arm",
    "KP702": "raise `parities`, or end the layer with an exchange that every rank waits for",
    "KP703": "choose a sentinel that no payload can hold",
    "KP704": "re-arm behind the last op that reads the words",
    "KP705": "fill every mailbox and synchronise all ranks before the first step",
    "KP706": "put the op that publishes ahead of the one that polls",
}


def mailbox_findings(pipeline: PipelinePlan, ranks: int = RANKS) -> list[Diagnostic]:
    """One finding per launch list whose mailbox protocol can lose, mix up or miss a word."""
    if not pipeline.mailboxes:
        return []
    findings = []
    seen: set[Protocol] = set()
    for method in pipeline.methods:
        protocol = protocol_of(method.plan, pipeline)
        plain = _without_names(protocol)
        if plain in seen or all(_proved(plain, bounds) for bounds in bounds_to_check(plain, ranks)):
            seen.add(plain)
            continue
        for bounds in bounds_to_check(protocol, ranks):
            verdict = explore(protocol, bounds)
            if not verdict.proved:
                findings.append(_finding(method.plan, verdict, ranks))
                break
    return findings


def mailboxes_proved(pipeline: PipelinePlan, ranks: int = RANKS) -> bool:
    """Whether every launch list's mailbox protocol is safe; stops at the first that is not."""
    if not pipeline.mailboxes:
        return True
    plain = (_without_names(protocol_of(method.plan, pipeline)) for method in pipeline.methods)
    return all(
        _proved(protocol, bounds)
        for protocol in dict.fromkeys(plain)
        for bounds in bounds_to_check(protocol, ranks)
    )


def _without_names(protocol: Protocol) -> Protocol:
    """The protocol with numbered ops: cores of different names do the same to mailboxes."""
    items = tuple(
        replace(item, name=f"op{number}") if isinstance(item, Op) else item
        for number, item in enumerate(protocol.items)
    )
    return replace(protocol, items=items)


def _proved(protocol: Protocol, bounds: object) -> bool:
    folder = cache_folder("mailboxes")
    text = f"{protocol!r}\n{bounds!r}\n{_explorer_digest()}"
    known = Path(folder) / hashlib.sha256(text.encode()).hexdigest() if folder else None
    if known is not None and known.exists():
        return True
    proved = explore(protocol, bounds).proved  # type: ignore[arg-type]
    if proved and known is not None:
        known.touch()
    return proved


@lru_cache(maxsize=1)
def _explorer_digest() -> str:
    """Hash of the explorer's own sources: another explorer, other verdicts."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "mailbox").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _finding(step: StepPlan, verdict: Verdict, ranks: int) -> Diagnostic:
    spans: dict[str, Span] = {launch.name: launch.span for launch in step.launches}
    place = spans.get(verdict.op) or step.launches[0].span
    story = ladder(verdict, ranks)
    return Diagnostic(
        verdict.rule,
        f"mode `{step.mode}`: {verdict.what}",
        place,
        help=_REPAIRS[verdict.rule],
        story=tuple(story.rstrip("\n").split("\n")),
    )
