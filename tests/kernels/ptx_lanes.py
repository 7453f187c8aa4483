"""What instructions of PTX do across the lanes of a warp: votes, shuffles, products of matrices."""

from __future__ import annotations

import struct
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
    assert doing.all() and instruction.op[2] in ("add", "max"), instruction.text
    values = warp.read(instruction.operands[1], "s32")
    total = int(values.max() if instruction.op[2] == "max" else values.sum())
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
    target, *given = (names_of(operand) for operand in instruction.operands)
    words = torch.stack([warp.read(name, "b64") for names in given for name in names])
    pairs = words.view(dtype)  # four halves a word, of which the lower two count
    a, b = pairs[:4].take(_A_PLACES).double(), pairs[4:6].take(_B_PLACES).double()
    c = words[6:].view(torch.float32).take(_C_PLACES).double()
    result = (c + a @ b.T).float().take(_RESULT_PLACES)
    for name, values in zip(target, result, strict=True):
        warp.write(name, values, doing)


def _places_of_mma() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the elements of A, B and C are in the words of all lanes, and the words in C."""
    a, b = torch.zeros(16, 16, dtype=torch.int64), torch.zeros(8, 16, dtype=torch.int64)
    c, result = torch.zeros(16, 8, dtype=torch.int64), torch.zeros(4, LANES, dtype=torch.int64)
    lanes = torch.arange(LANES)
    group, column = lanes // 4, lanes % 4 * 2
    for word in range(4):
        for half in range(2):
            place = (word * LANES + lanes) * 4 + half
            a[group + word % 2 * 8, column + word // 2 * 8 + half] = place
            if word < 2:
                b[group, column + word * 8 + half] = place
        row, behind = group + word // 2 * 8, column + word % 2
        c[row, behind] = (word * LANES + lanes) * 2
        result[word] = row * 8 + behind
    return a, b, c, result


_A_PLACES, _B_PLACES, _C_PLACES, _RESULT_PLACES = _places_of_mma()


def halves(word: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The lower and the upper value of words of two."""
    lower, upper, *_ = word.contiguous().view(dtype).view(LANES, 4).unbind(1)
    return [lower, upper]


def _load_matrices(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """Four 8 x 8 matrices, transposed: lane 8m + i has the address of row i of matrix m."""
    assert "trans" in instruction.op and "x4" in instruction.op and doing.all(), instruction.text
    addresses = warp.addresses(instruction.operands[1])
    lanes = torch.arange(LANES)
    for matrix, name in enumerate(names_of(instruction.operands[0])):
        starts = [warp.cta.offset(at, 16) for at in addresses[8 * matrix : 8 * matrix + 8]]
        rows = b"".join(warp.cta.shared[start : start + 16] for start in starts)
        values = torch.tensor(struct.unpack("<64H", rows)).view(8, 8)  # (row, element)
        low, high = values[2 * (lanes % 4), lanes // 4], values[2 * (lanes % 4) + 1, lanes // 4]
        warp.write(name, low | high << 16, doing)


OPS: dict[str, Callable[..., None]] = {
    "vote": _vote,
    "redux": _redux,
    "shfl": _shuffle,
    "mma": _mma,
    "ldmatrix": _load_matrices,
}
