"""Barriers in shared memory, copies that end on them, clusters, instructions on FP8 and F16.

More of what ptx_ops.py has. A copy is over at once; a barrier's phase is over where the instruction
set says so: its arrivals have come and the bytes that they announced have landed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from ptx_ops import LANES, OPS, SHARED_BASE, SHARED_BYTES, Instruction, _names, _plain
from torch import Tensor

Warp = Any  # of ptx_machine.py
RANK_SHIFT = 24
"""An address of a cluster's shared memory holds the CTA's rank above its own address."""


@dataclass
class Barrier:
    """`pending` arrivals and announced `size` bytes until the running phase is over."""

    arrivals: int
    pending: int
    size: int = 0
    phase: int = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == 0 and self.size == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals


def _lanes(doing: Tensor) -> list[int]:
    return doing.nonzero().flatten().tolist()


def _barriers(warp: Warp, operand: str, doing: Tensor) -> list[Barrier]:
    """The barrier that each lane names, of whichever CTA of the cluster."""
    found = []
    for lane in _lanes(doing):
        address = warp.addresses(operand)[lane]
        cta = warp.cta.peers[address >> RANK_SHIFT] if address >> RANK_SHIFT else warp.cta
        found.append(cta.barriers[address & (1 << RANK_SHIFT) - 1])
    return found


def _mbarrier(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    op, operands = instruction.op, instruction.operands
    if "init" in op:
        counts = warp.read(operands[1], "u32").tolist()
        for lane in _lanes(doing):
            address = warp.addresses(operands[0])[lane]
            assert address not in warp.cta.barriers, "initialised twice"
            warp.cta.barriers[address] = Barrier(counts[lane], counts[lane])
    elif "try_wait" in op:
        parity = warp.read(operands[2], "u32").tolist()
        over = torch.zeros(LANES, dtype=torch.bool)
        for lane, one in zip(_lanes(doing), _barriers(warp, operands[1], doing), strict=True):
            over[lane] = one.phase % 2 != parity[lane]
        warp.write(operands[0], over, doing)
        warp.rests = not bool(over[doing].all())
    else:
        amount = warp.read(operands[-1], "u32").tolist() if len(operands) > 2 else [1] * LANES
        for lane, one in zip(_lanes(doing), _barriers(warp, operands[1], doing), strict=True):
            one.size += amount[lane] if "expect_tx" in op else 0
            one.pending -= 1 if "expect_tx" in op else amount[lane]
            one.settle()


def _copy(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """cp.async of 16 bytes a lane, and the arrival behind a lane's copies."""
    if "mbarrier" in instruction.op:
        for one in _barriers(warp, instruction.operands[0], doing):
            one.pending -= 1
            one.settle()
        return
    assert instruction.op[-2:] == ("shared", "global") and instruction.operands[2] == "16"
    targets, sources = (warp.addresses(operand) for operand in instruction.operands[:2])
    for lane in _lanes(doing):
        warp.launch.check(sources[lane], 16, instruction.text)
        place = _place(targets[lane], 16)
        warp.cta.shared[place : place + 16] = ctypes.string_at(sources[lane], 16)


def _place(address: int, size: int) -> int:
    start = (address & (1 << RANK_SHIFT) - 1) - SHARED_BASE
    assert start % size == 0 and 0 <= start <= SHARED_BYTES - size
    return start


