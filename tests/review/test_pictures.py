"""Every picture of every shipped launch list: well-formed, inside its canvas, nothing on top of
anything else, legible."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from review.pictures import Picture, read
from spec_project import plan_edited

from kpipe.codegen.plan.model import Method, PipelinePlan
from kpipe.codegen.review import svg
from kpipe.codegen.review.buffer_lifetimes import lifetimes
from kpipe.codegen.review.captions import caption_of
from kpipe.codegen.review.captured_graph import captured_graph
from kpipe.codegen.review.graph_picture import GraphView, graph_svg
from kpipe.codegen.review.mailbox_phases import phases
from kpipe.codegen.review.memory_pictures import buffers_view, mailbox_view, memory_svg
from kpipe.codegen.review.streams_picture import StreamsView, streams_svg
from kpipe.codegen.review.timed_schedule import timed_schedule
from kpipe.codegen.review.timeline_picture import timeline_svg
from kpipe.codegen.review.timings import Measured

VIEWS = ("estimated", "measured", "graph", "streams", "buffers", "mailbox")


def drawn(view: str, plan: PipelinePlan, methods: tuple[Method, ...]) -> str:
    """The picture of some launch lists, one below the other."""
    named = [(m.plan, caption_of(plan, m.plan, m.name)) for m in methods]
    if view in ("estimated", "measured"):
        schedules = []
        for method in methods:
            times = {x.name: 1.5 + 7 * (x.index % 3) for x in method.plan.launches}
            measured = Measured("NVIDIA H200", 32768, times, 50.0) if view == "measured" else None
            schedules.append(timed_schedule(plan, method.plan, method.name, measured))
        return timeline_svg(schedules)
    if view == "graph":
        return graph_svg([GraphView(c, captured_graph(plan, step)) for step, c in named])
    if view == "streams":
        return streams_svg([StreamsView(c, step) for step, c in named])
    if view == "buffers":
        views = [buffers_view(c, lifetimes(plan, step), plan.rows_cap) for step, c in named]
    else:
        views = [mailbox_view(c, phases(plan, step)) for step, c in named]
    return memory_svg(views, view)


def all_pictures(view: str, plans: dict[str, PipelinePlan]) -> list[Picture]:
    """Of each launch list alone, and of all lists of a pipeline in one."""
    found = []
    for plan in plans.values():
        if view == "mailbox" and not plan.mailboxes:
            continue
        alone = [(method,) for method in plan.methods]
        found += [read(drawn(view, plan, methods)) for methods in [*alone, plan.methods]]
    return found


def check_texts(pictures: list[Picture]) -> None:
    """Every text is inside, apart from the others, and not small."""
    for picture in pictures:
        assert picture.sizes and min(picture.sizes) >= 11
        for box in picture.boxes:
            assert box.left >= 4 and box.right <= picture.width - 4, box
            assert box.top >= 4 and box.bottom <= picture.height - 4, box
        for first, second in combinations(picture.boxes, 2):
            assert not first.meets(second), (first, second)


@pytest.mark.parametrize("view", VIEWS)
def test_texts_are_inside_apart_and_legible(view: str, plans: dict[str, PipelinePlan]) -> None:
    check_texts(all_pictures(view, plans))


@pytest.mark.parametrize("view", VIEWS[:-1])
def test_a_picture_grows_with_its_streams(view: str, tmp_path: Path) -> None:
    """Three streams, one forked off another: too much for the usual width of a graph."""
    main = "index_front, index_scores, topk_select, join side, core, value, o_proj]"
    old = f"main: [packed_gemm, fork side, {main}\n      side: [mla_query]"
    new = (
        "main: [packed_gemm, fork side, join side, core, value, o_proj]\n"
        "      side: [index_front, fork other, index_scores, topk_select, join other]\n"
        "      other: [mla_query]"
    )
    plan = plan_edited(tmp_path, "dsa_tp", (old, new))
    (method,) = [method for method in plan.methods if method.name == "_front"]
    assert method.plan.streams == ("main", "side", "other")
    picture = read(drawn(view, plan, (method,)))
    check_texts([picture])
    assert picture.width > 1000 or view not in ("graph", "streams")


@pytest.mark.parametrize("view", ["buffers", "mailbox"])
def test_tilted_heads_are_inside_and_a_line_apart(
    view: str, plans: dict[str, PipelinePlan]
) -> None:
    for picture in all_pictures(view, plans):
        assert picture.tilted
        for words, _, _, far_x, far_y in picture.tilted:
            assert far_x <= picture.width - 4 and far_y >= 60, words  # below the heading
        rows: dict[float, list[float]] = {}
        for _, x, y, _, _ in picture.tilted:
            rows.setdefault(y, []).append(x)
        for places in rows.values():  # their distance across the slope is a line of text or more
            assert all(b - a > 12 / 0.76 for a, b in zip(places, places[1:], strict=False))


@pytest.mark.parametrize("view", ["estimated", "measured"])
def test_no_pole_crosses_a_name(view: str, plans: dict[str, PipelinePlan]) -> None:
    seen = 0
    for picture in all_pictures(view, plans):
        for x, upper, lower in picture.poles:
            seen += 1
            for box in picture.boxes:
                beside = not box.left + 2 < x < box.right  # its own name begins at the pole
                assert beside or box.bottom <= upper + 1 or lower <= box.top + 1, (x, box)
    assert seen > 50


@pytest.mark.parametrize("view", VIEWS)
def test_every_class_has_a_rule_in_light_and_dark(
    view: str, plans: dict[str, PipelinePlan]
) -> None:
    (plan, *_) = [plan for plan in plans.values() if plan.mailboxes]
    text = drawn(view, plan, plan.methods)
    picture = read(text)
    assert picture.classes == picture.defined  # and none that nothing uses
    dark = text.partition("@media(prefers-color-scheme:dark)")[2]
    coloured = picture.classes - {"m", "b", "dash", "faint"}
    assert all(f".{name}{{" in dark for name in coloured)


def test_a_class_without_a_rule_is_a_mistake_here() -> None:
    with pytest.raises(KeyError, match="nosuch"):
        svg.document(10, "", [svg.rect(0, 0, 1, 1, "nosuch")])


@pytest.mark.parametrize("view", VIEWS)
def test_a_picture_is_the_same_twice_and_plain_ascii(
    view: str, plans: dict[str, PipelinePlan]
) -> None:
    plan = plans["dsa_dcp"]
    assert drawn(view, plan, plan.methods) == drawn(view, plan, plan.methods)
    assert drawn(view, plan, plan.methods).isascii()


def test_every_launch_is_named_and_explained(plans: dict[str, PipelinePlan]) -> None:
    for plan in plans.values():
        for method in plan.methods:
            picture = read(drawn("estimated", plan, (method,)))
            for launch in method.plan.launches:
                named = [word for word in picture.words if word.startswith(f"{launch.name} ")]
                titles = [t for t in picture.titles if t.startswith(f"{launch.name}: ")]
                assert named and len(titles) == 1, launch.name
                if not launch.pdl.attribute:
                    assert launch.pdl.attribute_reason in titles[0]
                    assert any(launch.pdl.attribute_reason in word for word in picture.words)
