"""`kpipe why`: every answer is what the order itself says, for every pair of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from spec_project import make_project, plan_of

from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.plan.model import Join, Launch, PipelinePlan, StepPlan
from kpipe.codegen.proof.lower import lower
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.why import check_op, why


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> PipelinePlan:
    return plan_of(make_project(tmp_path_factory.mktemp("project")), "dsa_tp")


def step_of(pipeline: PipelinePlan, mode: str) -> StepPlan:
    return next(m.plan for m in pipeline.methods if m.plan.mode == mode)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("mode", ["fork", "late_front"])
def test_every_pair_of_a_step(pipeline: PipelinePlan, mode: str, captured: bool) -> None:
    step = step_of(pipeline, mode)
    order = Order(lower(pipeline, step, captured=captured))
    names = [launch.name for launch in step.launches]
    layer = [i for i, x in enumerate(order.launches) if x.node.name == names[0]][1]
    following = [i for i, x in enumerate(order.launches) if x.node.name == names[0]][2]
    verdicts = set()
    for i, first in enumerate(names):
        for j, second in enumerate(names):
            answer = why(pipeline, step, first, second, captured=captured)
            assert answer is not None
            assert answer.next_layer == (j <= i)
            there = (following if j <= i else layer) + j
            assert answer.ordered == order.ordered((layer + i, "E"), (there, "W"))
            assert answer.ordered == (not answer.missing)
            assert answer.ordered or not answer.shared  # the step is proved
            if answer.ordered:
                end = "wait" if answer.chain[-1].instant.startswith("wait") else "start"
                assert answer.from_wait == (end == "wait")
                assert answer.chain[-1].instant.split()[2] == second
            assert not any("#" in link.reason + link.instant for link in answer.chain)
            verdicts.add((answer.ordered, answer.next_layer))
    assert (True, False) in verdicts and (True, True) in verdicts
    assert ((False, False) in verdicts) == (mode == "fork")


def test_what_a_join_and_a_parity_say(pipeline: PipelinePlan) -> None:
    step = step_of(pipeline, "fork")
    eager = why(pipeline, step, "mla_query", "core", captured=False)
    assert eager is not None and eager.second == "sparse_decode"  # the slot's op
    assert [link.rule for link in eager.chain] == ["join"]
    assert eager.shared == ("latent_kv", "query")
    beside = why(pipeline, step, "query_norm", "mla_query", captured=False)
    assert beside is not None and beside.missing == (
        "the completion of query_norm is not ordered before the wait of mla_query",
        "nothing orders query_norm before it",
    )


def test_ops_that_are_not_there(pipeline: PipelinePlan) -> None:
    step = step_of(pipeline, "fork")
    assert why(pipeline, step, "mla_query", "index_front", captured=False) is None
    check_op([step], "core")
    with pytest.raises(SpecError) as raised:
        check_op([step], "mla_querry")
    (finding,) = raised.value.diagnostics
    assert (finding.code, finding.help) == ("KP808", "did you mean `mla_query`?")
    assert finding.message == "no selected step launches `mla_querry`"
    assert finding.allowed == tuple(launch.name for launch in step.launches)


def test_a_spec_without_an_order_can_be_asked(tmp_path: Path) -> None:
    """A refused spec still has a plan; the chain that is missing is the one that is needed."""
    plan = plan_of(make_project(tmp_path), "dsa_tp")
    step = step_of(plan, "fork")
    loose = replace(step, items=tuple(item for item in step.items if not isinstance(item, Join)))
    answer = why(plan, loose, "mla_query", "packed_gemm", captured=False)
    assert answer is not None and not answer.ordered
    assert answer.next_layer and "projected" in answer.shared


def test_an_order_that_rests_on_an_unfenced_trigger_says_so(pipeline: PipelinePlan) -> None:
    """What never waits is behind the wait of its predecessor in time only."""
    step = step_of(pipeline, "fork_split")

    def launched(attribute: bool) -> StepPlan:
        items = tuple(
            replace(
                item,
                contract=replace(item.contract, waits=False),
                pdl=replace(item.pdl, attribute=attribute),
            )
            if isinstance(item, Launch) and item.name == "mla_value"
            else item
            for item in step.items
        )
        return replace(step, items=items)

    for captured in (False, True):
        answer = why(pipeline, launched(True), "topk_select", "mla_value", captured=captured)
        assert answer is not None and answer.ordered and answer.in_time
        assert "release" in [link.rule for link in answer.chain]
        plain = why(pipeline, launched(False), "topk_select", "mla_value", captured=captured)
        assert plain is not None and plain.ordered and not plain.in_time
