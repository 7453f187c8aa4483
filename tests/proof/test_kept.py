"""Orders and searches that are kept answer as those that are made anew."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from proof_chains import MAIN, on, pdl, program, reads, writes
from spec_project import make_project

from kpipe.codegen.plan.api import plan_pipeline
from kpipe.codegen.proof.edges import edges
from kpipe.codegen.proof.kept import Kept, forget
from kpipe.codegen.proof.mailbox.explorer import bounds_to_check, explore
from kpipe.codegen.proof.mailbox.protocol import Op, protocol_of
from kpipe.codegen.proof.mailbox.unrolled import Step, Unrolled
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Copy, Kernel, Launch, Program, Segment
from kpipe.codegen.proof.races import compare_all, scan


def test_the_one_that_was_not_asked_for_longest_goes_first() -> None:
    kept: Kept[str] = Kept(2)
    kept.keep(("a",), "A")
    kept.keep(("b",), "B")
    assert kept.get(("a",)) == "A"
    kept.keep(("c",), "C")
    assert [kept.get((key,)) for key in "abc"] == ["A", None, "C"]
    forget()
    assert kept.get(("a",)) is None


def chain(captured: bool = False, **changes: object) -> Program:
    """Three kernels in line, the middle one with some fields changed."""
    kernels = [pdl(name, writes(name)) for name in ("a", "b", "c")]
    kernels[1] = replace(kernels[1], **changes)
    (segment,) = program(on(MAIN, *kernels)).segments
    return Program((replace(segment, captured=captured),) * 2)


CHANGES: dict[str, object] = {
    "pdl": False,
    "waits": False,
    "trigger": "after_wait",
    "fenced": True,
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("field", CHANGES)
def test_no_order_is_taken_for_that_of_another_shape(field: str, captured: bool) -> None:
    forget()
    base = {"waits": True, "trigger": "early"}
    programs = [chain(captured, **base), chain(captured, **{**base, field: CHANGES[field]})]
    programs += [chain(not captured, **base), programs[0]]
    for given in programs:
        for fences in (False, True):
            for assumptions in (frozenset[str](), frozenset({"m1"})):
                order = Order(given, assumptions, fences)
                assert order.edges == edges(given, assumptions, fences)
                assert order.launches == given.launches


def test_a_shape_holds_every_field_of_a_kernel_but_names_and_memory() -> None:
    assert {field.name for field in fields(Kernel)} == {"name", "accesses", *CHANGES}
    assert Copy("a").shape == Copy("b", writes("x")).shape != Kernel("a").shape
    launches = tuple(Launch(stream, Copy("a")) for stream in (0, 1))
    assert len({Segment((launch,)).shape for launch in launches}) == 2


def test_programs_of_one_shape_are_told_apart_by_their_memory() -> None:
    forget()
    touched = writes("x"), reads("y"), writes("y"), reads("y")
    kernels = [pdl(name, own) for name, own in zip("abcd", touched, strict=True)]
    silent = [replace(kernel, waits=False, trigger="early") for kernel in kernels]
    racy = program(on(MAIN, *silent))
    fine = program(on(MAIN, *(replace(k, accesses=()) for k in silent)))
    assert racy.shape == fine.shape
    assert scan(Order(fine)).pairs == []
    found = scan(Order(racy))
    assert frozenset(found.pairs) == compare_all(racy) != frozenset()
    assert len(found.pairs) == 2
    assert scan(Order(racy), stop=True).pairs == found.pairs[:1]


def test_a_search_is_kept_for_what_the_steps_do_and_not_for_their_names(tmp_path: Path) -> None:
    root = make_project(tmp_path)
    plan = plan_pipeline(str(root / "pipelines" / "dsa_dcp.yaml"))
    protocol = protocol_of(plan.methods[0].plan, plan)
    bounds = bounds_to_check(protocol, 2)[0]
    forget()
    first = explore(protocol, bounds)
    ops = [item for item in protocol.items if isinstance(item, Op)]
    renamed = replace(protocol, items=tuple(replace(op, name=f"{op.name}_") for op in ops))
    assert explore(protocol, bounds) == first == explore(renamed, bounds)
    assert first.proved
    swapped = [*ops[:-2], ops[-1], ops[-2]]
    kept = explore(replace(protocol, items=tuple(swapped)), bounds)
    forget()
    assert kept == explore(replace(protocol, items=tuple(swapped)), bounds) != first


def test_a_program_holds_all_that_its_steps_do_and_no_names() -> None:
    step = Step(0, 0, "op", "poll", "box", 0, 1, (0,), 0)

    def shape(**changes: object) -> tuple:
        return Unrolled(((replace(step, **changes),),), (), 2, True).shape(frozenset({"box"}))

    acts = {"copy": 1, "act": "publish", "box": "other", "words": (1,), "before": 2}
    for name, value in acts.items():
        assert shape(**{name: value}) != shape()
    names = {"op": "another", "parity": 1, "peer": 0, "rank": 1}
    assert shape(**names) == shape()
    assert {field.name for field in fields(Step)} == {*acts, *names}
