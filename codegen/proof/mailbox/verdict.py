"""What an exploration says: a proof, or the shortest way into an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "",  # proved
    "lost",  # overwritten by a second publish of the same layer
    "reused",  # overwritten by a later layer before its reader has re-armed it
    "never_rearmed",  # overwritten, or left over, and nothing re-arms it
    "stale",  # a poll or a read returns the word of another layer
    "unarrived",  # a read that no poll guards meets the sentinel
    "torn",  # a word changes while it is read
    "rearm",  # re-armed too early: ahead of a poll or a read, or on a newer word
    "sentinel",  # the payload looks like the sentinel, the reader waits for ever
    "init",  # the first fill erases a word that has already arrived
    "deadlock",  # no rank can go on
    "undecided",  # more states than the limit
]

# The rule of `kpipe check` that a kind belongs to.
RULES: dict[str, str] = {
    "lost": "KP701",
    "reused": "KP702",
    "never_rearmed": "KP701",
    "stale": "KP701",
    "unarrived": "KP701",
    "torn": "KP704",
    "rearm": "KP704",
    "sentinel": "KP703",
    "init": "KP705",
    "deadlock": "KP706",
    "undecided": "KP706",
}


@dataclass(frozen=True)
class Event:
    """One step of a counterexample.

    `peer` is the target of a publish, the source of a poll or re-arm, -1 for a read or a fill.
    `held` says what the word, or each word, held just before; `forged` marks a publish whose
    payload equals the sentinel.
    """

    rank: int
    step: int
    layer: int
    op: str
    act: str
    box: str
    parity: int
    peer: int
    held: str
    forged: bool = False


@dataclass(frozen=True)
class Verdict:
    """The result of an exploration; `counterexample` is the shortest there is.

    In the mailboxes of `left_out` a rank's words to itself are safe by its own launch order;
    their steps are not in the counterexample and can run as soon as their predecessors have.
    """

    proved: bool
    states: int
    counterexample: tuple[Event, ...] | None
    what: str
    kind: Kind = ""
    box: str = ""  # the mailbox in which it goes wrong
    op: str = ""  # the op whose step is the error, or which waits for ever
    left_out: tuple[str, ...] = ()

    @property
    def rule(self) -> str:
        """The rule of `kpipe check`; empty for a proof."""
        return RULES.get(self.kind, "")
