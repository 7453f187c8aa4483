"""Shipped plans are proved, and what is taken away from them is missed by the proof."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from spec_project import PIPELINES, findings_edited, make_project

from kpipe.codegen.ops.contract import Kind, Phase
from kpipe.codegen.plan.api import plan_pipeline
from kpipe.codegen.plan.model import Join, Launch, PipelinePlan, StepPlan
from kpipe.codegen.proof.lower import lower
from kpipe.codegen.proof.program import Kernel, Program, Reuse
from kpipe.codegen.proof.program import Launch as Node
from kpipe.codegen.proof.prove import conflicts, prove
from kpipe.codegen.proof.proved import ProvedPlan
from kpipe.codegen.proof.races import compare_all
from kpipe.codegen.proof.synthesis import races_of


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProvedPlan]:
    root = make_project(tmp_path_factory.mktemp("project"))
    return {
        name: prove(plan_pipeline(str(root / "pipelines" / f"{name}.yaml"))) for name in PIPELINES
    }


def steps(proved: ProvedPlan) -> list[tuple[PipelinePlan, StepPlan]]:
    return [(proved.pipeline, method.plan) for method in proved.pipeline.methods]


@pytest.mark.parametrize("name", PIPELINES)
def test_every_shipped_list_is_free_of_races_by_the_quadratic_check(
    name: str, proved: dict[str, ProvedPlan]
) -> None:
    for pipeline, step in steps(proved[name]):
        for captured in (False, True):
            program = lower(pipeline, step, captured=captured)
            assert not compare_all(program)


def test_orders_are_all_conflicting_pairs(proved: dict[str, ProvedPlan]) -> None:
    program = proved["dsa_tp"].programs[0]
    accesses = [
        (position, access)
        for position, launch in enumerate(program.launches)
        if not isinstance(launch.node, Reuse)
        for access in launch.node.accesses
    ]
    expected = sum(
        first.conflicts(second)
        for i, (here, first) in enumerate(accesses)
        for there, second in accesses[i + 1 :]
        if here != there
    )
    assert conflicts(program) == expected > 100


def races(pipeline: PipelinePlan, step: StepPlan) -> set[tuple[str, str, str]]:
    found = set()
    for captured in (False, True):
        program = lower(pipeline, step, captured=captured)
        for race in races_of(program):
            pair = (program.launches[site[0]].node.name for site in (race.first, race.second))
            found.add((*pair, race.buffer))
    return found


@pytest.mark.parametrize("name", ["dsa_tp", "dsa_dcp"])
def test_every_join_is_needed(name: str, proved: dict[str, ProvedPlan]) -> None:
    seen = 0
    for pipeline, step in steps(proved[name]):
        for item in step.items:
            if isinstance(item, Join):
                seen += 1
                items = tuple(other for other in step.items if other is not item)
                assert races(pipeline, replace(step, items=items))
    assert seen


LIBRARY = {"prims_ts", "trtllm_gen"}


@pytest.mark.parametrize("name", ["dsa_tp", "dsa_dcp"])
def test_an_early_reader_with_the_attribute_is_caught(
    name: str, proved: dict[str, ProvedPlan]
) -> None:
    """prims_ts and trtllm_gen: nobody holds, so they must be plain."""
    seen = set()
    for pipeline, step in steps(proved[name]):
        for launch in step.launches:
            early = {launch.contract.operand(name).kind for name in launch.contract.early_reads}
            if early - {Kind.STEP} and launch.contract.waits:
                seen.add(launch.op)
                pdl = replace(launch.pdl, attribute=True)
                found = races(pipeline, swapped(step, replace(launch, pdl=pdl)))
                assert any(second == launch.name for _, second, _ in found)
    assert seen == LIBRARY


@pytest.mark.parametrize("name", ["dsa_tp", "dsa_dcp"])
def test_an_early_read_of_what_a_kernel_writes_is_caught(
    name: str, proved: dict[str, ProvedPlan]
) -> None:
    """The top-k reads `lengths` ahead of its wait with the attribute; `scores` it must not."""
    seen = 0
    for pipeline, step in steps(proved[name]):
        for launch in step.launches:
            if launch.op in ("topk_select", "topk_local") and launch.pdl.attribute:
                assert "lengths" in launch.contract.early_reads
                bindings = tuple(
                    replace(b, phase=Phase.PROLOGUE) if b.operand == "scores" else b
                    for b in launch.bindings
                )
                found = races(pipeline, swapped(step, replace(launch, bindings=bindings)))
                assert any(second == launch.name for _, second, _ in found)
                seen += 1
    assert seen


def swapped(step: StepPlan, launch: Launch) -> StepPlan:
    items = tuple(
        launch if isinstance(item, Launch) and item.index == launch.index else item
        for item in step.items
    )
    return replace(step, items=items)


@pytest.mark.parametrize("name", ["dsa_tp", "dsa_dcp"])
def test_every_wait_of_an_overlapping_launch_is_needed(
    name: str, proved: dict[str, ProvedPlan]
) -> None:
    """A contract that promises a wait which the kernel does not make is a race."""
    for pipeline, step in steps(proved[name]):
        for launch in step.launches:
            if launch.pdl.attribute:
                silent = replace(launch, contract=replace(launch.contract, waits=False))
                assert races(pipeline, swapped(step, silent)), (step.mode, launch.name)


def without_attribute(program: Program) -> list[str]:
    return [
        launch.node.name
        for launch in program.launches
        if isinstance(launch, Node) and isinstance(launch.node, Kernel) and not launch.node.pdl
    ]


def test_what_runs_between_layers_is_part_of_the_program(proved: dict[str, ProvedPlan]) -> None:
    pipeline, step = steps(proved["dsa_tp"])[0]
    names = [launch.node.name for launch in lower(pipeline, step, captured=True).launches]
    assert names.count("between layers") == 6 and names.count("step inputs") == 2
    assert names[0] == "step inputs"


def test_a_silent_neighbour_under_dcp_is_refused_with_its_repair(tmp_path: Path) -> None:
    """The last op re-arms mailboxes; behind a silent kernel nothing covers that store."""
    edit = ("between_layers: waits", "between_layers: silent")
    found = findings_edited(tmp_path, "dsa_dcp", edit)
    assert {finding.code for finding in found} == {"KP301", "KP303"}
    assert all("`environment: {between_layers: waits}`" in finding.help for finding in found)
    messages = [finding.message for finding in found]
    assert "mode `fork`: `o_proj` writes `o_mail` before `o_reduce` has written it" in messages


def test_a_side_stream_that_reads_what_main_rewrites_is_a_race(tmp_path: Path) -> None:
    """Joined only at the end, mla_query still reads `projected` while the next layer starts."""
    early = "topk_select, join side, core, value, o_proj]\n      side: [mla_query]\n    wait:"
    found = findings_edited(tmp_path, "dsa_tp", (early, early.replace(", join side", "")))
    assert {finding.code for finding in found} == {"KP306"}
