"""The timeline of a race: its exact text, and that it shows an execution that is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_project import findings_edited

from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Access, Kernel, Launch, Program, Segment
from kpipe.codegen.proof.races import Race, check
from kpipe.codegen.proof.story import LEGEND, PITCH, WIDTH, race_story

SILENT = ("between_layers: waits", "between_layers: silent")


def program(*launches: tuple[int, Kernel], captured: bool = False) -> Program:
    actions = tuple(Launch(stream, node) for stream, node in launches)
    return Program((Segment(actions, captured),))


def story_of(subject: Program) -> tuple[str, ...]:
    (race,) = check(subject)
    gap = Order(subject).missing((race.first[0], "E"), (race.second[0], "S"))
    return race_story(subject, race, gap.silent if gap else ())


def writes(name: str, **overlap: object) -> Kernel:
    return Kernel(name, (Access("gated", write=True),), **overlap)  # type: ignore[arg-type]


def reads(name: str, **overlap: object) -> Kernel:
    return Kernel(name, (Access("gated", write=False),), **overlap)  # type: ignore[arg-type]


def test_a_silent_neighbour_is_shown_between_the_two(tmp_path: Path) -> None:
    found = findings_edited(tmp_path, "dsa_dcp", SILENT)
    message = "mode `fork`: `o_proj` writes `o_mail` before `o_reduce` has written it"
    (finding,) = [finding for finding in found if finding.message == message]
    assert finding.story == (
        "first    o_reduce        S==X=================E           writes `o_mail` until E",
        "between  between layers        S--T--X--E                 never waits",
        "second   o_proj                            S=====T==X==E  writes `o_mail` from S",
        LEGEND,
    )
    assert all(len(line) <= WIDTH and line.isascii() for f in found for line in f.story)
    assert all(f.story[-1] == LEGEND for f in found)


def test_two_streams_without_a_join() -> None:
    assert story_of(program((0, reads("mla_value")), (1, writes("core")))) == (
        "first   mla_value     S==X--E        reads `gated` until X",
        "second  core       S===========X==E  writes `gated` from S",
        LEGEND,
    )


def test_an_early_launch_that_waits_reads_in_front_of_its_wait() -> None:
    early = Kernel(
        "next", (Access("gated", write=False, early=True),), pdl=True, waits=True, trigger="early"
    )
    subject = program((0, writes("core", trigger="early")), (0, early))
    lines = story_of(subject)
    assert lines[:2] == (
        "first   core  S==T=====X==E              writes `gated` until E",
        "second  next        S========W==T==X--E  reads `gated` from S",
    )


@pytest.mark.parametrize("captured", [False, True])
def test_the_second_access_begins_while_the_first_is_in_flight(captured: bool) -> None:
    subject = program(
        (0, writes("a", trigger="early")),
        (0, Kernel("b", pdl=True, trigger="early")),
        (0, reads("c", pdl=True, waits=True)),
        captured=captured,
    )
    lines = story_of(subject)
    assert [line.split()[0] for line in lines[:3]] == ["first", "between", "second"]
    at = len(lines[0]) - len(lines[0].split("  ", 2)[2].lstrip())
    assert lines[2].index("W", at) < lines[0].index("E", at)
    assert (lines[2].index("W", at) - at) % PITCH == 0


def test_long_names_stay_within_the_width() -> None:
    access = Access("b" * 90, write=True)
    subject = program((0, Kernel("a" * 40, (access,))), (1, Kernel("c" * 40, (access,))))
    lines = race_story(subject, Race((0, 0), (1, 0), access.buffer, "WAW", "racy", ""), ())
    assert [len(line) for line in lines[:2]] == [WIDTH, WIDTH]
    assert lines[0].startswith(f"first   {'a' * 17}...  ") and lines[0].endswith("...")
