"""What TMA reads: the rule against the explorer, and what the synthesis makes of it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from explorer.generator import MODES, random_program, with_paths
from explorer.machine import crossing_pairs as explored_pairs
from spec_project import render
from type_edits import by_tma, plan_with

from kpipe.codegen.ops import contract as words
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.plan.model import Launch, PipelinePlan, StepPlan
from kpipe.codegen.proof.prove import _findings, prove
from kpipe.codegen.proof.proxies import crossing_pairs, proxy_races
from kpipe.codegen.proof.races import racy_pairs
from kpipe.codegen.proof.synthesis import Synthesis, races_of, synthesise


@pytest.mark.parametrize("mode", MODES)
def test_the_rule_is_what_the_explorer_sees(mode: str) -> None:
    """Exactly the pairs of which some execution has the reader resident beside the writer."""
    rng = random.Random(20261129)
    crossing = ordered = fenced = 0
    for _ in range(2000):
        program = with_paths(random_program(rng, mode, most=5), rng)
        expected = explored_pairs(program)
        assert crossing_pairs(program) == expected
        found = {(*race.first, *race.second) for race in proxy_races(program)}
        assert found == expected - racy_pairs(program)
        crossing += len(expected)
        ordered += len(found)
        fenced += any(access.fenced for x in program.launches for access in x.node.accesses)
    assert crossing > 150 and ordered > 20 and fenced > 100


def test_two_blocks_change_nothing() -> None:
    rng = random.Random(7)
    for _ in range(40):
        program = with_paths(random_program(rng, "mixed", most=3), rng)
        assert crossing_pairs(program) == explored_pairs(program, ctas=2)


def launches(plan: PipelinePlan, name: str) -> list[Launch]:
    return [x for method in plan.methods for x in method.plan.launches if x.name == name]


def test_the_writer_holds_its_release(tmp_path: Path) -> None:
    plan = prove(plan_with(tmp_path, "dsa_tp", by_tma("index_gemm", "q_c"))).pipeline
    norms = launches(plan, "query_norm")
    behind = [m for m in plan.methods if any(x.name == "index_gemm" for x in m.plan.launches)]
    assert len(norms) == len(behind) > 2
    why = "held: index_gemm reads `q_c` by TMA, behind no proxy fence"
    assert {(x.pdl.release, x.pdl.release_reason) for x in norms} == {(False, why)}
    assert all(x.pdl.attribute for x in launches(plan, "index_gemm"))
    text = next(text for path, text in render(plan).items() if path.endswith("layer.py"))
    assert text.count(f"release=False)  # dsa_tp.yaml:60 {why}") + text.count(why) >= len(norms)


@pytest.mark.parametrize("repair", ["fence", "loads"])
def test_a_fence_or_plain_loads_keep_the_release(repair: str, tmp_path: Path) -> None:
    """Plain loads are the shipped form; the core, whose release is held for nobody, the control."""
    tma = by_tma("index_gemm", "q_c")
    held = prove(plan_with(tmp_path / "a", "dsa_tp", tma)).pipeline
    assert not any(x.pdl.release for x in launches(held, "query_norm"))
    assert all(x.pdl.release for x in launches(held, "topk_select"))
    if repair == "fence":
        contracts = {**tma, "query_norm": replace(CONTRACTS["query_norm"], proxy_fence=("q_c",))}
    else:
        contracts = {}
    plan = prove(plan_with(tmp_path / "b", "dsa_tp", contracts)).pipeline
    assert all(x.pdl.release for x in launches(plan, "query_norm"))


@pytest.mark.parametrize(
    ("op", "operand", "writer"),
    [("packed_gemm", "hidden", "between layers"), ("mla_gate", "values", "value_bmm")],
)
def test_where_nothing_can_be_held_the_reader_is_plain(
    op: str, operand: str, writer: str, tmp_path: Path
) -> None:
    """What runs between layers and what a library does is not ours to hold."""
    plan = prove(plan_with(tmp_path, "dsa_tp", by_tma(op, operand))).pipeline
    readers = launches(plan, op)
    why = f"plain: reads `{operand}` by TMA, {writer} stores it behind no proxy fence"
    assert readers and all(not x.pdl.attribute for x in readers)
    if op == "packed_gemm":
        assert {x.pdl.attribute_reason for x in readers} == {why}
    for method in plan.methods:
        assert synthesise(plan, method.plan).races == ()


def forced(step: StepPlan, name: str, **pdl: bool) -> StepPlan:
    items = tuple(
        replace(i, pdl=replace(i.pdl, **pdl)) if isinstance(i, Launch) and i.name == name else i
        for i in step.items
    )
    return replace(step, items=items)


def test_the_finding_names_both_paths_and_places(tmp_path: Path) -> None:
    from kpipe.codegen.proof.lower import lower
    from kpipe.codegen.proof.tables import table_for

    plan = prove(plan_with(tmp_path, "dsa_tp", by_tma("index_gemm", "q_c"))).pipeline
    step = next(m.plan for m in plan.methods if m.plan.mode == "fork")
    assert all(races_of(lower(plan, step, captured=c)) == () for c in (False, True))
    loose = forced(step, "query_norm", release=True)
    programs = tuple(lower(plan, loose, captured=captured) for captured in (False, True))
    races = tuple((program, race) for program in programs for race in races_of(program))
    assert {race.kind for _, race in races} == {"PROXY"}
    table = table_for(plan.path, plan.targets).table
    (finding,) = _findings(Synthesis(loose, programs, races), table)
    assert (finding.code, finding.severity) == ("KP307", "error")
    assert finding.message == (
        "mode `fork`: `index_gemm` reads `q_c` by TMA (async proxy), `query_norm` writes it by "
        "plain stores (generic proxy) and lets it start before the last store"
    )
    assert finding.help == (
        "fence between the proxies in front of the trigger of `query_norm` and say so in its "
        "contract (`proxy_fence`), or hold its release: `pdl: {query_norm: hold}`"
    )
    spans = {x.name: x.span for x in step.launches}
    assert finding.span == spans["index_gemm"]
    assert finding.related == (("writer", spans["query_norm"]),)


def test_only_the_stores_that_are_fenced_keep_the_release(tmp_path: Path) -> None:
    """Of index_front the keys are fenced; whoever read its query by TMA would hold it."""
    kept = prove(plan_with(tmp_path / "a", "dsa_tp", {})).pipeline
    assert all(x.pdl.release for x in launches(kept, "index_front"))
    assert all(x.pdl.release for x in launches(kept, "dsa_index"))
    by = by_tma("index_scores", "index_q8")
    held = prove(plan_with(tmp_path / "b", "dsa_tp", by)).pipeline
    why = "held: index_scores reads `index_q8` by TMA, behind no proxy fence"
    assert {x.pdl.release_reason for x in launches(held, "index_front")} == {why}
    unfenced = {"dsa_index": replace(CONTRACTS["dsa_index"], proxy_fence=())}
    held = prove(plan_with(tmp_path / "c", "dsa_tp", unfenced)).pipeline
    assert not any(x.pdl.release for x in launches(held, "dsa_index"))
    assert all(x.pdl.release for x in launches(held, "index_front"))


def test_a_fence_names_what_the_op_stores() -> None:
    with pytest.raises(ValueError, match="^index_front: fences stores of wk, which it does not"):
        replace(CONTRACTS["index_front"], proxy_fence=("wk",))


def test_what_reads_by_tma() -> None:
    """Our kernels that copy in bulk; of the libraries' cores nothing is known (docs/proof.md)."""
    paths = {(c.name, o.name, o.path) for c in CONTRACTS.values() for o in c.operands}
    assert {(op, operand) for op, operand, path in paths if path is words.Path.ASYNC} == {
        ("index_scores", "index_kv"),
        ("sparse_decode", "latent_kv"),
    }
    fences = {(c.name, name) for c in CONTRACTS.values() for name in c.proxy_fence}
    assert fences == {
        ("index_front", "index_kv"),
        ("dsa_index", "index_kv"),
        ("mla_query", "latent_kv"),
        ("mla_query_split", "latent_kv"),
    }
