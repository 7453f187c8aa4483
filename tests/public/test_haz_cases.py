"""Races and hangs that others have reported in public, and what keeps them out.

One test per case, named after it.  Where the mistake can be written down, as a program or as a
spec, the finding names its objects and the control is clean.  Where kpipe has no way to make it,
the test holds the property that excludes it.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layer_factory import LayerFactory
from layer_inputs import engine_inputs, with_empty_requests
from proof.proof_chains import MAIN, SIDE, event, on, pdl, plain, program, reads, writes
from spec_project import findings_edited, make_project, plan_edited, plan_of, render

from kpipe.codegen.ops.contract import Kind
from kpipe.codegen.plan.model import Join, Launch, PipelinePlan, StepPlan
from kpipe.codegen.plan.workspace import workspaces
from kpipe.codegen.proof.edges import edges
from kpipe.codegen.proof.lower import INPUTS, LAYERS, lower
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Program, Record, Segment, Wait
from kpipe.codegen.proof.races import check
from kpipe.codegen.proof.synthesis import races_of
from kpipe.codegen.proof.unroll import place, unroll
from kpipe.runtime.comm.virtual_ranks import VirtualRanks
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError, Step

FORK = event(0, MAIN, SIDE)
JOIN = event(1, SIDE, MAIN)
Named = tuple[str, str, str, str, str]  # first, second, buffer, kind, verdict


@pytest.fixture(scope="module")
def dcp(tmp_path_factory: pytest.TempPathFactory) -> PipelinePlan:
    return plan_of(make_project(tmp_path_factory.mktemp("dcp")), "dsa_dcp")


@pytest.fixture(scope="module")
def tp(tmp_path_factory: pytest.TempPathFactory) -> PipelinePlan:
    return plan_of(make_project(tmp_path_factory.mktemp("tp")), "dsa_tp")


def named(given: Program) -> set[Named]:
    """Races with the names of their launches."""
    node = [launch.node.name for launch in given.launches]
    return {
        (node[r.first[0]], node[r.second[0]], r.buffer, r.kind, r.assumption or r.verdict)
        for r in races_of(given)
    }


def both(*parts: tuple) -> set[Named]:
    """Races of actions that are the same eagerly and captured."""
    eager, captured = (named(program(*parts, captured=mode)) for mode in (False, True))
    assert eager == captured
    return eager


def races_of_step(pipeline: PipelinePlan, step: StepPlan) -> set[tuple[str, str, str]]:
    """Racy pairs of a plan and their memory, eagerly or captured."""
    found = set()
    for captured in (False, True):
        found |= {race[:3] for race in named(lower(pipeline, step, captured=captured))}
    return found


def swapped(step: StepPlan, launch: Launch) -> StepPlan:
    """The step with one launch replaced."""
    items = (
        launch if isinstance(item, Launch) and item.index == launch.index else item
        for item in step.items
    )
    return replace(step, items=tuple(items))


# -- programmatic launches ------------------------------------------------------------------------


def test_D01_early_read_ahead_of_the_wait() -> None:
    """The residual has a writer in flight, gamma has none: only the residual is reported."""
    embed = plain("emb", writes("residual"), "early")

    def norm(*early: str) -> tuple:
        accesses = reads(*early, early=True) + reads("residual", "gamma") + writes("out")
        return on(MAIN, embed, pdl("norm", accesses, waits=True))

    assert both(norm("residual")) == {("emb", "norm", "residual", "RAW", "racy")}
    assert both(norm("residual", "gamma")) == both(norm("residual"))
    assert both(norm()) == both(norm("gamma")) == set()
    launched_plain = plain("norm", reads("residual", "gamma", early=True))
    assert both(on(MAIN, embed, launched_plain)) == set()


def test_D01_a_core_that_reads_early_is_launched_plain(tp: PipelinePlan) -> None:
    """With the attribute forced on, the proof names the core, its operand and the writer."""
    seen = set()
    for method in tp.methods:
        for launch in method.plan.launches:
            early = {launch.contract.operand(name).kind for name in launch.contract.early_reads}
            if not early - {Kind.STEP} or not launch.contract.waits:
                continue
            assert launch.pdl.attribute_reason.startswith("plain: reads `")
            forced = replace(launch, pdl=replace(launch.pdl, attribute=True))
            found = races_of_step(tp, swapped(method.plan, forced))
            seen |= {race for race in found if race[1] == launch.name}
            assert races_of_step(tp, method.plan) == set()
    assert {("topk_select", "prims_ts", "selected"), ("topk_select", "trtllm_gen", "valid")} <= seen


def test_D02_attribute_without_a_wait() -> None:
    """The chain A, B, C: C waits for B only, and B is over without waiting for A."""
    first = plain("A", writes("x"), "early")
    last = pdl("C", reads("x", "y") + writes("z"), waits=True)
    middle = pdl("B", reads("w") + writes("y"), trigger="early")
    assert both(on(MAIN, first, middle, last)) == {("A", "C", "x", "RAW", "m1")}
    for repaired in (replace(middle, waits=True), replace(middle, pdl=False)):
        assert both(on(MAIN, first, repaired, last)) == set()


def test_D02_an_op_that_never_waits_gets_no_attribute(tp: PipelinePlan) -> None:
    launches = [launch for step in tp.plans for launch in step.launches]
    silent = {x.name: x.pdl for x in launches if not x.contract.waits}
    assert list(silent) == ["value_bmm"]
    assert not silent["value_bmm"].attribute
    assert silent["value_bmm"].attribute_reason == "plain: it never waits"
    assert any(x.pdl.attribute for x in launches if x.contract.waits)  # the control


def test_D05_a_poller_neither_overlaps_nor_releases(dcp: PipelinePlan, tmp_path: Path) -> None:
    """Behind a spin on a peer nothing starts early, unless the spec allows it in so many words."""
    polls = {"topk_merge", "query_wait", "dcp_value", "o_reduce"}

    def overlapped(plan: PipelinePlan) -> dict[str, set[bool]]:
        found: dict[str, set[bool]] = {}
        for launch in (launch for step in plan.plans for launch in step.launches):
            if launch.contract.source == "kpipe":
                flags = {launch.pdl.attribute, launch.pdl.release}
                found[launch.name] = found.get(launch.name, set()) | flags
        return found

    forbidden = overlapped(dcp)
    assert {name for name, flags in forbidden.items() if flags == {False}} == polls
    for step in dcp.plans:
        for launch in step.launches:
            if launch.name in polls:
                assert launch.pdl.attribute_reason.startswith("plain: polls `"), launch.name
                why = launch.pdl.release_reason
                assert why == "no release" or why.startswith("held: polls `"), launch.name
    old = "environment: {between_layers: waits}"
    allow = (old, "environment: {between_layers: waits, spin_overlap: allow}")
    allowed = overlapped(plan_edited(tmp_path, "dsa_dcp", allow))
    assert all(True in allowed[name] for name in polls)


# -- streams --------------------------------------------------------------------------------------


def test_D06_no_memory_changes_hands_through_an_allocator(dcp: PipelinePlan) -> None:
    """Every operand is declared memory that prepare() owns, and a step allocates none."""
    groups = (dcp.buffers, dcp.mailboxes, dcp.caches, dcp.weights, dcp.step)
    owned = {item.name for group in groups for item in group}
    owned |= {name for buffer in dcp.buffers for name, _, _ in buffer.columns}
    bindings = [b for step in dcp.plans for launch in step.launches for b in launch.bindings]
    assert bindings and {binding.target for binding in bindings} <= owned
    text = next(text for path, text in render(dcp).items() if path.endswith("layer.py"))
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    called = {ast.unparse(call) for call in calls}
    ops = {f"self.{launch.name}" for step in dcp.plans for launch in step.launches}
    streams = {"main.wait_stream", "side.wait_stream", "self.on"}
    assert called == ops | streams


def test_D09_an_unjoined_fork_is_refused(tmp_path: Path) -> None:
    """The second input of the case, as a spec: the finding names the mode and the stream."""
    old = "topk_select, join side, core, value, o_proj]\n      side: [mla_query]\n    wait:"
    (finding,) = findings_edited(tmp_path / "a", "dsa_tp", (old, old.replace("join side, ", "")))
    assert (finding.code, finding.message) == (
        "KP306",
        "mode `front` forks stream `side` and never joins it",
    )
    assert finding.help.startswith("write `join side` ahead of the first op that needs")
    assert findings_edited(tmp_path / "b", "dsa_tp") == ()


def test_D09_work_left_in_flight_between_two_graphs() -> None:
    """The first input: a join inside the second graph is too late, one in the break is not."""
    first = Segment(on(MAIN, plain("a")), True)
    last = on(MAIN, plain("b", reads("tab")))
    prefetch = on(SIDE, plain("prefetch", reads("host") + writes("tab")))
    loose = Program((first, Segment(prefetch), Segment(last, True)))
    expected = {("prefetch", "b", "tab", "RAW", "racy")}
    assert named(loose) == expected
    late = Program(
        (
            first,
            Segment((*prefetch, Record(SIDE, 7))),
            Segment((Wait(MAIN, 7), *last), True),
        )
    )
    assert named(late) == expected
    (unbound,) = edges(late).unbound  # and the wait makes an invalid capture
    assert (unbound.segment, unbound.event, unbound.captured) == (2, 7, True)
    joined = Program((first, Segment((*prefetch, *JOIN)), Segment(last, True)))
    assert named(joined) == set() and edges(joined).unbound == ()


def test_D11_counters_that_two_streams_count_in() -> None:
    def topk(name: str, count: str) -> tuple:
        return plain(name, reads(count) + writes(count))

    def beside(second: str) -> set[Named]:
        return both(FORK, on(SIDE, topk("topk_b", second)), on(MAIN, topk("topk_a", "cnt")))

    expected = {("topk_b", "topk_a", "cnt", kind, "racy") for kind in ("RAW", "WAR", "WAW")}
    assert beside("cnt") == expected
    assert beside("cnt_b") == set()
    joined = (FORK, on(SIDE, topk("topk_b", "cnt")), JOIN, on(MAIN, topk("topk_a", "cnt")))
    assert both(*joined) == set()
    # Under PDL, where the successor touches the words before its wait.
    first = plain("topk_a", reads("cnt") + writes("cnt"), "early")
    successor = pdl("topk_b", writes("cnt", early=True), waits=True)
    found = both(on(MAIN, first, successor))
    assert found == {("topk_a", "topk_b", "cnt", kind, "racy") for kind in ("WAR", "WAW")}
    assert both(on(MAIN, first, pdl("topk_b", writes("cnt"), waits=True))) == set()


def test_D11_workspaces_are_part_of_the_proof(tp: PipelinePlan) -> None:
    """Two launches of one op on two streams share its workspace: a race, across layers too."""
    method = next(m for m in tp.methods if any(x.name == "trtllm_gen" for x in m.plan.launches))
    core = next(launch for launch in method.plan.launches if launch.name == "trtllm_gen")
    assert races_of_step(tp, method.plan) == set()
    side = replace(
        core, index=len(method.plan.items), name="trtllm_gen_2", stream="side", bindings=()
    )
    position = next(i for i, item in enumerate(method.plan.items) if isinstance(item, Join))
    items = method.plan.items
    apart = replace(method.plan, items=(*items[: position + 1], side, *items[position + 1 :]))
    found = races_of_step(tp, apart)
    assert ("trtllm_gen_2", "trtllm_gen", "workspace trtllm_gen.counters") in found
    joined = replace(method.plan, items=(*items[:position], side, *items[position:]))
    assert races_of_step(tp, joined) == set()


def test_D12_zeroed_words_are_never_anybody_elses_scratch(
    tp: PipelinePlan, dcp: PipelinePlan
) -> None:
    """Workspaces have one owner, and the self-resetting part is a workspace of its own."""
    zeroed, dirty = set(), set()
    for plan in (tp, dcp):
        for step in plan.plans:
            owned = workspaces(plan, step)
            assert all(count == 1 for count in Counter((w.op, w.name) for w in owned).values())
            zeroed |= {(w.op, w.name) for w in owned if w.zero_once}
            dirty |= {(w.op, w.name) for w in owned if not w.zero_once}
            for launch in lower(plan, step, captured=False).launches:
                for access in launch.node.accesses:
                    if access.buffer.startswith("workspace "):
                        assert access.buffer.startswith(f"workspace {launch.node.name}.")
                    zero = access.buffer.removeprefix("workspace ") == "trtllm_gen.counters"
                    assert access.zero == zero
    assert zeroed == {("trtllm_gen", "counters")} and ("trtllm_gen", "workspace") in dirty
    assert not zeroed & dirty


# -- steps and replays ----------------------------------------------------------------------------


def addresses(layer: Layer) -> dict[str, int]:
    """Where everything lies that a captured graph would have baked in."""
    found = {name: tensor.data_ptr() for name, tensor in layer.buffers.items()}
    return found | {name: getattr(layer, name).data.data_ptr() for name in layer.MEMORY.caches}


def test_D08_scratch_is_sized_for_the_largest_declared_step(layers: LayerFactory) -> None:
    """Small step, largest step, small step: same addresses, same bits; beyond that a refusal."""
    layer_class = layers.tp(4)
    small, large = (70, 1, 64, 5), (33,) * layer_class.ROWS_CAP
    ready = engine_inputs(layer_class, small)
    layer = ready.prepared(layer_class)
    before = addresses(layer)
    layer.run(ready.step)
    expected = ready.step.out.clone()
    for name, spec in layer_class.MEMORY.buffers.items():
        assert layer.buffers[name].shape[spec.rows_axis] == layer_class.ROWS_CAP, name
    layer.run(with_empty_requests(ready.step, len(large) - len(small)))
    again = engine_inputs(layer_class, small)
    layer.run(again.step)
    assert again.step.out.equal(expected)
    with pytest.raises(LayerError) as raised:
        layer.run(with_empty_requests(ready.step, len(large)))
    cap = layer_class.ROWS_CAP
    assert str(raised.value) == (f"tp_4: {cap + len(small)} rows; declared for q 1 are 1 to {cap}")
    assert addresses(layer) == before


TWELVE = [((70, 1, 64, 5), (5, 64, 70, 1)), ((16, 0, 3, 33), (2, 17, 0, 128))] * 3


def test_D14_twelve_steps_with_other_inputs_on_the_same_mailboxes(layers: LayerFactory) -> None:
    """Words of an earlier step never count as arrived: data is its own flag, and is re-armed.

    Ranks with as many keys, with fewer, and with none for a row: all steps as in a group of its
    own that has never run.
    """
    layer_class = layers.dcp(2)
    lengths = [one for pair in TWELVE for one in pair]
    assert len(lengths) == 12

    def steps(comm) -> list[torch.Tensor]:  # noqa: ANN001
        return [step_of_rank(one, comm) for one in lengths]

    def step_of_rank(one: tuple[int, ...], comm) -> torch.Tensor:  # noqa: ANN001
        ready = engine_inputs(layer_class, one, rank=comm.rank)
        ready.prepared(layer_class, comm=comm).run(ready.step)  # mailboxes belong to the group
        return ready.step.out.clone()

    together = VirtualRanks(2).run(steps)
    for number, one in enumerate(lengths):
        alone = VirtualRanks(2).run(lambda comm, one=one: step_of_rank(one, comm))
        for rank, out in enumerate(alone):
            assert together[rank][number].equal(out), (number, rank)
    assert not together[0][0].equal(together[0][1])  # the inputs did change


def test_D14_a_mailbox_that_nobody_re_arms_is_refused(tmp_path: Path) -> None:
    edit = ("rearmed_by: dcp_value}\n  o_mail", "rearmed_by: o_reduce}\n  o_mail")
    found = findings_edited(tmp_path / "a", "dsa_dcp", edit)
    assert {finding.code for finding in found} == {"KP704"}
    assert all(
        "mailbox `lse_mail` is re-armed by `dcp_value`, the spec" in f.message for f in found
    )
    assert findings_edited(tmp_path / "b", "dsa_dcp") == ()


def test_D15_parity_follows_from_the_layer_and_from_nothing_that_counts(
    dcp: PipelinePlan, layers: LayerFactory
) -> None:
    """A layer has the same slot in every step, so a replay writes what the capture recorded."""
    step = next(m.plan for m in dcp.methods if any(x.name == "o_proj" for x in m.plan.launches))
    for captured in (False, True):
        given = lower(dcp, step, captured=captured)
        used = [
            next(a.buffer for a in launch.node.accesses if a.buffer.startswith("o_mail@"))
            for launch in given.launches
            if launch.node.name == "o_proj"
        ]
        assert used == [f"o_mail@{layer % 2}" for layer in range(LAYERS)] * 2
        # The last layer of a step and the first of the next share a slot; re-arming is ordered.
        assert used[LAYERS - 1] == used[LAYERS] and named(given) == set()

    layer_class = layers.dcp(2)

    def body(comm) -> list[dict[str, int]]:  # noqa: ANN001
        ready = engine_inputs(layer_class, (5, 3), rank=comm.rank)
        layer = ready.prepared(layer_class, comm=comm, layer=2**31 + 1)
        slots = []
        for _ in range(3):
            layer.run(ready.step)
            views = layer.views(2)
            slots.append({name: getattr(views, name).parity for name in layer.MEMORY.mailboxes})
        return slots

    for slots in VirtualRanks(2).run(body):
        assert slots[0] == slots[1] == slots[2]
        assert set(slots[0].values()) == {1}  # 2**31 + 1 is odd; no counter, so no overflow


def test_D16_the_next_step_overwrites_what_this_one_still_reads() -> None:
    """One step alone is clean.  The finding names both iterations."""
    step = (
        *on(SIDE, plain("sched", writes("slot_map"))),
        *event(0, SIDE, MAIN),
        *on(MAIN, plain("fwd", reads("slot_map"))),
    )
    assert named(unroll(step, {}, copies=1)) == set()
    (race,) = check(unroll(step, {}, copies=2))
    assert [place(site[0], 2) for site in (race.first, race.second)] == [(0, 1), (1, 0)]
    assert named(unroll(step, {}, copies=2)) == {("fwd", "sched", "slot_map", "WAR", "racy")}
    assert named(unroll((*event(1, MAIN, SIDE), *step), {}, copies=2)) == set()
    bound = (Wait(SIDE, 1), Record(MAIN, 1), *step)  # at most one step ahead
    assert named(unroll(bound, {"slot_map": 2})) == set()
    assert named(unroll(bound, {"slot_map": 1})) != set()


def test_D16_a_side_copy_against_the_next_layer() -> None:
    def layer(number: int, *behind: tuple) -> tuple:
        topk = plain(f"topk_{number}", writes("tk"))
        save = plain(f"save_{number}", reads("tk") + writes(f"hist_{number}"))
        attend = plain(f"attn_{number}", reads("tk"))
        return (*on(MAIN, topk), *FORK, *on(SIDE, save), *on(MAIN, attend), *sum(behind, ()))

    assert both(layer(0)) == set()
    assert both(layer(0), layer(1)) == {("save_0", "topk_1", "tk", "WAR", "racy")}
    assert both(layer(0, JOIN), layer(1, JOIN)) == set()


def test_D16_a_join_taken_out_of_a_plan_races_with_the_next_layer(tp: PipelinePlan) -> None:
    step = next(m.plan for m in tp.methods if m.plan.mode == "fork")
    loose = replace(step, items=tuple(i for i in step.items if not isinstance(i, Join)))
    assert ("mla_query", "packed_gemm", "projected") in races_of_step(tp, loose)
    assert races_of_step(tp, step) == set()


def with_values_of(step: Step, other: Step) -> None:
    """Put another step's values into the tensors of this one, as ahead of a replay."""
    for name in ("hidden", *INPUTS):
        getattr(step, name).copy_(getattr(other, name))


