"""Edits by span: words, and items of flow and block lists."""

from __future__ import annotations

import pytest

from kpipe.codegen.commands.fix import edited
from kpipe.codegen.diagnostics import Edit, Span
from kpipe.codegen.edits import append_item, insert_item, remove_item, replace_word

FLOW = "main: [a, b,\n  c]  # why\n"
BLOCK = "main:\n  - a\n  - b  # why\n  - c\n"


def at(text: str, word: str) -> Span:
    offset = text.index(word)
    line = text.count("\n", 0, offset) + 1
    column = offset - text.rfind("\n", 0, offset)
    return Span("x", line, column, line, column + len(word))


def changed(text: str, edits: tuple[Edit, ...]) -> str:
    return edited(text, edits)


@pytest.mark.parametrize(
    ("text", "item", "expected"),
    [
        (FLOW, "b", "main: [a, j, b,\n  c]  # why\n"),
        (FLOW, "c", "main: [a, b,\n  j, c]  # why\n"),
        (BLOCK, "b", "main:\n  - a\n  - j\n  - b  # why\n  - c\n"),
    ],
)
def test_an_item_is_put_in_front(text: str, item: str, expected: str) -> None:
    assert changed(text, insert_item({"x": text}, at(text, f"{item}"), "j")) == expected


@pytest.mark.parametrize(
    ("text", "item", "expected"),
    [
        (FLOW, "c", "main: [a, b,\n  c, j]  # why\n"),
        (BLOCK, "c", "main:\n  - a\n  - b  # why\n  - c\n  - j\n"),
    ],
)
def test_an_item_is_put_behind(text: str, item: str, expected: str) -> None:
    assert changed(text, append_item({"x": text}, at(text, item), "j")) == expected


@pytest.mark.parametrize(
    ("text", "item", "expected"),
    [
        ("m: [a, b, c]\n", "b", "m: [a, c]\n"),
        ("m: [a, b, c]\n", "c", "m: [a, b]\n"),
        ("m: [a, b,\n  c]\n", "b", "m: [a,\n  c]\n"),
        ("m: [a,\n  b, c]\n", "b", "m: [a,\n  c]\n"),
        ("m: [a,\n  b]\n", "b", "m: [a,\n  b]\n"),
        ("m: [b]\n", "b", "m: [b]\n"),
        ("m:\n  - a\n  - b\n", "b", "m:\n  - a\n"),
        ("m:\n  - a\n  - b  # why\n", "b", "m:\n  - a\n  - b  # why\n"),
    ],
)
def test_an_item_is_taken_out_where_that_is_simple(text: str, item: str, expected: str) -> None:
    assert changed(text, remove_item({"x": text}, at(text, item))) == expected


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("m: [join old, b]\n", "join old", "m: [join new, b]\n"),
        ('m: ["old", b]\n', '"old"', 'm: ["new", b]\n'),
        ("m: [old@tag]\n", "old@tag", "m: [new@tag]\n"),
        ("m: [old, old]\n", "[old, old]", "m: [old, old]\n"),  # which of the two?
        ("m: [older]\n", "older", "m: [older]\n"),
    ],
)
def test_a_word_is_replaced_where_it_is_the_only_one(text: str, inside: str, expected: str) -> None:
    assert changed(text, replace_word({"x": text}, at(text, inside), "old", "new")) == expected


def test_places_that_are_not_known_are_left() -> None:
    for span in (Span("y", 1, 1, 1, 2), Span("x", 9, 1, 9, 2), Span("x", 1, 1, 2, 2)):
        texts = {"x": "a\n"}
        assert replace_word(texts, span, "a", "b") == ()
        assert insert_item(texts, span, "j") == append_item(texts, span, "j") == ()
        assert remove_item(texts, span) == ()
