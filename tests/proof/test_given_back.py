"""Memory that the host gives back: against the explorer, and in the programs of a plan."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from explorer import machine
from explorer.enqueue import is_valid
from explorer.generator import MODES
from explorer.generator import random_program as generated
from proof.proof_chains import random_program
from spec_project import make_project, plan_of

from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.ops.contract import Kind
from kpipe.codegen.plan.methods import name_methods
from kpipe.codegen.plan.model import Join, Launch, PipelinePlan, StepPlan
from kpipe.codegen.proof.edges import edges
from kpipe.codegen.proof.lower import LAYERS, RELEASE, STEPS, lower
from kpipe.codegen.proof.program import Access, Copy, Program, Reuse, Segment
from kpipe.codegen.proof.program import Launch as Node
from kpipe.codegen.proof.prove import prove
from kpipe.codegen.proof.races import compare_all, racy_pairs
from kpipe.codegen.proof.synthesis import races_of

FREED = (Access("x", write=True),)


def followed_by(program: Program, stream: int, node: Copy) -> Program:
    """The program with one more node at its end."""
    *ahead, last = program.segments
    return Program((*ahead, replace(last, actions=(*last.actions, Node(stream, node)))))


def test_a_block_given_back_races_like_a_plain_write_in_its_place() -> None:
    """The explorer runs a real copy there; nothing comes behind it, so that is all it can do."""
    rng = random.Random(20)
    racy = {mode: 0 for mode in MODES}
    for number in range(900):
        mode = MODES[number % 3]
        program = generated(rng, mode, most=4)
        stream, last = rng.choice((0, 0, 1, 2)), len(program.launches)
        copied = followed_by(program, stream, Copy("copy", FREED))
        if not is_valid(copied):
            continue
        ours = racy_pairs(followed_by(program, stream, Reuse("reuse", FREED)))
        theirs = {pair for pair in machine.racy_pairs(copied) if pair[2] == last}
        assert {pair for pair in ours if pair[2] == last} == theirs
        racy[mode] += bool(theirs)
    assert min(racy.values()) > 3, racy


def test_nothing_is_ordered_by_a_block_given_back() -> None:
    """What the host issues behind it keeps every race, and gains none in another allocation."""
    rng = random.Random(21)
    gained = 0
    for _ in range(400):
        program = random_program(rng, rng.randint(2, 6))
        cut = rng.randrange(len(program.segments))
        segments = list(program.segments)
        actions = list(segments[cut].actions)
        place = rng.randrange(len(actions) + 1)
        actions.insert(place, Node(rng.randrange(3), Reuse("reuse", FREED)))
        segments[cut] = replace(segments[cut], actions=tuple(actions))
        given = Program(tuple(segments))
        position = next(i for i, n in enumerate(given.launches) if isinstance(n.node, Reuse))
        found = racy_pairs(given)
        assert found == compare_all(given)
        kept = set()
        for first, a, second, b in found:
            if position in (first, second):
                # Behind the release only nodes of a graph are meant, which keep the address.
                assert second == position or edges(given).in_graph[second]
                gained += 1
                continue
            kept.add((first - (first > position), a, second - (second > position), b))
        assert kept == racy_pairs(program)
    assert gained > 50


def test_a_graph_keeps_the_address_and_an_eager_launch_does_not() -> None:
    use = Node(0, Copy("use", FREED))
    release = Segment((Node(0, Reuse("reuse", FREED)),))
    graph, eager = Segment((use,), captured=True), Segment((use,))
    assert racy_pairs(Program((graph, release, graph))) == {(1, 0, 2, 0)}
    assert racy_pairs(Program((graph, release, eager))) == set()
    assert racy_pairs(Program((eager, release, graph))) == set()  # captured anew, elsewhere
    within = Segment((use, Node(0, Reuse("reuse", FREED))), captured=True)
    assert racy_pairs(Program((within, within))) == set()  # the graph's own pool


# -- in the programs of a plan --------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> PipelinePlan:
    return plan_of(make_project(tmp_path_factory.mktemp("tp")), "dsa_tp")


def step_tensors(step: StepPlan) -> set[str]:
    return {b.target for launch in step.launches for b in launch.bindings if b.kind is Kind.STEP}


def test_every_layer_gives_its_step_tensors_back(plan: PipelinePlan) -> None:
    for method in plan.methods:
        program = lower(plan, method.plan, captured=False, released=True)
        given = [launch.node for launch in program.launches if isinstance(launch.node, Reuse)]
        assert len(given) == LAYERS * STEPS and {node.name for node in given} == {RELEASE}
        for node in given:
            assert {access.buffer for access in node.accesses} == step_tensors(method.plan)
        assert races_of(program) == ()
        assert not any(
            isinstance(launch.node, Reuse)
            for launch in lower(plan, method.plan, captured=True).launches
        )


def loose(step: StepPlan) -> StepPlan:
    """The step without its joins."""
    return replace(step, items=tuple(i for i in step.items if not isinstance(i, Join)))


def test_a_side_stream_that_main_does_not_wait_for_is_named(plan: PipelinePlan) -> None:
    step = next(m.plan for m in plan.methods if m.plan.mode == "fork")
    (side,) = [launch for launch in step.launches if launch.stream == "side"]
    reads = {b.target for b in side.bindings if b.kind is Kind.STEP}
    assert reads == {"slots"}
    plans = (loose(step),)
    with pytest.raises(SpecError) as raised:
        prove(replace(plan, plans=plans, methods=name_methods(plans)))
    (finding,) = [d for d in raised.value.diagnostics if d.code == "KP602"]
    assert finding.message == (
        "mode `fork`: the engine may hand out `slots` again before `mla_query` has read it: main "
        "does not wait for stream `side`"
    )
    assert finding.help == "join stream `side` into main before the layer ends"
    assert finding.span == side.span
    assert any("writes `slots`" in line for line in finding.story)


def test_two_launches_of_one_op_share_its_workspace(plan: PipelinePlan, tmp_path: Path) -> None:
    """D11 as a finding: what a plan with a second launch on the side stream is told."""
    method = next(m for m in plan.methods if any(x.name == "trtllm_gen" for x in m.plan.launches))
    core = next(launch for launch in method.plan.launches if launch.name == "trtllm_gen")
    twin = replace(core, index=99, name="trtllm_gen_2", stream="side", bindings=())
    items = method.plan.items
    position = next(i for i, item in enumerate(items) if isinstance(item, Join))
    apart = replace(method.plan, items=(*items[: position + 1], twin, *items[position + 1 :]))
    plans = (apart,)
    with pytest.raises(SpecError) as raised:
        prove(replace(plan, plans=plans, methods=name_methods(plans)))
    told = {d.message for d in raised.value.diagnostics if d.code == "KP603"}
    mode = method.plan.mode
    assert (
        f"mode `{mode}`: `trtllm_gen_2` and `trtllm_gen` use the workspace `trtllm_gen.counters` "
        "at once"
    ) in told
    (help,) = {
        d.help
        for d in raised.value.diagnostics
        if d.code == "KP603" and d.message.startswith(f"mode `{mode}`: `trtllm_gen_2` and")
    }
    assert help == (
        "put both on one stream, or join the stream of `trtllm_gen_2` ahead of `trtllm_gen`: an "
        "op has one workspace for all its launches"
    )


def test_launches_are_named(plan: PipelinePlan) -> None:
    """The names that the findings use are those of the launches."""
    step = plan.methods[0].plan
    names = {n.node.name for n in lower(plan, step, captured=False).launches}
    assert {item.name for item in step.items if isinstance(item, Launch)} <= names
