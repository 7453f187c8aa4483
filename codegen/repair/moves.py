"""The words of modes as they stand in the text, and edits that move them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kpipe.codegen.diagnostics import Edit, Span
from kpipe.codegen.edits import append_item, insert_item, remove_item
from kpipe.codegen.spec.document import Mapping as MappingNode
from kpipe.codegen.spec.document import Scalar, find
from kpipe.codegen.spec.document import Sequence as SequenceNode

Texts = Mapping[str, str]


@dataclass(frozen=True)
class Word:
    """One item of a stream's list; `index` is its position there."""

    mode: str
    stream: str
    index: int
    text: str
    span: Span

    def starts_at(self, span: Span) -> bool:
        """Whether the word begins where the span does."""
        places = ((at.path, at.line, at.column) for at in (self.span, span))
        return len(set(places)) == 1


@dataclass(frozen=True)
class Candidate:
    """An edit that may be a repair.

    `modes`: those whose launch lists it can change, None for all.  `rank`: edits of the mode that
    is wrong come first (0), then another mode in its place (1), then claims about the engine (2).
    """

    text: str
    edits: tuple[Edit, ...]
    modes: tuple[str, ...] | None
    rank: int = 0


class Words:
    """Every word of every mode of a spec."""

    def __init__(self, root: MappingNode) -> None:
        self.lists: dict[tuple[str, str], tuple[Word, ...]] = {}
        modes = find(root, ("overlap", "modes"))
        for mode in modes.entries if isinstance(modes, MappingNode) else ():
            streams = mode.value.entries if isinstance(mode.value, MappingNode) else ()
            for stream in streams:
                if isinstance(stream.value, SequenceNode):
                    key = mode.key, stream.key
                    self.lists[key] = tuple(
                        Word(*key, index, item.raw, item.span)
                        for index, item in enumerate(stream.value.items)
                        if isinstance(item, Scalar)
                    )

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes in file order."""
        return tuple(dict.fromkeys(mode for mode, _ in self.lists))

    def of(self, mode: str) -> tuple[Word, ...]:
        """The words of a mode, stream by stream."""
        return tuple(w for (name, _), words in self.lists.items() if name == mode for w in words)

    def at(self, span: Span | None) -> Word | None:
        """The word that stands at a place."""
        found = (w for words in self.lists.values() for w in words if w.span == span)
        return next(found, None)

    def named(self, mode: str, stream: str, text: str) -> Word | None:
        """The first word of a stream with this text."""
        words = self.lists.get((mode, stream), ())
        return next((word for word in words if word.text == text), None)

    def behind(self, word: Word) -> Word | None:
        """The next word of the stream."""
        words = self.lists[word.mode, word.stream]
        return words[word.index + 1] if word.index + 1 < len(words) else None


def exchanged(first: Word, second: Word) -> tuple[Edit, ...]:
    """The two words in each other's place."""
    return (Edit(first.span, second.text), Edit(second.span, first.text))


def moved_ahead(texts: Texts, word: Word, target: Word) -> tuple[Edit, ...]:
    """The word taken out and put in front of the target, on the target's stream."""
    removed = remove_item(texts, word.span)
    return (*insert_item(texts, target.span, word.text), *removed) if removed else ()


def moved_behind(texts: Texts, word: Word, target: Word, words: Words) -> tuple[Edit, ...]:
    """The word taken out and put behind the target, on the target's stream."""
    following = words.behind(target)
    if following is word:
        return ()
    if following is not None:
        return moved_ahead(texts, word, following)
    removed = remove_item(texts, word.span)
    return (*append_item(texts, target.span, word.text), *removed) if removed else ()


def reordered(texts: Texts, words: Words, reader: Word, writer: Word) -> list[Candidate]:
    """Ways to have the writer done before the reader starts, both of one mode."""
    found: list[tuple[str, tuple[Edit, ...]]] = []
    r, w = reader.text, writer.text
    if reader.stream == writer.stream:
        if writer.index > reader.index:
            found.append((f"swap `{r}` and `{w}`", exchanged(reader, writer)))
            if writer.index > reader.index + 1:
                found.append((f"move `{w}` ahead of `{r}`", moved_ahead(texts, writer, reader)))
                found.append(
                    (f"move `{r}` behind `{w}`", moved_behind(texts, reader, writer, words))
                )
    else:
        found += _joined(texts, words, reader, writer)
        found += _forked(texts, words, reader, writer)
        found += [
            (
                f"move `{r}` to stream `{writer.stream}`, behind `{w}`",
                moved_behind(texts, reader, writer, words),
            ),
            (
                f"move `{w}` to stream `{reader.stream}`, ahead of `{r}`",
                moved_ahead(texts, writer, reader),
            ),
        ]
    return [Candidate(text, edits, (reader.mode,)) for text, edits in found if edits]


def _joined(
    texts: Texts, words: Words, reader: Word, writer: Word
) -> list[tuple[str, tuple[Edit, ...]]]:
    """The writer's stream joined ahead of the reader: a later join moves, else one is put in."""
    join = f"join {writer.stream}"
    there = words.named(reader.mode, reader.stream, join)
    if there is None:
        return [(f"write `{join}` ahead of `{reader.text}`", insert_item(texts, reader.span, join))]
    if there.index < reader.index:
        return []
    text = f"move `{join}` ahead of `{reader.text}`"
    if there.index == reader.index + 1:
        return [(text, exchanged(reader, there))]
    return [(text, moved_ahead(texts, there, reader))]


def _forked(
    texts: Texts, words: Words, reader: Word, writer: Word
) -> list[tuple[str, tuple[Edit, ...]]]:
    """The reader's stream forked behind the writer, or the writer ahead of the fork."""
    fork = words.named(reader.mode, writer.stream, f"fork {reader.stream}")
    if fork is None or fork.index > writer.index:
        return []
    text = f"fork `{reader.stream}` behind `{writer.text}`"
    if fork.index + 1 == writer.index:
        return [(text, exchanged(fork, writer))]
    return [
        (text, moved_behind(texts, fork, writer, words)),
        (
            f"move `{writer.text}` ahead of `{fork.text}`",
            moved_ahead(texts, writer, fork),
        ),
    ]


def moved_for_all(
    texts: Texts, words: Words, pairs: Sequence[tuple[Word, Word]]
) -> Iterator[Candidate]:
    """One move that serves several pairs (reader, writer) of a mode: a writer ahead of all its
    readers and of the forks of their streams, a reader behind all its writers."""
    for writer in dict.fromkeys(writer for _, writer in pairs):
        places = [_place_for(words, reader, writer) for reader, w in pairs if w == writer]
        found = [place for place in places if place is not None]
        first = min(found, key=lambda place: place.index, default=None)
        if first is not None and len(set(found)) > 1 and first.index < writer.index:
            edits = moved_ahead(texts, writer, first)
            yield Candidate(f"move `{writer.text}` ahead of `{first.text}`", edits, (writer.mode,))
    for reader in dict.fromkeys(reader for reader, _ in pairs):
        writers = [w for r, w in pairs if r == reader and w.stream == reader.stream]
        last = max(writers, key=lambda writer: writer.index, default=None)
        if last is not None and len(set(writers)) > 1 and last.index > reader.index:
            edits = moved_behind(texts, reader, last, words)
            yield Candidate(f"move `{reader.text}` behind `{last.text}`", edits, (reader.mode,))


def _place_for(words: Words, reader: Word, writer: Word) -> Word | None:
    """The word of the writer's stream behind which the reader may start."""
    if reader.stream == writer.stream:
        return reader
    return words.named(reader.mode, writer.stream, f"fork {reader.stream}")
