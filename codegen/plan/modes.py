"""Modes: lists of ops on streams, read into host order with forks and joins.

A side stream starts where another stream says `fork NAME`, and what it did is waited for where a
stream says `join NAME`.  The host issues its list as late as it can, right ahead of the first
join: recorded earlier, it would make the replay of a graph use one stream per layer.  `issue NAME`
asks for an earlier place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingType
from dataclasses import dataclass

from kpipe.codegen.diagnostics import Span
from kpipe.codegen.plan.model import MAIN
from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.document import Mapping, Scalar, Sequence, find
from kpipe.codegen.spec.models import Requires

_WORD = re.compile(r"^(fork|join|issue)\s+([a-z][a-z0-9_]*)$")
_OP = re.compile(r"^[a-z][a-z0-9_]*(@[a-z][a-z0-9_]*)?$")
_REQUIRES = "requires"
_FACTS = tuple(Requires.model_fields)


@dataclass(frozen=True)
class Word:
    """One word of a mode in host order."""

    verb: str  # launch, fork, join
    name: str  # op word, or the stream that is forked or joined
    stream: str  # where it stands
    span: Span


@dataclass(frozen=True)
class Mode:
    """A mode in host order."""

    name: str
    words: tuple[Word, ...]
    span: Span
    requires: tuple[tuple[str, bool], ...] = ()  # fact -> what it must be

    @property
    def ops(self) -> tuple[str, ...]:
        """Op words in host order."""
        return tuple(word.name for word in self.words if word.verb == "launch")


def read_mode(name: str, node: Mapping, span: Span, report: Report) -> Mode:
    """One mode of the spec; grammar errors go to the report."""
    lists: dict[str, tuple[Word, ...]] = {}
    for entry in node.entries:
        if entry.key == _REQUIRES:
            continue
        if not isinstance(entry.value, Sequence):
            message = f"mode `{name}`: stream `{entry.key}` takes a list of ops"
            place = entry.value.span if getattr(entry.value, "raw", "-") else entry.key_span
            report.error("KP112", message, place, help=f"write `{entry.key}: [...]`")
            lists[entry.key] = ()
            continue
        lists[entry.key] = _words(name, entry.key, entry.value, report)
    if MAIN not in lists:
        message = f"mode `{name}` has no stream `{MAIN}`"
        report.error("KP112", message, span, help=f"write `{MAIN}: [...]`, the stream of the step")
        return Mode(name, (), span)
    mode = mode_of(name, lists, span, _requires(name, node, report), report)
    if not mode.words and isinstance(find(node, (MAIN,)), Sequence):
        message = f"mode `{name}` launches nothing"
        report.error("KP112", message, span, help="list its ops, or delete the mode")
    return mode


def mode_of(
    name: str,
    lists: MappingType[str, tuple[Word, ...]],
    span: Span,
    requires: tuple[tuple[str, bool], ...],
    report: Report,
) -> Mode:
    """The mode with these lists of words by stream, `main` among them, in host order.

    Forks and joins that do not fit together go to the report.
    """
    words = _issue(name, lists, report)
    _check_joined(name, words, report)
    for stream, listed in lists.items():
        if stream != MAIN and not any(w.verb == "fork" and w.name == stream for w in words):
            if not listed:
                continue
            place = listed[0].span
            report.error(
                "KP112",
                f"mode `{name}`: stream `{stream}` is never forked, so its ops would not run",
                place,
                help=f"write `fork {stream}` where it may start and `join {stream}` where its "
                "results are needed",
            )
    return Mode(name, words, span, requires)


def _requires(mode: str, node: Mapping, report: Report) -> tuple[tuple[str, bool], ...]:
    """When the mode is legal: facts of the spec that must hold, or must not."""
    found = node.entry(_REQUIRES)
    if found is None:
        return ()
    if not isinstance(found.value, Mapping):
        report.error(
            "KP101",
            f"mode `{mode}`: `requires` takes a mapping",
            found.value.span,
            allowed=_FACTS,
            help="write for example `requires: {fused_indexer: true}`",
        )
        return ()
    wanted = []
    for entry in found.value.entries:
        value = entry.value.value if isinstance(entry.value, Scalar) else None
        if entry.key not in _FACTS:
            what = f"requirement of mode `{mode}`:"
            report.unknown(what, entry.key, entry.key_span, _FACTS)
        elif not isinstance(value, bool):
            message = f"mode `{mode}`: `requires.{entry.key}` is true or false"
            report.error("KP101", message, entry.value.span, help="write it without quotes")
        else:
            wanted.append((entry.key, value))
    return tuple(wanted)


def _words(mode: str, stream: str, node: Sequence, report: Report) -> tuple[Word, ...]:
    words: list[Word] = []
    for item in node.items:
        text = item.raw if isinstance(item, Scalar) else ""
        match = _WORD.match(text)
        if match:
            words.append(Word(match[1], match[2], stream, item.span))
        elif _OP.match(text):
            words.append(Word("launch", text, stream, item.span))
        else:
            report.error(
                "KP112",
                f"mode `{mode}`: `{text or 'a nested list'}` is not an op, `fork STREAM`, "
                "`join STREAM` or `issue STREAM`",
                item.span,
                help="names are lower-case letters, digits and _, a letter first",
            )
    return tuple(words)


def _issue(
    mode: str, lists: MappingType[str, tuple[Word, ...]], report: Report
) -> tuple[Word, ...]:
    """Host order: a stream's list is issued where it is first joined, or where `issue` says."""
    issue = _Issue(mode, lists, report)
    issue.emit(MAIN)
    for name in issue.waiting:  # never joined, which is found elsewhere
        issue.emit(name)
    return tuple(issue.words)


