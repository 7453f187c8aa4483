"""The check of a step that remembers: against one that does not, and against sets of bytes."""

from __future__ import annotations

import random

import pytest
import torch

from kpipe.runtime.metadata import LayerError, Step, TensorSpec
from kpipe.runtime.step_check import StepCheck
from kpipe.runtime.storage import block_of

ROWS, POOL = 3, 60
SPECS = {
    "hidden": TensorSpec(("rows", "width"), "u8"),
    "out": TensorSpec(("rows",), "u8"),
    "lengths": TensorSpec(("requests",), "u8"),
    "slots": TensorSpec(("rows",), "u8"),
    "block_table": TensorSpec(("requests", "pages"), "u8"),
}


def piece(rng: random.Random, pool: torch.Tensor, *shape: int) -> torch.Tensor:
    """A tensor somewhere in the pool, its first axis strided or not."""
    inner = shape[1] if len(shape) > 1 else 1
    stride = inner + rng.choice((0, 0, 1, 4))
    start = rng.randrange(0, POOL - stride * shape[0])
    strides = (stride, 1) if len(shape) > 1 else (stride,)
    return pool.as_strided(shape, strides, pool.storage_offset() + start)


def bytes_of(tensor: torch.Tensor) -> set[int]:
    return {
        tensor.data_ptr() + sum(n * step for n, step in zip(place, tensor.stride(), strict=True))
        for place in torch.cartesian_prod(*(torch.arange(n) for n in tensor.shape))
        .reshape(-1, tensor.dim())
        .tolist()
    }


def test_what_is_refused_is_what_has_bytes_in_common() -> None:
    """Random places of layer and step in one pool, the same step more than once."""
    rng = random.Random(3)
    verdicts = {True: 0, False: 0}
    for _ in range(150):
        pool = torch.zeros(POOL * 8, dtype=torch.uint8)
        fixed = [pool[n * POOL * 2 :][:POOL] for n in range(2)]  # apart from each other
        mine = {
            "weight": (piece(rng, fixed[0], 2, 2), False),
            "buffer": (piece(rng, fixed[1], 3, 2), True),
        }
        blocks = [block_of(name, t, written=w) for name, (t, w) in mine.items()]
        check = StepCheck("layer", SPECS, blocks)
        for _ in range(4):
            parts = [rng.choice((*fixed, pool[POOL * 5 :][:POOL], pool[POOL * 6 :])) for _ in SPECS]
            step = Step(
                hidden=piece(rng, parts[0], ROWS, 2),
                out=piece(rng, parts[1], ROWS),
                lengths=piece(rng, parts[2], ROWS),
                slots=piece(rng, parts[3], ROWS),
                block_table=piece(rng, parts[4], ROWS, 2),
            )
            wanted = _overlaps(step, mine)
            for _ in range(3):
                verdicts[wanted] += 1
                if wanted:
                    with pytest.raises(LayerError, match="share storage"):
                        check.check(step)
                else:
                    check.check(step)
    assert min(verdicts.values()) > 300


def _overlaps(step: Step, mine: dict[str, tuple[torch.Tensor, bool]]) -> bool:
    out = bytes_of(step.out)
    others = (step.hidden, step.lengths, step.slots, step.block_table)
    if any(out & bytes_of(one) for one in others):
        return True
    read = set().union(*(bytes_of(one) for one in others))
    held = {name: bytes_of(tensor) for name, (tensor, _) in mine.items()}
    return bool(out & (held["weight"] | held["buffer"]) or read & held["buffer"])


def a_step(rows: int, pages: int = 2) -> Step:
    return Step(
        hidden=torch.zeros(rows, 2, dtype=torch.uint8),
        out=torch.zeros(rows, dtype=torch.uint8),
        lengths=torch.zeros(rows, dtype=torch.uint8),
        slots=torch.zeros(rows, dtype=torch.uint8),
        block_table=torch.zeros(rows, pages, dtype=torch.uint8),
    )


def test_more_steps_than_are_kept_pass_and_are_refused_alike() -> None:
    check = StepCheck("layer", SPECS, [])
    steps = [a_step(1 + n % 7, 1 + n // 7) for n in range(300)]
    for step in (*steps, *reversed(steps), *steps):
        check.check(step)
    for step in steps[::50]:
        step.slots = step.slots.int()
        for _ in range(2):
            with pytest.raises(LayerError, match="slots is"):
                check.check(step)


def test_blocks_of_the_layer_that_overlap_are_refused_at_once() -> None:
    pool = torch.zeros(8, dtype=torch.uint8)
    blocks = [block_of("one", pool[:5]), block_of("other", pool[4:])]
    with pytest.raises(LayerError, match="^layer: one and other share storage; "):
        StepCheck("layer", SPECS, blocks)


def test_known_places_do_not_cover_for_another_length() -> None:
    """Longer than what has passed at the same address, up to the byte where the buffer begins."""
    pool = torch.zeros(64, dtype=torch.uint8)
    check = StepCheck("layer", SPECS, [block_of("buffer", pool[6:10])])
    step = a_step(3)
    step.slots = pool[3:6]
    check.check(step)
    step = a_step(4)
    step.slots = pool[3:7]
    with pytest.raises(LayerError, match="step slots and buffer share storage"):
        check.check(step)
    step.slots = pool[10:14]
    check.check(step)


def test_known_places_do_not_cover_for_other_strides() -> None:
    """As many elements from the same address, further apart: the last one lies in the buffer."""
    pool = torch.zeros(64, dtype=torch.uint8)
    check = StepCheck("layer", SPECS, [block_of("buffer", pool[7:10])])
    step = a_step(3)
    step.slots = pool[3:6]
    check.check(step)
    step.slots = pool[3:8:2]
    with pytest.raises(LayerError, match="step slots and buffer share storage"):
        check.check(step)


def test_an_output_in_weights_that_overlap_is_refused() -> None:
    """What is only read may share storage; what spans both is known to its end."""
    pool = torch.zeros(64, dtype=torch.uint8)
    parts = {"first": pool[:8], "second": pool[4:16], "inner": pool[1:3]}
    weights = [block_of(name, part, written=False) for name, part in parts.items()]
    check = StepCheck("layer", SPECS, weights)
    step = a_step(3)
    step.out = pool[10:13]
    with pytest.raises(LayerError, match="second and step out share storage"):
        check.check(step)
    step.out, step.slots = pool[40:43], pool[10:13]
    check.check(step)
