"""Memory that must be zero, against a simulation of its bytes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from spec_project import make_project, plan_of

from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.ops.contract import Scratch
from kpipe.codegen.plan.methods import name_methods
from kpipe.codegen.plan.model import Launch as Planned
from kpipe.codegen.proof.memory_rules import dirty_findings
from kpipe.codegen.proof.program import (
    Access,
    Box,
    Copy,
    Kernel,
    Launch,
    Program,
    Record,
    Segment,
    Wait,
)
from kpipe.codegen.proof.prove import prove
from kpipe.codegen.proof.zeros import dirty

SIZE = 6


def span(rng: random.Random) -> Box:
    begin = rng.randrange(SIZE)
    return rng.choice(((), ((begin, rng.randint(begin + 1, SIZE)),)))


def covered(box: Box) -> range:
    return range(*box[0]) if box else range(SIZE + 1)  # no box reaches the last byte


def in_a_row(rng: random.Random, clears: int) -> list[Kernel | Copy]:
    """Plain kernels of one stream: dirty writers, counters and memsets."""
    nodes: list[Kernel | Copy] = []
    for number in range(rng.randint(2, 6)):
        kind = rng.choice(("dirty", "counts", "clear" if clears else "dirty"))
        clears -= kind == "clear"
        access = Access("ws", True, box=span(rng), zero=kind != "dirty")
        nodes.append((Copy if kind == "clear" else Kernel)(f"k{number}", (access,)))
    return nodes


def simulated(nodes: list[Kernel | Copy]) -> set[tuple[int, int]]:
    """Pairs of a dirty writer and a counter that finds a byte of it."""
    left: list[set[int]] = [set() for _ in range(SIZE + 1)]  # writers whose bytes are there
    found = set()
    for number, node in enumerate(nodes):
        (access,) = node.accesses
        for byte in covered(access.box):
            if isinstance(node, Copy):
                left[byte] = set()
            elif access.zero:
                found |= {(writer, number) for writer in left[byte]}
            else:
                left[byte].add(number)
    return found


def check(nodes: list[Kernel | Copy]) -> set[tuple[int, int]]:
    program = Program((Segment(tuple(Launch(0, node) for node in nodes)),))
    return {(pair.first[0], pair.second[0]) for pair in dirty(program)}


def test_in_a_row_with_one_memset_it_is_exactly_what_the_bytes_say() -> None:
    rng = random.Random(5)
    seen = 0
    for _ in range(3000):
        nodes = in_a_row(rng, clears=1)
        assert check(nodes) == simulated(nodes)
        seen += bool(simulated(nodes))
    assert seen > 500


def test_with_several_memsets_nothing_dirty_is_missed() -> None:
    """Two memsets that clear a half each are not put together; what is refused may be clean."""
    rng = random.Random(6)
    more = 0
    for _ in range(3000):
        nodes = in_a_row(rng, clears=4)
        assert check(nodes) >= simulated(nodes)
        more += check(nodes) != simulated(nodes)
    assert 0 < more < 300


def test_a_memset_without_order_clears_nothing() -> None:
    write, zero = Access("ws", True), Access("ws", True, zero=True)
    p, clear, d = Kernel("p", (write,)), Copy("clear", (zero,)), Kernel("d", (zero,))
    fork = (Record(0, 0), Wait(1, 0))
    join = (Record(1, 1), Wait(0, 1))

    def pairs(*actions: object) -> int:
        return len(dirty(Program((Segment(tuple(actions)),))))  # type: ignore[arg-type]

    ahead, behind = (Launch(0, p), *fork, Launch(1, clear)), (Launch(0, d),)
    assert pairs(*ahead, *behind) == 1  # the counter may run before the memset
    assert pairs(*ahead, *join, *behind) == 0
    assert pairs(*fork, Launch(0, p), Launch(1, clear), *join, *behind) == 1


def test_an_op_of_the_plan_that_dirties_its_counters(tmp_path: Path) -> None:
    """D12: one workspace that a contract declares zeroed and the launch ahead of it uses too."""
    plan = plan_of(make_project(tmp_path), "dsa_tp")
    method = next(m for m in plan.methods if any(x.name == "trtllm_gen" for x in m.plan.launches))
    core = next(launch for launch in method.plan.launches if launch.name == "trtllm_gen")
    assert any(scratch.zero_once for scratch in core.contract.scratch)
    careless = replace(core.contract, scratch=(Scratch("counters", "4096"),))
    first = replace(core, index=99, name="prefill", contract=careless, bindings=())
    place = method.plan.items.index(core)
    items = (*method.plan.items[:place], first, *method.plan.items[place:])
    plans = (replace(method.plan, items=items),)
    with pytest.raises(SpecError) as raised:
        prove(replace(plan, plans=plans, methods=name_methods(plans)))
    (finding,) = raised.value.diagnostics
    assert (finding.code, finding.message, finding.help) == (
        "KP605",
        f"mode `{method.plan.mode}`: `trtllm_gen` expects zeros in `trtllm_gen.counters`, which "
        "`prefill` leaves dirty",
        "give `prefill` memory of its own, or clear `trtllm_gen.counters` between the two",
    )
    assert finding.span == core.span
    untouched = [item for item in method.plan.items if isinstance(item, Planned)]
    assert untouched and dirty_findings(method.plan, ()) == []
