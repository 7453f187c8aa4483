"""What single instructions of PTX do to the registers of a lane: arithmetic and conversions.

A register is int64 [LANES], its bits; a predicate bool. See ptx_machine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ptx_cluster import LANES
from ptx_lanes import halves
from ptx_program import Instruction, bits_of, names_of
from torch import Tensor

Warp = Any  # of ptx_machine.py


def _kept(value: Tensor, kind: str) -> Tensor:
    """A result as a register of that type holds it."""
    if kind in ("f32", "pred"):
        return value.float() if kind == "f32" else value
    return value if bits_of(kind) == 64 else value & ((1 << bits_of(kind)) - 1)


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
    if kind == "f16x2":
        _multiply_halves(warp, instruction, doing)
        return
    first, second, *third = (warp.read(o, kind) for o in instruction.operands[1:])
    result = first * second
    if "hi" in instruction.op:
        assert kind in ("s32", "u32", "u16"), instruction.text
        result = ((first >> 16) * second + ((first & 0xFFFF) * second >> 16)) >> 16
        result = first * second >> 16 if kind == "u16" else result
    result = result + third[0] if third else result
    if "wide" in instruction.op:
        kind = f"{kind[0]}{2 * bits_of(kind)}"
    warp.write(instruction.operands[0], _kept(result, kind), doing)


def _multiply_halves(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    assert instruction.op[0] == "mul", instruction.text
    target, *given = instruction.operands
    pairs = (halves(warp.read(name, "u32"), torch.float16) for name in given)
    low, high = ((a.double() * b.double()).half() for a, b in zip(*pairs, strict=True))
    warp.write(target, _bits_of_half(low) | _bits_of_half(high) << 16, doing)


def _shift(left: bool) -> Callable[..., None]:
    def execute(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
        target, value, count = instruction.operands
        kind = instruction.op[-1]
        value, count = warp.read(value, kind), warp.read(count, "u32")
        warp.write(target, _kept(value << count if left else value >> count, kind), doing)

    return execute


def _convert(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    to, source = instruction.op[-2:]
    target, *given = instruction.operands
    if to == "f16x2":
        result = _halves_of(warp, instruction, given)
    elif to.startswith("bf16"):  # one value, or two of which the first goes above
        result = torch.zeros(LANES, dtype=torch.int64)
        for operand in given:
            half = warp.read(operand, "f32").bfloat16().view(torch.int16)
            result = result << 16 | half.long() & 0xFFFF
    elif source == "bf16":
        result = warp.read(given[0], "u16") << 16
    elif source == "f16":
        result = halves(warp.read(given[0], "u16"), torch.float16)[0].float()
    elif source == "f32":
        result = _kept(_rounded(warp.read(given[0], source), instruction), to)
    else:
        result = _kept(warp.read(given[0], source), to)
    warp.write(target, result, doing)


def _rounded(value: Tensor, instruction: Instruction) -> Tensor:
    """FP32 to an integer: FP32 where the instruction's result is, else int64."""
    to_float, op = instruction.op[-2] == "f32", instruction.op
    ways = {"rmi": torch.floor, "rpi": torch.ceil, "rzi": torch.trunc}
    way = next((ways[word] for word in op if word in ways), None)
    assert way, instruction.text
    return way(value) if to_float else way(value).long()


def _halves_of(warp: Warp, instruction: Instruction, given: list[str]) -> Tensor:
    """Two FP16 of two codes, or of two FP32 of which the second goes below."""
    rounding, _, source = instruction.op[1:]
    if source == "e4m3x2":
        codes = warp.read(given[0], "u16")
        bytes_ = torch.stack([codes & 0xFF, codes >> 8]).to(torch.uint8)
        low, high = bytes_.view(torch.float8_e4m3fn).half()
        return _bits_of_half(low) | _bits_of_half(high) << 16
    assert source == "f32" and rounding in ("rn", "rz"), instruction.text
    high, low = (warp.read(operand, "f32") for operand in given)
    cut = half_towards_zero if rounding == "rz" else lambda value: _bits_of_half(value.half())
    return cut(low) | cut(high) << 16


def _bits_of_half(value: Tensor) -> Tensor:
    return value.view(torch.int16).long() & 0xFFFF


def half_towards_zero(value: Tensor) -> Tensor:
    """int64 [n]: bits of FP32 values cut to FP16, infinities only of infinities."""
    half = value.half()
    bits = _bits_of_half(half)
    return torch.where(half.float().abs() > value.abs(), bits - 1, bits)


def _popc(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    bits = warp.read(instruction.operands[1], "u32").tolist()
    counts = torch.tensor([value.bit_count() for value in bits])
    warp.write(instruction.operands[0], counts, doing)


def _permute(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """prmt: each byte of the result is one of eight, or copies of its sign."""
    target, *given = instruction.operands
    low, high, selector = (warp.read(name, "u32") for name in given)
    both, result = low | high << 32, torch.zeros(LANES, dtype=torch.int64)
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = both >> 8 * (nibble & 7) & 255
        byte = torch.where(nibble >= 8, (byte >> 7) * 255, byte)
        result = result | byte << 8 * place
    warp.write(target, result, doing)


def _move(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    target, source = instruction.operands
    if target.startswith("{"):  # the parts of a word
        whole, names = warp.read(source, instruction.op[-1]), names_of(target)
        size = bits_of(instruction.op[-1]) // len(names)
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


def _divide(first: Tensor, second: Tensor) -> Tensor:
    if first.dtype == torch.float32:
        return first / second
    return torch.div(first, torch.where(second == 0, 1, second), rounding_mode="trunc")


def _nothing(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """Orders what is in order here anyway, or deals out registers."""


OPS: dict[str, Callable[..., None]] = {
    "mov": _move,
    "cvt": _convert,
    "popc": _popc,
    "prmt": _permute,
    "setp": _set_predicate,
    "selp": _select,
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
    **dict.fromkeys(("fence", "griddepcontrol", "setmaxnreg"), _nothing),
}
