"""Streams of a graph's replay: the observed cases, and the order in which kpipe issues."""

from __future__ import annotations

from pathlib import Path

import pytest
from proof_chains import MAIN, SIDE, THIRD, event, on, plain
from spec_project import PIPELINES, make_project, plan_edited, plan_of

from kpipe.codegen.plan.model import Launch
from kpipe.codegen.proof.lanes import replay_streams
from kpipe.codegen.proof.program import Action
from kpipe.codegen.proof.replay import predicted_streams, replay_warnings

COUNT = 61


def layers(order: str, head: bool = True, count: int = COUNT) -> tuple[Action, ...]:
    """Layers of one fork and one join; in `order`, m is a kernel on main and s one on the side."""
    layer = on(MAIN, plain("head")) if head else ()
    layer += event(0, MAIN, SIDE)
    for letter in order:
        layer += on(MAIN if letter == "m" else SIDE, plain(letter))
    return (layer + event(1, SIDE, MAIN)) * count


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(
    ("order", "streams"),
    [
        ("m", 1),
        ("ms", 2),
        ("mms", 2),
        ("mss", 2),
        ("sm", COUNT + 1),
        ("smm", COUNT + 1),
        ("ssm", COUNT + 1),
        ("msm", COUNT + 1),  # as reported, reordering at the fork alone does not help
    ],
)
def test_the_branch_recorded_first_takes_the_chain_along(
    order: str, streams: int, head: bool
) -> None:
    assert replay_streams(layers(order, head)) == streams


def test_it_grows_with_the_layers_only_in_the_bad_order() -> None:
    assert [replay_streams(layers("sm", count=n)) for n in (1, 2, 10)] == [2, 3, 11]
    assert [replay_streams(layers("ms", count=n)) for n in (1, 2, 10)] == [2, 2, 2]


def test_two_side_streams() -> None:
    """Three lanes where both come last; each that comes first costs one more per layer."""

    def both(*middle: tuple[Action, ...]) -> int:
        fork = (*on(MAIN, plain("p")), *event(0, MAIN, SIDE), *event(1, MAIN, THIRD))
        joins = (*event(2, SIDE, MAIN), *event(3, THIRD, MAIN))
        return replay_streams((*fork, *(a for part in middle for a in part), *joins) * 20)

    m, s, t = on(MAIN, plain("m")), on(SIDE, plain("s")), on(THIRD, plain("t"))
    assert both(m, s, t) == 3
    assert both(s, m, t) >= 20
    assert both(s, t, m) >= 20


def test_one_stream() -> None:
    assert replay_streams(on(MAIN, plain("a"), plain("b")) * 5) == 1
    assert replay_streams(()) == 0


@pytest.mark.parametrize("name", PIPELINES)
def test_shipped_pipelines_replay_on_the_streams_they_declare(name: str, tmp_path: Path) -> None:
    plan = plan_of(make_project(tmp_path), name)
    assert replay_warnings(plan) == ()
    forked = [m.plan for m in plan.methods if len(m.plan.streams) > 1]
    assert forked and {predicted_streams(step) for step in forked} == {2}


ASKED = (
    "    fork:\n      main: [packed_gemm, fork side, query_norm",
    "    fork:\n      main: [packed_gemm, fork side, issue side, query_norm",
)


def test_a_stream_that_is_issued_early_is_warned_about(tmp_path: Path) -> None:
    plan = plan_edited(tmp_path, "dsa_tp", ASKED)
    (warning,) = replay_warnings(plan)
    assert (warning.code, warning.severity) == ("KP501", "warning")
    assert warning.message == (
        "mode `fork` issues stream `side` ahead of the work beside it: the replay of a graph of 61 "
        "layers would use 62 streams, not 2"
    )
    assert warning.help.startswith("delete `issue side`: a stream is issued right ahead of its")
    assert [role for role, _ in warning.related] == ["join"]
    step = next(m.plan for m in plan.methods if m.plan.mode == "fork")
    assert predicted_streams(step, layers=10) == 11
    assert [x.name for x in step.launches][:3] == ["packed_gemm", "mla_query", "query_norm"]


def test_the_overlap_that_is_proved_does_not_depend_on_the_order_of_issue(tmp_path: Path) -> None:
    early = plan_edited(tmp_path / "a", "dsa_tp", ASKED)
    late = plan_edited(tmp_path / "b", "dsa_tp")

    def decided(plan) -> dict:  # noqa: ANN001
        return {
            (method.plan.mode, method.plan.cores): {x.name: x.pdl for x in method.plan.launches}
            for method in plan.methods
        }

    assert decided(early) == decided(late)


def test_a_side_stream_stands_right_ahead_of_its_join(tmp_path: Path) -> None:
    plan = plan_of(make_project(tmp_path), "dsa_dcp")
    seen = 0
    for method in plan.methods:
        items = method.plan.items
        for position, item in enumerate(items):
            if isinstance(item, Launch) and item.stream != "main":
                following = [i for i in items[position:] if getattr(i, "stream", "") != "side"]
                joined = next(i for i in items[position:] if not isinstance(i, Launch))
                seen += 1
                assert joined.stream == "side" and items.index(joined) < items.index(following[0])
    assert seen
