"""Edits of dsa_dcp.yaml that break it: refused with a repair that `--fix` applies, and then clean.

What turned out to be safe is here too, with the reason, so that nobody takes it for an oversight.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from spec_project import edit, make_project, plan_of, source_of

from kpipe.codegen.cli import main
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.plan import resolve
from kpipe.codegen.plan.api import plan_pipeline
from kpipe.codegen.proof.mailbox.protocol import Act, protocol_of
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.prove import prove

DCP = "dsa_dcp.yaml"
SPEC = f"pipelines/{DCP}"
TEXT = source_of(DCP).read_text()


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KPIPE_CACHE_DIR", str(tmp_path / "cache"))
    return make_project(tmp_path)


def check(*options: str) -> Result:
    return CliRunner().invoke(main, ["check", SPEC, *options])


def refused(codes: set[str]) -> list[dict]:
    """The findings of the spec, of exactly these rules."""
    result = check("--format", "json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)["findings"]
    assert {finding["code"] for finding in found} == codes
    return found


def fixed() -> str:
    """The text of the spec after `--fix`, which left nothing to find."""
    result = check("--fix")
    assert result.exit_code == 0, result.output
    return Path(SPEC).read_text()


@pytest.mark.parametrize("mode", ["fork", "front"])
def test_a_join_that_is_dropped(mode: str, project: Path) -> None:
    head, found, tail = TEXT.partition(f"    {mode}:\n")
    assert found and ", join side" in tail
    Path(SPEC).write_text(head + found + tail.replace(", join side", "", 1))
    (finding,) = refused({"KP306"})
    assert finding["repairs"][0]["text"] == "write `join side` ahead of `core`"
    assert fixed().split() == TEXT.split()


SELECT_AND_CORE = {
    "fork": ("topk_local, topk_merge, join side,\n             core, dcp_value,",
             "topk_local, core, join side,\n             topk_merge, dcp_value,"),
    "wait": ("topk_merge, query_wait, core,", "core, query_wait, topk_merge,"),
    "wait, next to each other": ("topk_merge, query_wait, core,", "query_wait, core, topk_merge,"),
}  # fmt: skip


@pytest.mark.parametrize("where", SELECT_AND_CORE)
def test_select_and_core_that_are_swapped(where: str, project: Path) -> None:
    old, new = SELECT_AND_CORE[where]
    edit(project, DCP, old, new)
    found = refused({"KP201", "KP701"} if where == "wait" else {"KP201"})
    # In the first of "wait" query_wait stands between them, and the words of the query have come
    # long before those of the candidates: to wait for them first is predicted to cost less.
    first = "move `core` behind `topk_merge`" if where == "wait" else "swap `core` and `topk_merge`"
    assert {finding["repairs"][0]["text"] for finding in found} == {first}
    costs = [[repair["cost_us"] for repair in finding["repairs"]] for finding in found]
    assert all(cost[0] == 0 for cost in costs)
    text = fixed()
    assert check().exit_code == 0
    assert text == TEXT or where != "fork"
    assert text.count("#") == TEXT.count("#")  # comments stay


def test_a_fork_ahead_of_the_projection(project: Path) -> None:
    old = "main: [packed_gemm, fork side, query_norm"
    edit(project, DCP, old, "main: [fork side, packed_gemm, query_norm")
    found = refused({"KP201"})
    texts = {finding["repairs"][0]["text"] for finding in found}
    assert texts == {"fork `side` behind `packed_gemm`"}
    assert fixed() == TEXT


def test_a_query_wait_that_no_mode_has(project: Path) -> None:
    text = TEXT.replace("[mla_query, query_wait]", "[mla_query]")
    Path(SPEC).write_text(text.replace("topk_merge, query_wait, core", "topk_merge, core"))
    (finding,) = refused({"KP109"})
    assert finding["help"] == "take `query_wait` out of its stage"
    assert "query:      {ops: [query_norm, mla_query]}" in fixed()


@pytest.mark.parametrize("mode", ["fork", "wait"])
def test_a_query_wait_that_one_mode_lacks_moves_its_poll(mode: str, project: Path) -> None:
    """Not refused: a flag follows from the mode, so `mla_query` polls where nobody else does."""
    drop_query_wait(mode)
    for step in plan_of(project, "dsa_dcp").plans:
        query = next(launch for launch in step.launches if launch.op == "mla_query")
        waits = any(launch.op == "query_wait" for launch in step.launches)
        assert dict(query.flags)["polls"] is not waits
        assert waits is (step.mode != mode)


@pytest.mark.parametrize("mode", ["fork", "wait"])
def test_a_query_wait_without_which_nobody_polls(
    mode: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = CONTRACTS["mla_query"]
    flags = tuple(flag for flag in query.flags if flag.name != "polls")
    mute = {**CONTRACTS, "mla_query": replace(query, flags=flags)}
    monkeypatch.setattr(resolve, "CONTRACTS", mute)
    serial = TEXT[TEXT.index("    serial:") : TEXT.index("    fork:\n")]
    Path(SPEC).write_text(TEXT.replace(serial, ""))  # it needs the flag
    drop_query_wait(mode)
    found = refused({"KP701"})
    for finding in found:
        assert "reads mailbox `q_mail` and nothing ahead of it waits" in finding["message"]
        assert finding["repairs"][0]["text"] == "add `query_wait` ahead of `core`"
    fixed()


def drop_query_wait(mode: str) -> None:
    head, found, tail = Path(SPEC).read_text().partition(f"    {mode}:\n")
    assert found
    Path(SPEC).write_text(head + found + tail.replace(", query_wait", "", 1))


def test_one_parity_is_safe_because_every_layer_ends_with_an_exchange(project: Path) -> None:
    """Not refused, and rightly so.  A copy may be published into again once its re-arm has landed.

    The re-arm is a plain store, over only when its launch is.  The exploration has that: nothing of
    an op stands behind its re-arm, so it lands at any time up to the end of the launch.  It also
    takes later launches of the rank to start behind that end, which is checked here on the
    schedule.  What a peer learns from such a launch it therefore learns behind the re-arm.
    """
    Path(SPEC).write_text(TEXT.replace("parities: 2", "parities: 1"))
    assert check().exit_code == 0
    plan = plan_of(project, "dsa_dcp")
    for method in plan.methods:
        for op in protocol_of(method.plan, plan).ops:
            rearms = {i for i, use in enumerate(op.uses) if use.act is Act.REARM}
            assert not any(rearms & set(use.after) for use in op.uses)


@pytest.mark.parametrize("parities", [1, 2])
def test_launches_of_a_rank_publish_behind_the_end_of_every_rearm_ahead(
    parities: int, project: Path
) -> None:
    """What the exploration takes for granted, on the GPU's instants: E of the launch that re-arms
    is ahead of the earliest moment at which a later launch publishes anything."""
    Path(SPEC).write_text(TEXT.replace("parities: 2", f"parities: {parities}"))
    proved = prove(plan_pipeline(SPEC))
    boxes = {mailbox.name for mailbox in proved.pipeline.mailboxes}
    publish, rearm = set(), set()
    for launch in (launch for m in proved.pipeline.methods for launch in m.plan.launches):
        own = [binding.access for binding in launch.bindings if binding.target in boxes]
        publish |= {launch.name} if any(access.publishes for access in own) else set()
        rearm |= {launch.name} if any(access.rearms for access in own) else set()
    assert publish >= {"mla_query", "topk_local", "dcp_value", "o_proj"}
    assert rearm == {"topk_merge", "dcp_value", "o_reduce"}
    assert proved.programs
    for program in proved.programs:
        order = Order(program)
        names = [launch.node.name for launch in program.launches]
        for later in (p for p, name in enumerate(names) if name in publish):
            for earlier in (p for p, name in enumerate(names[:later]) if name in rearm):
                if not order.ordered((earlier, "S"), (later, "S")):
                    continue  # side by side: the exploration takes the two in either order
                assert order.ordered((earlier, "E"), (later, "W")), (names[earlier], names[later])


def test_one_parity_is_refused_where_no_exchange_ends_the_layer(project: Path) -> None:
    kept, skipped = [], False
    for line in TEXT.replace("parities: 2", "parities: 1").splitlines():
        skipped = line.startswith("  o_proj:") or (skipped and line.startswith("    "))
        if not skipped and not line.startswith(("  o_mail:", "  o_gather:")):
            kept.append(line.replace(", o_proj, o_reduce]", "]"))
    Path(SPEC).write_text("\n".join(kept) + "\n")
    for finding in refused({"KP702"}):
        assert "`q_mail` of layer 1 into rank 1 over the word of layer 0" in finding["message"]
        assert finding["repairs"][0]["text"] == "raise `parities` of `q_mail` to 3"
    assert fixed().count("parities: 1") == 3
