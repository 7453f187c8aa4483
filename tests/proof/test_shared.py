"""Buffers of scope model and device: pipelines whose layers alternate."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from spec_project import edit, make_project, plan_of

from kpipe.codegen.plan.methods import name_methods
from kpipe.codegen.plan.model import Join, PipelinePlan, StepPlan
from kpipe.codegen.proof import shared
from kpipe.codegen.proof.lower import STEPS, lower, lower_together
from kpipe.codegen.proof.program import Program, Record
from kpipe.codegen.proof.races import compare_all
from kpipe.codegen.proof.shared import prove_together, shared_buffers
from kpipe.codegen.proof.synthesis import races_of

Q_C = "  q_c:      {shape: [rows, q_lora], dtype: bf16}"
PROJECTED = "    shape: [rows, pitch]\n    dtype: bf16\n"
GATED = "  gated:    {shape: [rows, heads * v_dim], dtype: bf16}"


def scoped(line: str, scope: str) -> str:
    if line == PROJECTED:
        return f"{PROJECTED}    scope: {scope}\n"
    return line.replace("bf16}", f"bf16, scope: {scope}}}")


class Pair:
    """Copies of dsa_tp in one project, with some of their buffers shared."""

    def __init__(self, root: Path) -> None:
        self.root = make_project(root)
        self.text = (root / "pipelines" / "dsa_tp.yaml").read_text()

    def plan(self, name: str, *edits: tuple[str, str]) -> PipelinePlan:
        path = self.root / "pipelines" / f"{name}.yaml"
        path.write_text(self.text.replace("name: dsa_tp", f"name: {name}"))
        for old, new in edits:
            edit(self.root, path.name, old, new)
        return plan_of(self.root, name)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def both(pair: Pair) -> tuple[PipelinePlan, PipelinePlan]:
    """Two pipelines that share the row of projections."""
    share = (PROJECTED, scoped(PROJECTED, "model"))
    return pair.plan("one", share), pair.plan("two", share)


def buffers_of(program: Program) -> set[str]:
    return {access.buffer for launch in program.launches for access in launch.node.accesses}


def without_joins(plan: PipelinePlan) -> PipelinePlan:
    plans = tuple(
        replace(step, items=tuple(i for i in step.items if not isinstance(i, Join)))
        for step in plan.plans
    )
    return replace(plan, plans=plans, methods=name_methods(plans))


# -- which memory is one ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "names"),
    [
        ("layer", {"q_c of layer 0", "q_c of layer 1", "q_c of layer 2"}),
        ("kind", {"q_c"}),
        ("model", {"q_c"}),
        ("device", {"q_c"}),
    ],
)
def test_scope_decides_what_layers_of_one_pipeline_share(
    scope: str, names: set[str], pair: Pair
) -> None:
    plan = pair.plan("scoped", (Q_C, scoped(Q_C, scope)))
    step = next(m.plan for m in plan.methods if m.plan.mode == "fork")
    found = buffers_of(lower(plan, step, captured=False))
    assert {name for name in found if name.split()[0].partition("@")[0] == "q_c"} == names


@pytest.mark.parametrize(
    ("scope", "shared", "names"),
    [
        (
            "layer",
            False,
            {"q_c of layer 0@one", "q_c of layer 1@one", "q_c of layer 0@two"},
        ),
        ("kind", False, {"q_c@one", "q_c@two"}),
        ("model", True, {"q_c"}),
        ("device", True, {"q_c"}),
    ],
)
def test_scope_decides_what_pipelines_share(
    scope: str, shared: bool, names: set[str], pair: Pair
) -> None:
    one, two = (pair.plan(name, (Q_C, scoped(Q_C, scope))) for name in ("one", "two"))
    assert shared_buffers(one, two) == (("q_c",) if shared else ())
    assert one.shares_memory == shared
    steps = [next(m.plan for m in plan.methods if m.plan.mode == "fork") for plan in (one, two)]
    layers = [(one, steps[0]), (two, steps[1]), (one, steps[0])]
    found = buffers_of(lower_together(layers, captured=False, own_streams=False))
    assert {name for name in found if name.split()[0].partition("@")[0] == "q_c"} == names
    # Mailboxes, caches and workspaces are never shared; step tensors are the engine's for both.
    assert {"latent_kv of layer 1@one", "latent_kv of layer 0@two", "slots"} <= found


def test_model_is_the_geometry_and_device_is_everything(pair: Pair) -> None:
    for scope, expected in (("model", ()), ("device", ("q_c",))):
        one, two = (pair.plan(name, (Q_C, scoped(Q_C, scope))) for name in ("one", "two"))
        assert shared_buffers(one, replace(two, geometry="another")) == expected


# -- alternation ----------------------------------------------------------------------------------


def test_layers_alternate_and_streams_are_shared_by_name(
    both: tuple[PipelinePlan, PipelinePlan],
) -> None:
    one, two = both
    steps = [next(m.plan for m in plan.methods if m.plan.mode == "fork") for plan in both]
    layers = [(one, steps[0]), (two, steps[1]), (one, steps[0])]
    for own, streams in ((False, {0, 1}), (True, {0, 1, 2})):
        program = lower_together(layers, captured=True, own_streams=own)
        assert {launch.stream for launch in program.launches} == streams
        owners = [n.node.name.partition(".")[0] for n in program.launches if "." in n.node.name]
        size = len(steps[0].launches)
        assert owners == (["one"] * size + ["two"] * size + ["one"] * size) * STEPS
        assert [segment.captured for segment in program.segments] == [False, True] * STEPS
        events = [a for s in program.segments for a in s.actions if isinstance(a, Record)]
        assert len(events) == 2 * 3 * STEPS  # a fork and a join of each layer


def test_two_that_share_are_proved(both: tuple[PipelinePlan, PipelinePlan]) -> None:
    together = prove_together(both)
    assert together.found == ()
    assert together.notes[both[0].path] == (
        "shared with other pipelines: `projected` (scope model); proved in turn with two; no "
        "pipeline outside this run was looked at",
    )
    expected = {
        (first.identity, second.identity)
        for first, second in product(both[0].plans, both[1].plans)
        if (first.arch, first.q, first.rows) == (second.arch, second.q, second.rows)
    }
    assert together.combinations == len(expected) > 3


def test_rows_are_padded_by_each_pipeline_for_itself(pair: Pair) -> None:
    """A step of 9 rows runs as 16 here and as 12 there: a pair of lists that no size shares."""
    share = (PROJECTED, scoped(PROJECTED, "model"))
    rows = ('"1-8, 16, 32, 64"', '"1-8, 12, 32, 64"')
    one, two = pair.plan("one", share), pair.plan("two", share, rows)
    met = {
        (first.identity, second.identity)
        for n in range(1, 65)
        for arch in one.targets
        for q in (1, 4)
        if (first := padded(one, arch, q, n)) and (second := padded(two, arch, q, n))
    }
    assert prove_together((one, two)).combinations == len(met)


def padded(plan: PipelinePlan, arch: str, q: int, rows: int) -> StepPlan | None:
    steps = [s for s in plan.plans if (s.arch, s.q) == (arch, q) and s.rows >= rows]
    return min(steps, key=lambda step: step.rows, default=None)


def test_a_join_that_one_of_them_lacks_races_with_the_other(
    both: tuple[PipelinePlan, PipelinePlan],
) -> None:
    one, two = without_joins(both[0]), both[1]
    found = prove_together((one, two)).found
    message = (
        "modes `front` of `one` and `front` of `two`, layers in turn: `two.packed_gemm` rewrites "
        "`projected` before `one.mla_query` has read it"
    )
    (finding,) = [d for d in found if d.message == message]
    assert finding.code == "KP302"
    assert finding.span is not None and finding.span.path == two.path
    assert [(what, place.path) for what, place in finding.related] == [("first access", one.path)]
    assert finding.help == (
        "join the stream of `one.mla_query` into main within its layer, or give `projected` the "
        "scope `kind`, which nobody else shares"
    )
    assert all("rewrites" not in line for line in finding.story) and finding.story
    # The same lists on memory of their own: what remains is each pipeline's own affair.
    step = next(m.plan for m in one.methods if m.plan.mode == "fork")
    other = next(m.plan for m in two.methods if m.plan.mode == "fork")
    apart = [replace(p, buffers=tuple(replace(b, scope="kind") for b in p.buffers)) for p in both]
    layers = [(apart[0], step), (apart[1], other), (apart[0], step)]
    program = lower_together(layers, captured=False, own_streams=False)
    owners = {
        tuple(program.launches[site[0]].node.name.partition(".")[0] for site in (r.first, r.second))
        for r in races_of(program)
        if r.buffer != "slots"
    }
    assert ("one", "two") not in owners and ("two", "one") not in owners


def test_each_alternation_is_free_of_races_by_the_quadratic_check(
    both: tuple[PipelinePlan, PipelinePlan],
) -> None:
    step = [next(m.plan for m in plan.methods if m.plan.mode == "fork") for plan in both]
    for captured, own in product((False, True), repeat=2):
        layers = [(both[0], step[0]), (both[1], step[1]), (both[0], step[0])]
        assert not compare_all(lower_together(layers, captured=captured, own_streams=own))


def test_three_that_share_are_proved_in_both_orders(
    both: tuple[PipelinePlan, PipelinePlan], pair: Pair
) -> None:
    three = pair.plan("three", (PROJECTED, scoped(PROJECTED, "model")))
    two = prove_together(both).combinations
    assert prove_together((*both, three)).combinations == 4 * two  # three pairs and one triple
    alone = pair.plan("alone")
    together = prove_together((*both, alone))
    assert together.combinations == two and together.notes[alone.path] == ()


# -- declarations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        (
            "[rows, q_lora], dtype: bf16, scope: model",
            "[rows, 1536], dtype: bf16, scope: model",
            "",
        ),
        (
            "dtype: bf16, scope: model",
            "dtype: bf16, init: zeros, scope: model",
            "init is empty, here zeros",
        ),
        ("scope: model", "scope: device", "scope is model, here device"),
    ],
)
def test_declarations_of_one_buffer_agree(old: str, new: str, differs: str, pair: Pair) -> None:
    share = (Q_C, scoped(Q_C, "model"))
    one, two = pair.plan("one", share), pair.plan("two", share, (old, new))
    found = prove_together((one, two)).found
    if not differs:  # the same numbers, spelled differently
        assert found == ()
        return
    (finding,) = found
    assert (finding.code, finding.message, finding.help) == (
        "KP202",
        f"buffer `q_c` is shared with `one`, whose {differs}",
        "declare it alike in both, or give it the scope `kind`, which nobody else shares",
    )
    assert finding.span is not None and finding.span.path == two.path
    assert [(what, place.path) for what, place in finding.related] == [
        ("other declaration", one.path)
    ]


def test_a_buffer_is_as_long_as_the_largest_step(pair: Pair) -> None:
    share = (Q_C, scoped(Q_C, "model"))
    one, two = pair.plan("one", share), pair.plan("two", share)
    (finding,) = prove_together((one, replace(two, rows=((1, (1, 2, 32)),)))).found
    assert finding.message == (
        "buffer `q_c` is shared with `one`, whose shape is [64, 1536], here [32, 1536]"
    )


def test_launch_lists_that_do_not_touch_what_is_shared_are_left_out(pair: Pair) -> None:
    share = (Q_C, scoped(Q_C, "model"))
    one, two = pair.plan("one", share), pair.plan("two", share)
    touch = {
        method.plan.identity
        for method in one.methods
        if any(b.target == "q_c" for launch in method.plan.launches for b in launch.bindings)
    }
    assert len(touch) < len(one.methods)
    assert prove_together((one, two)).combinations == len(touch)


def test_columns_of_one_buffer_agree(pair: Pair) -> None:
    share = (PROJECTED, scoped(PROJECTED, "device"))
    swap = ("wk: index_dim, wv: index_heads", "wv: index_heads, wk: index_dim")
    (finding,) = prove_together((pair.plan("one", share), pair.plan("two", share, swap))).found
    assert finding.message.startswith(
        "buffer `projected` is shared with `one`, whose list of columns is [q_a 0+1536, "
    )


def test_neighbours_are_declared_alike(pair: Pair) -> None:
    share = (GATED, scoped(GATED, "model"))
    full = ("between_layers: waits", "between_layers: full")
    one, two = pair.plan("one", share), pair.plan("two", share, full)
    (finding,) = prove_together((one, two)).found
    assert (finding.code, finding.message) == (
        "KP607",
        "`two` shares `gated` with `one` and assumes other neighbours: between_layers is full, "
        "there waits",
    )
    assert finding.help == (
        "what runs between their layers is one thing: declare the weaker word in both (silent, "
        "then waits, then full)"
    )
    assert finding.span is not None and finding.span.path == two.path


def test_every_alternation_is_looked_at(
    both: tuple[PipelinePlan, PipelinePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both orders, eager and captured, streams by name and streams of each pipeline's own."""
    seen = set()

    def spied(layers, *, captured, own_streams):  # noqa: ANN001, ANN202
        names = "".join(plan.name[0] for plan, _ in layers)
        forks = any(len(step.streams) > 1 for _, step in layers)
        seen.add((names, captured, own_streams, forks))
        return lower_together(layers, captured=captured, own_streams=own_streams)

    monkeypatch.setattr(shared, "lower_together", spied)
    prove_together(both)
    assert seen == {
        (names, captured, own, forks)
        for names, captured, own, forks in product(("oto", "tot"), *[(False, True)] * 3)
        if forks or not own
    }


def test_a_pair_of_launch_lists_costs_little(both: tuple[PipelinePlan, PipelinePlan]) -> None:
    started = time.process_time()
    count = prove_together(both).combinations
    assert time.process_time() - started < 0.5 * count  # 0.1 s is meant; the machine is shared
