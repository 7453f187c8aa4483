"""The grammar of modes: host order, forks and joins, and what is complete when an op starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpipe.codegen.plan.modes import Mode, Word, ancestors, read_mode
from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.document import read_document
from kpipe.codegen.spec.load import Source


def read(text: str) -> tuple[Mode, list[tuple[str, str]]]:
    """A mode and its findings as (code, message)."""
    root = read_document("x.yaml", text)
    report = Report(Source("x.yaml", root, {}))
    mode = read_mode("m", root, root.span, report)
    return mode, [(d.code, d.message) for d in sorted(report.found)]


def host_order(text: str) -> list[str]:
    mode, found = read(text)
    assert found == []
    return [w.name if w.verb == "launch" else f"{w.verb} {w.name}" for w in mode.words]


def complete(text: str) -> dict[str, set[str]]:
    """Op -> the ops that are complete when it may start."""
    mode, found = read(text)
    assert found == []
    ahead = ancestors(mode.words)
    return {
        word.name: {mode.words[p].name for p in before}
        for word, before in zip(mode.words, ahead, strict=True)
        if word.verb == "launch"
    }


def test_a_stream_is_issued_right_ahead_of_its_join() -> None:
    text = "main: [a, fork side, b, join side, c]\nside: [x, y]\n"
    assert host_order(text) == ["a", "fork side", "b", "x", "y", "join side", "c"]


def test_a_stream_may_be_issued_earlier() -> None:
    text = "main: [a, fork side, b, issue side, c, join side]\nside: [x]\n"
    assert host_order(text) == ["a", "fork side", "b", "x", "c", "join side"]
    at_once = text.replace("b, issue side", "issue side, b")
    assert host_order(at_once) == ["a", "fork side", "x", "b", "c", "join side"]
    assert complete(text) == complete(at_once) == complete(text.replace("issue side, ", ""))


def test_a_second_join_finds_the_stream_issued() -> None:
    text = "main: [fork one, fork two, a, join one, join two]\none: [x]\ntwo: [y, join one, z]\n"
    order = ["fork one", "fork two", "a", "x", "join one", "y", "join one", "z", "join two"]
    assert host_order(text) == order


def test_a_stream_that_another_one_forks_may_be_joined_first() -> None:
    """`two` is forked by `one`, which nothing has joined yet: it is issued for the fork's sake."""
    text = "main: [fork one, a, join two, b, join one]\none: [x, fork two, y]\ntwo: [z]\n"
    order = ["fork one", "a", "x", "fork two", "y", "z", "join two", "b", "join one"]
    assert host_order(text) == order


def test_a_stream_may_join_one_that_is_forked_after_it() -> None:
    text = "main: [fork one, a, fork two, b, join one]\none: [x, join two]\ntwo: [y]\n"
    assert host_order(text) == ["fork one", "a", "fork two", "b", "x", "y", "join two", "join one"]


def test_the_order_of_streams_in_the_file_does_not_matter() -> None:
    text = "side: [x]\nmain: [a, fork side, b, join side]\n"
    assert host_order(text) == ["a", "fork side", "b", "x", "join side"]


def test_a_side_stream_may_fork_and_join_another() -> None:
    text = "main: [fork one, a, join one]\none: [fork two, x, join two]\ntwo: [y]\n"
    order = ["fork one", "a", "fork two", "x", "y", "join two", "join one"]
    assert host_order(text) == order


def test_streams_of_words() -> None:
    mode, _ = read("main: [a, fork side, b, join side]\nside: [x]\n")
    assert [(w.verb, w.stream) for w in mode.words] == [
        ("launch", "main"),
        ("fork", "main"),
        ("launch", "main"),
        ("launch", "side"),
        ("join", "main"),
    ]
    assert mode.ops == ("a", "b", "x")


def test_ancestors_follow_stream_order_fork_and_join() -> None:
    text = "main: [a, fork side, b, c, join side, d]\nside: [x, y]\n"
    assert complete(text) == {
        "a": set(),
        "x": {"a"},
        "y": {"a", "x"},
        "b": {"a"},
        "c": {"a", "b"},
        "d": {"a", "b", "c", "x", "y"},
    }


def test_ancestors_through_a_third_stream() -> None:
    text = "main: [a, fork one, fork two, b, join two, c]\none: [x]\ntwo: [y, join one, z]\n"
    found = complete(text)
    assert found["z"] == {"a", "x", "y"}
    assert found["b"] == {"a"}
    assert found["c"] == {"a", "b", "x", "y", "z"}


@given(st.integers(1, 12))
def test_one_stream_is_a_chain(count: int) -> None:
    place = read_document("x.yaml", "a: 1").span
    words = tuple(Word("launch", f"op{i}", "main", place) for i in range(count))
    assert ancestors(words) == tuple(frozenset(range(i)) for i in range(count))


def test_a_stream_may_be_joined_by_way_of_another() -> None:
    _, found = read("main: [fork one, fork two, join two]\none: [x]\ntwo: [join one, y]\n")
    assert found == []


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (
            "main: [fork side, a]\nside: [x]\n",
            "KP306",
            "mode `m` forks stream `side` and never joins it",
        ),
        (
            "main: [fork one, fork two, join two]\none: [x]\ntwo: [y]\n",
            "KP306",
            "mode `m` forks stream `one` and never joins it",
        ),
        (
            "main: [fork side, a, join side, fork side]\nside: [x]\n",
            "KP112",
            "mode `m`: stream `side` is forked twice",
        ),
        (
            "main: [join side, fork side, a, join side]\nside: [x]\n",
            "KP112",
            "mode `m`: `join side` stands ahead of its fork",
        ),
        (
            "main: [fork side, a, join side]\nside: [x, fork main]\n",
            "KP112",
            "mode `m`: `main` is the stream of the step, always running",
        ),
        (
            "main: [a]\nside: [x]\n",
            "KP112",
            "mode `m`: stream `side` is never forked, so its ops would not run",
        ),
        (
            "main: [issue side, fork side, a, join side]\nside: [x]\n",
            "KP112",
            "mode `m`: `issue side` stands ahead of its fork",
        ),
        (
            "main: [fork side, a, join side, issue side]\nside: [x]\n",
            "KP112",
            "mode `m`: stream `side` is issued already",
        ),
        (
            "main: [fork side, issue sid, a, join side]\nside: [x]\n",
            "KP103",
            "unknown stream in mode `m`: `sid`",
        ),
        ("side: [x]\n", "KP112", "mode `m` has no stream `main`"),
        ("main: []\n", "KP112", "mode `m` launches nothing"),
        (
            "main: [a, 'fork  side  x']\n",
            "KP112",
            "mode `m`: `fork  side  x` is not an op, `fork STREAM`, `join STREAM` or "
            "`issue STREAM`",
        ),
        (
            "main: [a]\nrequires: {dcp: maybe}\n",
            "KP101",
            "mode `m`: `requires.dcp` is true or false",
        ),
        (
            "main: [a]\nrequires: {dpc: true}\n",
            "KP103",
            "unknown requirement of mode `m`: `dpc`",
        ),
    ],
)
def test_refusals(text: str, code: str, message: str) -> None:
    _, found = read(text)
    assert found == [(code, message)]


def test_requirements() -> None:
    mode, found = read("main: [a]\nrequires: {dcp: false, fused_indexer: true}\n")
    assert found == []
    assert mode.requires == (("dcp", False), ("fused_indexer", True))


def test_tags_are_part_of_the_word() -> None:
    assert host_order("main: [norm@first, norm@second]\n") == ["norm@first", "norm@second"]