class _Issue:
    """Collects the words of a mode in host order."""

    def __init__(
        self, mode: str, lists: MappingType[str, tuple[Word, ...]], report: Report
    ) -> None:
        self.mode, self.lists, self.report = mode, lists, report
        self.streams = [name for name in lists if name != MAIN]
        self.words: list[Word] = []
        self.state: dict[str, str] = {}  # stream -> forked, open, done

    @property
    def waiting(self) -> tuple[str, ...]:
        """Streams that have been forked and not issued, in the order of their forks."""
        return tuple(name for name, state in self.state.items() if state == "forked")

    def emit(self, stream: str) -> None:
        """Issue the list of a stream."""
        self.state[stream] = "open"
        for word in self.lists[stream]:
            if word.verb == "launch":
                self.words.append(word)
            elif self._known(word):
                getattr(self, f"_{word.verb}")(word)
        self.state[stream] = "done"

    def _known(self, word: Word) -> bool:
        if word.name == MAIN:
            message = f"mode `{self.mode}`: `{MAIN}` is the stream of the step, always running"
            help = f"`{word.verb}` one of the other streams"
            self.report.error("KP112", message, word.span, allowed=self.streams, help=help)
        elif word.name not in self.lists:
            what = f"stream in mode `{self.mode}`:"
            self.report.unknown(what, word.name, word.span, self.streams)
        return word.name in self.streams

    def _fork(self, word: Word) -> None:
        if word.name in self.state:
            message = f"mode `{self.mode}`: stream `{word.name}` is forked twice"
            self.report.error("KP112", message, word.span, help="use a second stream")
            return
        self.state[word.name] = "forked"
        self.words.append(word)

    def _join(self, word: Word) -> None:
        if word.name == word.stream:
            message = f"mode `{self.mode}`: stream `{word.name}` joins itself"
            self.report.error("KP112", message, word.span, help="join it in another stream")
            return
        self._until_forked(word)
        if self.state.get(word.name) == "forked":
            self.emit(word.name)
        if self._issued(word):
            self.words.append(word)

    def _issue(self, word: Word) -> None:
        self._until_forked(word)
        if self.state.get(word.name) == "done":
            message = f"mode `{self.mode}`: stream `{word.name}` is issued already"
            help = f"put `issue {word.name}` ahead of what joins it, or delete it"
            self.report.error("KP112", message, word.span, help=help)
            return
        if self.state.get(word.name) == "forked":
            self.emit(word.name)
        self._issued(word)

    def _until_forked(self, word: Word) -> None:
        """Issue what forks the stream: the list of another stream that is still waiting."""
        while word.name not in self.state:
            owner = next((name for name in self.waiting if self._leads_to(name, word.name)), None)
            if owner is None:
                return
            self.emit(owner)

    def _leads_to(self, stream: str, name: str) -> bool:
        seen, frontier = {stream}, [stream]
        while frontier:
            for word in self.lists[frontier.pop()]:
                if word.verb == "fork" and word.name == name:
                    return True
                if word.verb == "fork" and word.name in self.lists and word.name not in seen:
                    seen.add(word.name)
                    frontier.append(word.name)
        return False

    def _issued(self, word: Word) -> bool:
        if self.state.get(word.name) == "done":
            return True
        message = f"mode `{self.mode}`: `{word.verb} {word.name}` stands ahead of its fork"
        self.report.error("KP112", message, word.span, help=f"`fork {word.name}` first")
        return False


def _check_joined(mode: str, words: tuple[Word, ...], report: Report) -> None:
    """Every forked stream must end in main, or its work outlives the layer."""
    waits_on: dict[str, set[str]] = {}
    for word in words:
        if word.verb == "join":
            waits_on.setdefault(word.stream, set()).add(word.name)
    reached, frontier = {MAIN}, [MAIN]
    while frontier:
        for stream in waits_on.get(frontier.pop(), ()):
            if stream not in reached:
                reached.add(stream)
                frontier.append(stream)
    for word in words:
        if word.verb == "fork" and word.name not in reached:
            report.error(
                "KP306",
                f"mode `{mode}` forks stream `{word.name}` and never joins it",
                word.span,
                help=f"write `join {word.name}` ahead of the first op that needs its results; "
                "work left in flight breaks graph capture and the next layer",
            )


def ancestors(words: tuple[Word, ...]) -> tuple[frozenset[int], ...]:
    """For each word, the positions of the launches that are complete when it may start.

    This is the order that full dependencies give: stream order, fork and join.
    """
    done: dict[str, frozenset[int]] = {MAIN: frozenset()}
    ahead: list[frozenset[int]] = []
    for position, word in enumerate(words):
        before = done.setdefault(word.stream, frozenset())
        ahead.append(before)
        if word.verb == "fork":
            done[word.name] = before
        elif word.verb == "join":
            done[word.stream] = before | done.get(word.name, frozenset())
        else:
            done[word.stream] = before | {position}
    return tuple(ahead)
