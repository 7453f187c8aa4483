"""Public cases of overlap that concern more than one access: roles, proxies, order of issue.

D01 (its sentence on kernels with roles), D04 and D07.  One test per input and control.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner
from proof.proof_chains import MAIN, SIDE, event, on, pdl, plain, program, reads, writes
from spec_project import make_project, plan_edited, plan_of, render

from kpipe.codegen.cli import main
from kpipe.codegen.ops.contract import Role, early_roles
from kpipe.codegen.plan.model import PipelinePlan
from kpipe.codegen.proof.lanes import replay_streams
from kpipe.codegen.proof.program import Access, Action, Kernel
from kpipe.codegen.proof.races import check
from kpipe.codegen.proof.synthesis import races_of

Named = tuple[str, str, str, str]  # first, second, buffer, kind


def both(*nodes: Kernel) -> set[Named]:
    """Races of kernels in a row on one stream, the same eagerly and captured."""
    found = []
    for captured in (False, True):
        given = program(on(MAIN, *nodes), captured=captured)
        name = [launch.node.name for launch in given.launches]
        races = races_of(given)
        found.append({(name[r.first[0]], name[r.second[0]], r.buffer, r.kind) for r in races})
    assert found[0] == found[1]
    return found[0]


# -- D01 ------------------------------------------------------------------------------------------


def backward(*roles: Role) -> Kernel:
    """A kernel of warp roles, each reading what it names and the epilogue writing dq."""
    early = early_roles(roles)
    accesses = tuple(
        Access(buffer, buffer == "dq", role.name in early)
        for role in roles
        for buffer in role.operands
    )
    return pdl("bwd", accesses, waits=any(role.waits for role in roles))


def test_D01_every_role_that_reads_needs_a_wait() -> None:
    """The load warp reads LSE and row sums of the kernel before it; the others wait."""
    before = plain("pre", writes("lse", "rowsum"), "early")
    load = Role("load", False, ("lse", "rowsum", "weights"))
    mma = Role("mma", True, ("q", "dq"))
    found = both(before, backward(load, mma))
    assert found == {("pre", "bwd", buffer, "RAW") for buffer in ("lse", "rowsum")}
    assert both(before, backward(replace(load, waits=True), mma)) == set()
    assert both(before, backward(replace(load, after="mma"), mma)) == set()
    assert both(before, backward(replace(load, operands=("weights",)), mma)) == set()
    assert both(before, replace(backward(load, mma), pdl=False)) == set()


def test_D01_a_wait_in_one_role_covers_the_kernels_behind() -> None:
    """What comes behind a kernel in which some role waits is behind its predecessor."""
    first = plain("A", writes("x"), "early")
    middle = backward(Role("load", False, ("weights",)), Role("mma", True, ("dq",)))
    last = pdl("C", reads("x"), waits=True)
    assert both(first, middle, last) == set()
    assert both(first, backward(Role("load", False, ("weights", "dq"))), last) == {
        ("A", "C", "x", "RAW")
    }


# -- D04 ------------------------------------------------------------------------------------------


def quant(trigger: str = "early", fence: bool = False) -> Kernel:
    return plain("quant", tuple(replace(x, fenced=fence) for x in writes("xq")), trigger)


def gemm(path: str = "async", launched: bool = True) -> Kernel:
    return Kernel("gemm", (Access("xq", False, path=path),), pdl=launched, waits=True)


def test_D04_stores_that_tma_does_not_see() -> None:
    """The read is ordered behind the write by a proper wait, and refused all the same."""
    assert check(program(on(MAIN, quant(), gemm()))) == ()
    assert both(quant(), gemm()) == {("quant", "gemm", "xq", "PROXY")}


def test_D04_controls() -> None:
    assert both(quant(fence=True), gemm()) == set()
    assert both(quant(), gemm(path="generic")) == set()
    assert both(quant(trigger="never"), gemm()) == set()
    assert both(quant(), gemm(launched=False)) == set()


def test_D04_a_trigger_behind_the_wait_of_the_writer_is_early_for_its_own_stores() -> None:
    """What counts is what the writer itself stores: its trigger may stand ahead of that."""
    before = plain("before", trigger="early")
    writer = pdl("quant", writes("xq"), waits=True, trigger="after_wait")
    assert both(before, writer, gemm()) == {("quant", "gemm", "xq", "PROXY")}
    assert both(before, replace(writer, trigger="never"), gemm()) == set()


# -- D07 ------------------------------------------------------------------------------------------

COUNT = 61


def captured(*order: str) -> tuple[Action, ...]:
    """61 layers of the case: fork, a main kernel M and a side kernel S in this order, join."""
    node = {"M": on(MAIN, plain("M")), "S": on(SIDE, plain("S"))}
    middle = tuple(action for letter in order for action in node[letter])
    return (*event(0, MAIN, SIDE), *middle, *event(1, SIDE, MAIN)) * COUNT


def test_D07_a_side_kernel_recorded_first_costs_a_stream_per_layer() -> None:
    assert replay_streams(captured("S", "M")) >= COUNT
    assert replay_streams(captured("M", "S")) == 2
    assert replay_streams(on(MAIN, plain("M"), plain("M")) * COUNT) == 1


FORK = "    fork:\n      main: [packed_gemm, fork side, "
BAD = (f"{FORK}query_norm", f"{FORK}issue side, query_norm")


def test_D07_the_lint_counts_layers_and_streams(tmp_path: Path) -> None:
    """A warning: printed and counted, and neither check nor generate fails for it."""
    make_project(tmp_path, [("dsa_tp.yaml", *BAD)])
    spec = str(tmp_path / "pipelines" / "dsa_tp.yaml")
    checked = CliRunner().invoke(main, ["check", spec])
    assert checked.exit_code == 0
    assert "warning[KP501]: mode `fork` issues stream `side` ahead" in checked.output
    assert "61 layers would use 62 streams, not 2" in checked.output
    assert "1 pipeline checked, 1 warning in" in checked.output
    out = str(tmp_path / "out")
    generated = CliRunner().invoke(main, ["generate", spec, "--out", out])
    assert generated.exit_code == 0 and "warning[KP501]" in generated.output
    assert (tmp_path / "out" / "dsa_tp" / "layer.py").exists()


def test_D07_no_lint_in_the_order_that_kpipe_chooses(tmp_path: Path) -> None:
    make_project(tmp_path)
    for name in ("dsa_tp", "dsa_dcp"):
        checked = CliRunner().invoke(main, ["check", str(tmp_path / "pipelines" / f"{name}.yaml")])
        assert checked.exit_code == 0 and "KP501" not in checked.output


def layer_of(plan: PipelinePlan) -> str:
    """The text of the generated layer.py."""
    return next(text for path, text in render(plan).items() if path.endswith("layer.py"))


def calls(text: str, method: str) -> list[str]:
    """The calls of one generated method, in the order of the file."""
    body = next(
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == method
    )
    found = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
    return [ast.unparse(c.func) for c in sorted(found, key=lambda c: (c.lineno, c.col_offset))]


def test_D07_the_generated_order_is_main_first(tmp_path: Path) -> None:
    text = next(
        t for p, t in render(plan_of(make_project(tmp_path))).items() if p[-8:] == "layer.py"
    )
    listed = calls(text, "_front")
    fork, side, join = (
        listed.index(x) for x in ("side.wait_stream", "self.on", "main.wait_stream")
    )
    assert listed[fork - 1] == "self.packed_gemm"  # where the fork stands has not moved
    assert listed[fork + 1 : side] == ["self.index_front", "self.index_scores", "self.topk_select"]
    assert listed[side : join + 1] == ["self.on", "self.mla_query", "main.wait_stream"]


def test_D07_the_spec_may_ask_for_the_other_order(tmp_path: Path) -> None:
    plan = plan_edited(tmp_path, "dsa_tp", BAD)
    listed = calls(layer_of(plan), "_fork_sparse_decode")
    assert listed[:4] == ["self.packed_gemm", "side.wait_stream", "self.on", "self.mla_query"]
