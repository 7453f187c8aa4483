"""Loads, stores, copies and atomics of PTX, on global memory and on that of CTAs."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ptx_cluster import (
    LANES,
    PEER_BITS,
    arrive_behind_copies,
    copy_run,
    cta_at,
    lanes_of,
    store_async,
)
from ptx_program import Instruction, bits_of, names_of
from torch import Tensor

Warp = Any  # of ptx_machine.py
_LETTERS = {8: "B", 16: "H", 32: "I", 64: "q"}


def _places(
    warp: Warp, instruction: Instruction, operand: str, size: int, doing: Tensor
) -> Iterator[tuple[int, ctypes.Array, int]]:
    """Lanes that do something; a buffer and where in it the bytes lie that they touch."""
    addresses = warp.addresses(operand)
    for lane in lanes_of(doing):
        address = addresses[lane]
        if "shared::cluster" in instruction.op:
            cta = cta_at(warp, address)
            yield lane, cta.shared, cta.offset(address & (1 << PEER_BITS) - 1, size)
        elif "shared" in instruction.op:
            yield lane, warp.cta.shared, warp.cta.offset(address, size)
        else:
            warp.launch.check(address, size, instruction.text)
            yield lane, (ctypes.c_char * size).from_address(address), 0


def _load(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    bits, names = bits_of(instruction.op[-1]), names_of(instruction.operands[0])
    form = f"<{len(names)}{_LETTERS[bits]}"
    if "param" in instruction.op:
        name, _, offset = instruction.operands[1].strip("[] ").partition("+")
        data = warp.launch.parameters[int(name.rpartition("_")[2])]
        (value,) = struct.unpack_from(form, data, int(offset or 0))
        warp.write(names[0], torch.full((LANES,), value), doing)
        return
    values = [[0] * len(names)] * LANES
    size = struct.calcsize(form)
    for lane, buffer, start in _places(warp, instruction, instruction.operands[1], size, doing):
        values[lane] = struct.unpack_from(form, buffer, start)
    for name, column in zip(names, torch.tensor(values).T.contiguous(), strict=True):
        warp.write(name, column, doing)


def _store(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    if "async" in instruction.op:
        store_async(warp, instruction, doing)
        return
    bits, names = bits_of(instruction.op[-1]), names_of(instruction.operands[1])
    kind = f"b{bits}" if bits < 64 else "s64"
    form = f"<{len(names)}{_LETTERS[bits]}"
    values = torch.stack([warp.read(name, kind) for name in names], 1).tolist()
    size = struct.calcsize(form)
    for lane, buffer, start in _places(warp, instruction, instruction.operands[0], size, doing):
        struct.pack_into(form, buffer, start, *values[lane])


def _copy(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """cp.async of 4 to 16 bytes a lane: some are over at once, others not ahead of an arrival."""
    if "bulk" in instruction.op:
        copy_run(warp, instruction, doing)
        return
    if "mbarrier" in instruction.op:
        arrive_behind_copies(warp, instruction, doing)
        return
    if "wait_all" in instruction.op:
        for lane in lanes_of(doing):
            for start, data in warp.copies.pop(lane, ()):
                warp.cta.shared[start : start + len(data)] = data
        return
    assert instruction.op[-2:] == ("shared", "global"), instruction.text
    (size,) = map(int, instruction.operands[2:])
    assert size == 16 if "cg" in instruction.op else size in (4, 8, 16), instruction.text
    targets, sources = (warp.addresses(operand) for operand in instruction.operands[:2])
    for lane in lanes_of(doing):
        warp.launch.check(sources[lane], size, instruction.text)
        start = warp.cta.offset(targets[lane], size)
        data = ctypes.string_at(sources[lane], size)
        if warp.cta.mail.order.random() < 0.5:
            warp.cta.shared[start : start + size] = data
        else:
            warp.copies.setdefault(lane, []).append((start, data))


def _atomic(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """red and atom: lanes one after the other, in an order that nobody may rely on."""
    assert instruction.op[1:] in (("shared", "add", "u32"), ("shared", "or", "b32"))
    sets = instruction.op[2] == "or"
    returns = instruction.op[0] == "atom"
    address, value = instruction.operands[returns:]
    addresses, values = warp.addresses(address), warp.read(value, "u32").tolist()
    before = torch.zeros(LANES, dtype=torch.int64)
    lanes = lanes_of(doing)
    warp.cta.mail.order.shuffle(lanes)
    for lane in lanes:
        start = warp.cta.offset(addresses[lane], 4)
        (held,) = struct.unpack_from("<I", warp.cta.shared, start)
        before[lane] = held
        result = held | values[lane] if sets else held + values[lane] & 0xFFFF_FFFF
        struct.pack_into("<I", warp.cta.shared, start, result)
    if returns:
        warp.write(instruction.operands[0], before, doing)


def _policy(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """createpolicy: a name of how long a cache keeps something, which changes nothing here."""
    warp.write(instruction.operands[0], torch.zeros(LANES, dtype=torch.int64), doing)


OPS: dict[str, Callable[..., None]] = {
    "ld": _load,
    "st": _store,
    "cp": _copy,
    "createpolicy": _policy,
    "red": _atomic,
    "atom": _atomic,
}