def test_D17_lengths_and_slots_are_read_in_every_step(layers: LayerFactory) -> None:
    """Warm-up values do not stick: new values in the same memory, result as from a new layer."""
    layer_class = layers.tp(4)
    warm, then = (256, 257, 300), (257, 256, 300)  # as many blocks, and others
    first, second = engine_inputs(layer_class, warm), engine_inputs(layer_class, then)
    layer = first.prepared(layer_class)
    method = layer.run(first.step)
    stale = first.step.out.clone()
    with_values_of(first.step, second.step)
    for name in layer_class.MEMORY.caches:
        getattr(first.caches, name).copy_(getattr(second.caches, name))
    assert layer.run(first.step) == method  # chosen by rows, never by lengths
    second.prepared(layer_class).run(second.step)
    assert first.step.out.equal(second.step.out)
    assert not first.step.out.equal(stale)


def test_D17_step_inputs_are_handed_over_in_every_step(tp: PipelinePlan) -> None:
    """They are written outside the graph ahead of each launch of it, and their readers wait."""
    given = lower(tp, tp.methods[0].plan, captured=True)
    order = Order(given)
    engine = [i for i, launch in enumerate(given.launches) if launch.node.name == "step inputs"]
    written = {access.buffer for access in given.launches[engine[0]].node.accesses}
    assert len(engine) == 2 and {"lengths", "slots"} <= written == set(INPUTS)
    readers = 0
    for position, launch in enumerate(given.launches):
        for access in launch.node.accesses:
            if access.buffer in written and not access.write:
                readers += 1
                handed = max(i for i in engine if i < position)
                assert order.ordered((handed, "E"), (position, "S"))
    assert readers