def _store_async(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """st.async: words for a CTA of the cluster, whose bytes are counted by a barrier there."""
    target, values, barrier = instruction.operands
    words = [warp.read(name, "u32").tolist() for name in _names(values)]
    addresses = warp.addresses(target)
    size = 4 * len(words)
    for lane, one in zip(_lanes(doing), _barriers(warp, barrier, doing), strict=True):
        cta, place = warp.cta.peers[addresses[lane] >> RANK_SHIFT], _place(addresses[lane], size)
        data = b"".join(word[lane].to_bytes(4, "little") for word in words)
        cta.shared[place : place + size] = data
        one.size -= size
        one.settle()


def _map(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    target, address, rank = instruction.operands
    place = warp.read(address, "u32")
    warp.write(target, place | warp.read(rank, "u32") + 1 << RANK_SHIFT, doing)


def _cluster(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    if "arrive" in instruction.op:
        warp.cta.cluster_arrived += len(_lanes(doing))
    else:
        warp.at_cluster = True


def _vote(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    assert instruction.op[2] == "any" and bool(doing.all()), instruction.text
    given = warp.read(instruction.operands[1], "pred")
    warp.write(instruction.operands[0], torch.full((LANES,), bool(given.any())), doing)


# -- arithmetic --------------------------------------------------------------------------------


def _f16(word: Tensor) -> list[Tensor]:
    """Both halves of a word."""
    bits = torch.stack([word & 0xFFFF, word >> 16 & 0xFFFF]).to(torch.int32).to(torch.int16)
    return list(bits.view(torch.float16))


def _word(low: Tensor, high: Tensor) -> Tensor:
    halves = [part.half().view(torch.int16).long() & 0xFFFF for part in (low, high)]
    return halves[0] | halves[1] << 16


def convert(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """cvt to pairs of F16, and to the integer above; the rest is that of ptx_ops.py."""
    kinds, (target, *given) = instruction.op[1:], instruction.operands
    if kinds == ("rn", "f16x2", "e4m3x2"):
        codes = warp.read(given[0], "u16")
        bytes_ = torch.stack([codes & 0xFF, codes >> 8]).to(torch.uint8)
        result = _word(*bytes_.view(torch.float8_e4m3fn).float())
    elif kinds == ("rn", "f16x2", "f32"):
        result = _word(warp.read(given[1], "f32"), warp.read(given[0], "f32"))
    elif kinds == ("rpi", "f32", "f32"):
        result = warp.read(given[0], "f32").ceil()
    elif kinds == ("f32", "f16"):
        result = _f16(warp.read(given[0], "u16"))[0].float()
    else:
        _plain_convert(warp, instruction, doing)
        return
    warp.write(target, result, doing)


def _multiply(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    if instruction.op[-1] != "f16x2":
        _plain_multiply(warp, instruction, doing)
        return
    target, first, second = instruction.operands
    pairs = zip(*(_f16(warp.read(name, "u32")) for name in (first, second)), strict=True)
    warp.write(target, _word(*(a.double() * b.double() for a, b in pairs)), doing)


def _permute(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    target, *given = instruction.operands
    low, high, selector = (warp.read(name, "u32") for name in given)
    whole, result = low | high << 32, torch.zeros(LANES, dtype=torch.int64)
    for byte in range(4):
        chosen = selector >> 4 * byte & 7
        result |= (whole >> 8 * chosen & 0xFF) << 8 * byte
    warp.write(target, result, doing)


def _mma(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """m16n8k16 on F16; as that on BF16, whose fragments are the same."""
    if "f16" not in instruction.op:
        _plain_mma(warp, instruction, doing)
        return
    assert bool(doing.all()) and "m16n8k16" in instruction.op, instruction.text
    target, a_words, b_words, c_words = (_names(o) for o in instruction.operands)
    lanes = torch.arange(LANES)
    group, column = lanes // 4, lanes % 4 * 2
    a, b, c = (torch.zeros(shape).double() for shape in ((16, 16), (8, 16), (16, 8)))
    for number, name in enumerate(a_words):
        for half, values in enumerate(_f16(warp.read(name, "u32"))):
            a[group + number % 2 * 8, column + number // 2 * 8 + half] = values.double()
    for number, name in enumerate(b_words):
        for half, values in enumerate(_f16(warp.read(name, "u32"))):
            b[group, column + number * 8 + half] = values.double()
    for number, name in enumerate(c_words):
        c[group + number // 2 * 8, column + number % 2] = warp.read(name, "f32").double()
    result = (c + a @ b.T).float()
    for number, name in enumerate(target):
        warp.write(name, result[group + number // 2 * 8, column + number % 2], doing)


def _load_matrices(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """Four 8 x 8 matrices, transposed: lane 8m + i has the address of row i of matrix m."""
    assert "trans" in instruction.op and "x4" in instruction.op and bool(doing.all())
    addresses = warp.addresses(instruction.operands[1])
    lanes = torch.arange(LANES)
    for matrix, name in enumerate(_names(instruction.operands[0])):
        rows = []
        for row in range(8):
            place = _place(addresses[8 * matrix + row], 16)
            rows.append(torch.tensor(list(warp.cta.shared.raw[place : place + 16])).view(8, 2))
        values = torch.stack(rows)
        values = values[..., 0] | values[..., 1] << 8  # (row, element)
        low, high = values[2 * (lanes % 4), lanes // 4], values[2 * (lanes % 4) + 1, lanes // 4]
        warp.write(name, low | high << 16, doing)


def _nothing(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """Registers of a warpgroup."""


_plain_convert, _plain_multiply, _plain_mma = OPS["cvt"], OPS["mul"], OPS["mma"]
MORE = {
    "mbarrier": _mbarrier,
    "cp": _copy,
    "mapa": _map,
    "barrier": _cluster,
    "vote": _vote,
    "cvt": convert,
    "mul": _multiply,
    "prmt": _permute,
    "xor": _plain(torch.bitwise_xor),
    "mma": _mma,
    "ldmatrix": _load_matrices,
    "setmaxnreg": _nothing,
    "st.async": _store_async,
}
