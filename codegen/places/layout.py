"""A mode as lists of words, and the lists with some ops moved to every place they could stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kpipe.codegen.plan.model import MAIN

SIDE = "side"  # name of a stream that a place adds
_LISTS = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Layout:
    """The lists of a mode by stream, `main` first; words are ops, `fork X`, `join X`, `issue X`."""

    streams: _LISTS

    @property
    def launches(self) -> tuple[str, ...]:
        """Op words, stream by stream."""
        return tuple(word for _, words in self.streams for word in words if launches(word))

    def words(self, stream: str) -> tuple[str, ...]:
        """The list of a stream; empty where there is none."""
        return dict(self.streams).get(stream, ())

    def stream_of(self, word: str) -> str:
        """The stream on which an op word stands; "" where none has it."""
        return next((stream for stream, words in self.streams if word in words), "")

    def without(self, moved: Sequence[str]) -> Layout:
        """The lists with these words taken out, and with them every stream left without ops."""
        lists = {s: tuple(w for w in words if w not in moved) for s, words in self.streams}
        while empty := [s for s, words in lists.items() if s != MAIN and not words]:
            gone = {f"{verb} {stream}" for stream in empty for verb in ("fork", "join", "issue")}
            lists = {
                stream: tuple(word for word in words if word not in gone)
                for stream, words in lists.items()
                if stream not in empty
            }
        return Layout(tuple(lists.items()))

    def inserted(self, stream: str, index: int, words: Sequence[str]) -> Layout:
        """The lists with words put in at an index of a stream, which may be new."""
        lists = dict(self.streams)
        old = lists.get(stream, ())
        lists[stream] = (*old[:index], *words, *old[index:])
        return Layout(tuple(lists.items()))


@dataclass(frozen=True)
class Place:
    """A layout with `moved` at a place, and the place in words."""

    layout: Layout
    moved: tuple[str, ...]
    text: str


def launches(word: str) -> bool:
    """Whether a word of a list is an op."""
    return " " not in word


def groups(words: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """What of a stage may move: all of it, then each beginning and end, then each op."""
    every = tuple(words)
    found = [every]
    for size in range(len(every) - 1, 0, -1):
        found += [every[-size:], every[:size]]
    found += [(word,) for word in every]
    return tuple(dict.fromkeys(found))


def places(layout: Layout, moved: Sequence[str], *, regroup: bool) -> Iterator[Place]:
    """Every place for the words, kept together in this order.

    They go to each position of each stream, and to a stream of their own with each fork and join
    on main between which main has something to do.  With `regroup` they also join the ops of a
    side stream whose fork and join move with them.
    """
    moved = tuple(moved)
    rest = layout.without(moved)
    for stream, words in rest.streams:
        for index in range(len(words) + 1):
            text = f"on `{stream}`, {_behind(words, index)}"
            yield Place(rest.inserted(stream, index, moved), moved, text)
    yield from _on_side(rest, _free_stream(rest), moved, (moved,))
    if not regroup:
        return
    for stream, words in rest.streams:
        if _plain_side(rest, stream):
            lists = [(*words[:i], *moved, *words[i:]) for i in range(len(words) + 1)]
            yield from _on_side(rest.without(words), stream, moved, lists)


def _on_side(
    rest: Layout, stream: str, moved: tuple[str, ...], lists: Sequence[tuple[str, ...]]
) -> Iterator[Place]:
    """Each list as a side stream, forked and joined on main at every sensible pair of places."""
    main = rest.words(MAIN)
    for fork in range(len(main)):
        if fork and main[fork - 1].startswith(("fork ", "issue ")):
            continue  # the same as ahead of that word
        for join in range(fork + 1, len(main) + 1):
            if not any(map(launches, main[fork:join])):
                continue  # nothing runs beside it
            if join < len(main) and main[join].startswith("join "):
                continue  # the same as behind that word
            for words in lists:
                split = rest.inserted(MAIN, join, [f"join {stream}"])
                split = split.inserted(MAIN, fork, [f"fork {stream}"]).inserted(stream, 0, words)
                beside = "" if words == moved else f" {_behind(words, words.index(moved[0]))},"
                text = f"on `{stream}`,{beside} {_ends(main, fork, join)}"
                yield Place(split, moved, text)


def _ends(main: Sequence[str], fork: int, join: int) -> str:
    forked = f"forked behind `{main[fork - 1]}`" if fork else "forked at the start"
    joined = f"joined ahead of `{main[join]}`" if join < len(main) else "joined at the end"
    return f"{forked}, {joined}"


def _behind(words: Sequence[str], index: int) -> str:
    return f"behind `{words[index - 1]}`" if index else "first"


def _plain_side(layout: Layout, stream: str) -> bool:
    """A side stream of ops alone, which main forks and joins once."""
    main = layout.words(MAIN)
    return (
        stream != MAIN
        and all(map(launches, layout.words(stream)))
        and main.count(f"fork {stream}") == main.count(f"join {stream}") == 1
    )


def _free_stream(layout: Layout) -> str:
    taken, name, number = {stream for stream, _ in layout.streams}, SIDE, 1
    while name in taken:
        number += 1
        name = f"{SIDE}{number}"
    return name
