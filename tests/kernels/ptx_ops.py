"""What single instructions of PTX do to the registers and the memory of a warp.

A register is int64 [LANES], its bits; a predicate bool. See ptx_machine.py.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from ptx_cluster import LANES, convert_halves, store_async
from ptx_cluster import OPS as CLUSTER_OPS
from torch import Tensor

ALL_LANES = torch.ones(LANES, dtype=torch.bool)
SHARED_BASE, SHARED_BYTES = 1024, 228 * 1024
Warp = Any  # of ptx_machine.py


@dataclass(frozen=True)
class Instruction:
    """`op` with its suffixes as words; `guard` is (negated, predicate) or None."""

    op: tuple[str, ...]
    operands: tuple[str, ...]
    guard: tuple[bool, str] | None
    text: str


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


def _bits(kind: str) -> int:
    return 16 if kind == "bf16" else int(kind.lstrip("bfsu"))


_LETTERS = {8: "B", 16: "H", 32: "I", 64: "q"}


def _places(
    warp: Warp, instruction: Instruction, operand: str, size: int, doing: Tensor
) -> Iterator[tuple[int, ctypes.Array, int]]:
    """Lanes that do something; a buffer and where in it the bytes lie that they touch."""
    addresses = warp.addresses(operand)
    for lane in doing.nonzero().flatten().tolist():
        if "shared" in instruction.op:
            yield lane, warp.cta.shared, warp.cta.offset(addresses[lane], size)
        else:
            warp.launch.check(addresses[lane], size, instruction.text)
            yield lane, (ctypes.c_char * size).from_address(addresses[lane]), 0


def _load(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    bits, names = _bits(instruction.op[-1]), _names(instruction.operands[0])
    form = f"<{len(names)}{_LETTERS[bits]}"
    if "param" in instruction.op:
        name, _, offset = instruction.operands[1].strip("[] ").partition("+")
        data = warp.launch.parameters[int(name.rpartition("_")[2])]
        (value,) = struct.unpack_from(form, data, int(offset or 0))
        warp.write(names[0], torch.full((LANES,), value), doing)
        return
    values = torch.zeros(LANES, len(names), dtype=torch.int64)
    size = struct.calcsize(form)
    for lane, buffer, start in _places(warp, instruction, instruction.operands[1], size, doing):
        values[lane] = torch.tensor(struct.unpack_from(form, buffer, start))
    for number, name in enumerate(names):
        warp.write(name, values[:, number], doing)


def _store(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    if "async" in instruction.op:
        store_async(warp, instruction, doing)
        return
    bits, names = _bits(instruction.op[-1]), _names(instruction.operands[1])
    kind = f"b{bits}" if bits < 64 else "s64"
    form = f"<{len(names)}{_LETTERS[bits]}"
    values = torch.stack([warp.read(name, kind) for name in names], 1).tolist()
    size = struct.calcsize(form)
    for lane, buffer, start in _places(warp, instruction, instruction.operands[0], size, doing):
        struct.pack_into(form, buffer, start, *values[lane])


# -- arithmetic --------------------------------------------------------------------------------


def _kept(value: Tensor, kind: str) -> Tensor:
    """A result as a register of that type holds it."""
    if kind in ("f32", "pred"):
        return value.float() if kind == "f32" else value
    return value if _bits(kind) == 64 else value & ((1 << _bits(kind)) - 1)


def _plain(function: Callable[..., Tensor]) -> Callable[..., None]:
    """An instruction whose operands and result have one type."""

    def execute(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
        kind = instruction.op[-1]
        given = [warp.read(operand, kind) for operand in instruction.operands[1:]]
        warp.write(instruction.operands[0], _kept(function(*given), kind), doing)

    return execute


def _multiply(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """mul and mad: the low or the high half of a product, or all of it (`wide`)."""
    kind = instruction.op[-1]
    first, second, *third = (warp.read(o, kind) for o in instruction.operands[1:])
    result = first * second
    if "hi" in instruction.op:
        assert kind in ("s32", "u32"), instruction.text
        result = ((first >> 16) * second + ((first & 0xFFFF) * second >> 16)) >> 16
    result = result + third[0] if third else result
    if "wide" in instruction.op:
        kind = f"{kind[0]}{2 * _bits(kind)}"
    warp.write(instruction.operands[0], _kept(result, kind), doing)


def _shift(left: bool) -> Callable[..., None]:
    def execute(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
        target, value, count = instruction.operands
        kind = instruction.op[-1]
        value, count = warp.read(value, kind), warp.read(count, "u32")
        warp.write(target, _kept(value << count if left else value >> count, kind), doing)

    return execute


def _convert(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    to, source = instruction.op[-2:]
    if to == "f16x2":
        convert_halves(warp, instruction, doing)
        return
    target, *given = instruction.operands
    if to.startswith("bf16"):  # one value, or two of which the first goes above
        result = torch.zeros(LANES, dtype=torch.int64)
        for operand in given:
            half = warp.read(operand, "f32").bfloat16().view(torch.int16)
            result = result << 16 | half.long() & 0xFFFF
    elif source == "bf16":
        result = warp.read(given[0], "u16") << 16
    else:
        value = warp.read(given[0], source)
        if source == "f32" and to != "f32":
            value = (value.floor() if "rmi" in instruction.op else value.trunc()).long()
        result = _kept(value, to)
    warp.write(target, result, doing)


def _move(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    target, source = instruction.operands
    if target.startswith("{"):  # the parts of a word
        whole, names = warp.read(source, instruction.op[-1]), _names(target)
        size = _bits(instruction.op[-1]) // len(names)
        for number, name in enumerate(names):
            warp.write(name, whole >> size * number & ((1 << size) - 1), doing)
    else:
        warp.write(target, warp.read(source, instruction.op[-1]), doing)


def _set_predicate(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    target, first, second, *other = instruction.operands
    kind, compare = instruction.op[-1], getattr(torch, instruction.op[1])
    result = compare(warp.read(first, kind), warp.read(second, kind))
    if other:
        join = getattr(torch, f"logical_{instruction.op[2]}")
        result = join(result, warp.read(other[0], "pred"))
    warp.write(target, result, doing)


def _select(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    target, first, second, predicate = instruction.operands
    kind = instruction.op[-1]
    given = (warp.read(operand, kind) for operand in (first, second))
    warp.write(target, torch.where(warp.read(predicate, "pred"), *given), doing)


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
    """m16n8k16 on BF16: rows g and g + 8 of A and C, columns 2t and on, for lane 4g + t."""
    assert doing.all() and "m16n8k16" in instruction.op, instruction.text
    target, a_words, b_words, c_words = (_names(o) for o in instruction.operands)
    lanes = torch.arange(LANES)
    group, column = lanes // 4, lanes % 4 * 2
    a, b, c = (torch.zeros(shape).double() for shape in ((16, 16), (8, 16), (16, 8)))
    for number, name in enumerate(a_words):
        for half, values in enumerate(_halves(warp.read(name, "u32"))):
            a[group + number % 2 * 8, column + number // 2 * 8 + half] = values
    for number, name in enumerate(b_words):
        for half, values in enumerate(_halves(warp.read(name, "u32"))):
            b[group, column + number * 8 + half] = values
    for number, name in enumerate(c_words):
        c[group + number // 2 * 8, column + number % 2] = warp.read(name, "f32").double()
    result = (c + a @ b.T).float()
    for number, name in enumerate(target):
        warp.write(name, result[group + number // 2 * 8, column + number % 2], doing)


def _halves(word: Tensor) -> list[Tensor]:
    bits = torch.stack([word & 0xFFFF, word >> 16]).to(torch.int32).to(torch.int16)
    return list(bits.view(torch.bfloat16).double())


def _divide(first: Tensor, second: Tensor) -> Tensor:
    if first.dtype == torch.float32:
        return first / second
    return torch.div(first, torch.where(second == 0, 1, second), rounding_mode="trunc")


OPS: dict[str, Callable[..., None]] = {
    **CLUSTER_OPS,
    "ld": _load,
    "st": _store,
    "mov": _move,
    "cvt": _convert,
    "setp": _set_predicate,
    "selp": _select,
    "shfl": _shuffle,
    "mma": _mma,
    "mul": _multiply,
    "mad": _multiply,
    "shl": _shift(left=True),
    "shr": _shift(left=False),
    "add": _plain(torch.add),
    "sub": _plain(torch.sub),
    "and": _plain(torch.bitwise_and),
    "or": _plain(torch.bitwise_or),
    "xor": _plain(torch.bitwise_xor),
    "not": _plain(torch.bitwise_not),
    "neg": _plain(torch.neg),
    "abs": _plain(torch.abs),
    "min": _plain(lambda a, b: torch.fmin(a, b) if a.is_floating_point() else a.minimum(b)),
    "max": _plain(lambda a, b: torch.fmax(a, b) if a.is_floating_point() else a.maximum(b)),
    "fma": _plain(lambda a, b, c: a.double() * b.double() + c.double()),
    "div": _plain(_divide),
    "rem": _plain(lambda a, b: torch.fmod(a, torch.where(b == 0, 1, b))),
    "ex2": _plain(lambda x: torch.exp2(x.double())),
    "rcp": _plain(lambda x: 1.0 / x.double()),
}
