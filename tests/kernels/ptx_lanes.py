"""What instructions of PTX do across the lanes of a warp: votes, shuffles, products of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ptx_cluster import LANES
from ptx_program import Instruction, names_of
from torch import Tensor

Warp = Any  # of ptx_machine.py


def _vote(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    assert doing.all(), f"a vote that not all lanes come to: {instruction.text}"
    target, predicate = instruction.operands[:2]
    votes = warp.read(predicate, "pred")
    if instruction.op[2] == "any":
        result = torch.full((LANES,), bool(votes.any()))
    else:
        assert instruction.op[2] == "ballot", instruction.text
        result = torch.full((LANES,), int((votes.long() << torch.arange(LANES)).sum()))
    warp.write(target, result, doing)


def _redux(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    assert doing.all() and "add" in instruction.op, instruction.text
    total = int(warp.read(instruction.operands[1], "s32").sum())
    warp.write(instruction.operands[0], torch.full((LANES,), total & 0xFFFF_FFFF), doing)


def _shuffle(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    assert doing.all(), f"a shuffle that not all lanes come to: {instruction.text}"
    target, value, lane = instruction.operands[:3]
    sources, lanes = warp.read(lane, "u32"), torch.arange(LANES)
    if "bfly" in instruction.op:
        sources = lanes ^ sources
    if "up" in instruction.op:
        sources = torch.where(lanes >= sources, lanes - sources, lanes)
    warp.write(target, warp.read(value, "b32")[sources], doing)


def _mma(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """m16n8k16: rows g and g + 8 of A and C, columns 2t and on, for lane 4g + t."""
    assert doing.all() and "m16n8k16" in instruction.op, instruction.text
    dtype = torch.float16 if "f16" in instruction.op else torch.bfloat16
    target, a_words, b_words, c_words = (names_of(o) for o in instruction.operands)
    lanes = torch.arange(LANES)
    group, column = lanes // 4, lanes % 4 * 2
    a, b, c = (torch.zeros(shape).double() for shape in ((16, 16), (8, 16), (16, 8)))
    for number, name in enumerate(a_words):
        for half, values in enumerate(halves(warp.read(name, "u32"), dtype)):
            a[group + number % 2 * 8, column + number // 2 * 8 + half] = values.double()
    for number, name in enumerate(b_words):
        for half, values in enumerate(halves(warp.read(name, "u32"), dtype)):
            b[group, column + number * 8 + half] = values.double()
    for number, name in enumerate(c_words):
        c[group + number // 2 * 8, column + number % 2] = warp.read(name, "f32").double()
    result = (c + a @ b.T).float()
    for number, name in enumerate(target):
        warp.write(name, result[group + number // 2 * 8, column + number % 2], doing)


def halves(word: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The lower and the upper value of words of two."""
    bits = torch.stack([word & 0xFFFF, word >> 16 & 0xFFFF]).to(torch.int32).to(torch.int16)
    return list(bits.view(dtype))


def _load_matrices(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """Four 8 x 8 matrices, transposed: lane 8m + i has the address of row i of matrix m."""
    assert "trans" in instruction.op and "x4" in instruction.op and doing.all(), instruction.text
    addresses = warp.addresses(instruction.operands[1])
    lanes = torch.arange(LANES)
    for matrix, name in enumerate(names_of(instruction.operands[0])):
        rows = []
        for row in range(8):
            start = warp.cta.offset(addresses[8 * matrix + row], 16)
            rows.append(torch.tensor(list(warp.cta.shared.raw[start : start + 16])).view(8, 2))
        values = torch.stack(rows)
        values = values[..., 0] | values[..., 1] << 8  # (row, element)
        low, high = values[2 * (lanes % 4), lanes // 4], values[2 * (lanes % 4) + 1, lanes // 4]
        warp.write(name, low | high << 16, doing)


OPS: dict[str, Callable[..., None]] = {
    "vote": _vote,
    "redux": _redux,
    "shfl": _shuffle,
    "mma": _mma,
    "ldmatrix": _load_matrices,
}
