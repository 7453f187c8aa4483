"""Properties of every plan of every shipped pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from spec_project import PIPELINES, SHIPPED, make_project, plan_of

from kpipe.codegen.ops.contract import Kind
from kpipe.codegen.plan import build
from kpipe.codegen.plan.api import plan_pipeline
from kpipe.codegen.plan.flags import active
from kpipe.codegen.plan.model import Fork, Join, PipelinePlan

ROWS = {1: (*range(1, 9), 16, 32, 64), 4: (4, 8, 16, 32, 64)}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PipelinePlan]:
    root = make_project(tmp_path_factory.mktemp("project"))
    return {name: plan_of(root, name) for name in PIPELINES}


@pytest.mark.parametrize("name", PIPELINES)
def test_every_declared_step_has_one_plan(name: str, plans: dict[str, PipelinePlan]) -> None:
    wanted = [(a, q, r) for a in ("sm_90a", "sm_100a") for q in ROWS for r in ROWS[q]]
    assert [(s.arch, s.q, s.rows) for s in plans[name].plans] == wanted
    assert plans[name].rows_cap == 64


@pytest.mark.parametrize("name", PIPELINES)
def test_every_launch_has_exactly_its_operands_bound(
    name: str, plans: dict[str, PipelinePlan]
) -> None:
    plan = plans[name]
    memory = {
        *(b.name for b in plan.buffers),
        *(c for b in plan.buffers for c, _, _ in b.columns),
        *(m.name for m in plan.mailboxes),
    }
    known = {
        Kind.BUFFER: memory,
        Kind.CACHE: {c.name for c in plan.caches},
        Kind.WEIGHT: {t.name for t in plan.weights},
        Kind.STEP: {t.name for t in plan.step},
    }
    for step in plan.plans:
        for launch in step.launches:
            flags = dict(launch.flags)
            wanted = [o.name for o in launch.contract.operands if active(o, flags)]
            assert [b.operand for b in launch.bindings] == wanted
            assert set(flags) == {f.name for f in launch.contract.flags}
            for binding in launch.bindings:
                assert binding.target in known[binding.kind]


@pytest.mark.parametrize("name", PIPELINES)
def test_launches_are_numbered_in_host_order(name: str, plans: dict[str, PipelinePlan]) -> None:
    for step in plans[name].plans:
        assert [launch.index for launch in step.launches] == list(range(len(step.launches)))
        assert step.launches[0].op == "packed_gemm"
        assert step.launches[-1].op == ("o_proj" if name.startswith("dsa_tp") else "o_reduce")


@pytest.mark.parametrize("name", PIPELINES)
def test_every_fork_is_joined_behind_it(name: str, plans: dict[str, PipelinePlan]) -> None:
    for step in plans[name].plans:
        forks = [(i, item) for i, item in enumerate(step.items) if isinstance(item, Fork)]
        joins = {item.stream: i for i, item in enumerate(step.items) if isinstance(item, Join)}
        assert all(joins[fork.stream] > i for i, fork in forks)
        assert len(forks) == len(joins) == (1 if step.mode.startswith(("fork", "front")) else 0)


@pytest.mark.parametrize("name", PIPELINES)
def test_every_step_belongs_to_one_method(name: str, plans: dict[str, PipelinePlan]) -> None:
    plan = plans[name]
    owned = [(a, q, r) for m in plan.methods for a, q, rows in m.uses for r in rows]
    assert sorted(owned) == sorted((s.arch, s.q, s.rows) for s in plan.plans)
    names = [method.name for method in plan.methods]
    assert len(set(names)) == len(names)
    assert len({method.plan.identity for method in plan.methods}) == len(names)


@pytest.mark.parametrize("name", PIPELINES)
def test_planning_is_deterministic(
    name: str, plans: dict[str, PipelinePlan], tmp_path: Path
) -> None:
    """Equal plans from another folder, but for the places in the files."""
    again = plan_of(make_project(tmp_path), name)
    first = plans[name]
    assert again.dims == first.dims
    assert again.ops == first.ops
    assert (again.buffers, again.mailboxes) == (first.buffers, first.mailboxes)
    assert [m.name for m in again.methods] == [m.name for m in first.methods]
    assert [s.identity for s in again.plans] == [s.identity for s in first.plans]


def test_bytes_of_the_packed_row_and_of_a_mailbox(plans: dict[str, PipelinePlan]) -> None:
    """64 rows of 3808 BF16; two parities of 64 rows of 96 heads of 576 bytes."""
    projected = next(b for b in plans["dsa_tp"].buffers if b.name == "projected")
    assert projected.bytes == 64 * 3808 * 2
    q_mail = next(m for m in plans["dsa_dcp"].mailboxes if m.name == "q_mail")
    assert q_mail.bytes == 2 * 64 * 96 * 576
    assert (q_mail.source_axis, q_mail.source_stride) == (1, 12)


def test_ops_of_unselected_modes_are_part_of_the_plan(plans: dict[str, PipelinePlan]) -> None:
    """So that an edit of the table never adds a kernel."""
    launched = {x.op for step in plans["dsa_dcp"].plans for x in step.launches}
    assert {op.name for op in plans["dsa_dcp"].ops} == launched | {"index_front"}


def test_a_proved_plan_says_so(plans: dict[str, PipelinePlan]) -> None:
    assert {plan.status for plan in plans.values()} == {"proved"}


def test_a_mode_named_like_a_launch_list_of_another_gets_its_own_method(tmp_path: Path) -> None:
    """`wait` has a list that is called after its ops; a mode of that name is numbered."""
    root = make_project(tmp_path)
    path = root / "pipelines" / "dsa_dcp.yaml"
    name = "wait_index_front_sparse_decode"
    text = path.read_text()
    serial = next(line for line in text.split("\n") if line.startswith("      main:"))
    text = text.replace("  fallback:", f"    {name}:\n{serial}\n  fallback:", 1)
    path.write_text(text.replace('"5-64": fork}', f'"5-8": {name}, "9-64": fork}}', 1))
    names = [method.name for method in plan_of(root, "dsa_dcp").methods]
    assert len(set(names)) == len(names)
    assert {f"_{name}", f"_{name}_2"} <= set(names)


def test_every_op_of_the_sharded_layer_has_its_kernel(tmp_path: Path) -> None:
    plan = plan_of(make_project(tmp_path), "dsa_dcp")
    assert plan.missing_kernels == ()
    assert {op.kernel for op in plan.ops if op.source == "kpipe"} >= {
        "mla_query",
        "query_wait",
        "topk_local",
        "topk_merge",
        "dcp_value",
        "o_proj",
        "o_reduce",
    }


@pytest.mark.parametrize("name", ["dsa_tp", "dsa_dcp", "dsa_dcp_modes"])
def test_steps_that_share_a_check_are_planned_as_if_each_had_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(SHIPPED / f"{name}.yaml")
    shared = plan_pipeline(path)
    kept = build.plan_step
    monkeypatch.setattr(build, "plan_step", lambda *given: kept(*given[:7]))
    alone = plan_pipeline(path)
    assert shared == alone
    tiles = {(p.arch, p.mode, tuple(one.tactic for one in p.launches)) for p in alone.plans}
    assert len(tiles) > len({(p.arch, p.mode) for p in alone.plans})


@pytest.mark.parametrize("scope", ["layer", "kind", "model", "device"])
def test_memory_is_shared_by_scope(scope: str, plans: dict[str, PipelinePlan]) -> None:
    plan = plans["dsa_tp"]
    first = replace(plan.buffers[0], scope=scope)
    assert not plan.shares_memory
    changed = replace(plan, buffers=(first, *plan.buffers[1:]))
    assert changed.shares_memory == (scope in ("model", "device"))
