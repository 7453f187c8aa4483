"""Why one instant precedes another: one sentence per construct that adds an edge."""

from __future__ import annotations

TEXTS: dict[str, str] = {
    # inside one launch
    "enter": "the wait of {second} returns after {second} has started",
    "body": "{second} exits after its body",
    "trigger": "a CTA of {second} triggers after it has started",
    "exit": "{second} has exited only when every CTA has triggered or exited",
    "release": "every CTA of {second} triggers behind its wait",
    "flush": "the stores of {second} are flushed after its last CTA has exited",
    # issued eagerly
    "stream": "{second} starts when everything earlier on its stream has completed, {first} too",
    "join": "{second} starts behind the wait on event {event}, which covers {first} on another "
    "stream",
    "early_start": "{second} carries the attribute: it starts when every CTA of {first} has "
    "triggered or exited",
    "wait": "the wait of {second} covers its predecessor on the stream, {first}",
    "boundary": "a graph is one plain item of its stream: {first} completes before {second} starts",
    # inside a captured graph
    "graph_full": "{first} to {second} is a full edge of the graph",
    "graph_start": "{first} to {second} is a programmatic edge of the graph: {second} starts when "
    "every CTA of {first} has triggered or exited",
    "graph_wait": "the wait of {second} covers every kernel it depends on in the graph, {first} "
    "too",
    # assumption
    "m1": "assumption m1: {second} completes after its programmatic parent {first}",
}


def reason(rule: str, first: str, second: str, event: int) -> str:
    """The sentence of `rule` for two launch names; `event` is -1 where no event is involved."""
    text = TEXTS[rule].format(first=first, second=second, event=event)
    if event >= 0 and rule.startswith("graph_"):
        return f"{text} (through event {event})"
    return text
