"""What instructions of PTX do across a warp and across a cluster: votes, atomics, mbarriers.

Stores to a peer land later than they are made, in no order, so that whoever does not wait for
them is found out. See ptx_machine.py.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LANES = 32
PEER_BITS = 24
"""An address in the CTA of rank n of a cluster has n + 1 above these bits."""

Warp = Any  # of ptx_machine.py


@dataclass
class Barrier:
    """An mbarrier: what its phase still waits for, and how many phases are over."""

    arrivals: int
    pending: int
    bytes: int = 0
    phases: int = 0

    def settle(self) -> None:
        """Ends the phase where nothing is missing."""
        if self.pending == 0 and self.bytes == 0:
            self.phases, self.pending = self.phases + 1, self.arrivals


@dataclass
class Mail:
    """Stores on their way to one CTA: where to, the bytes, the barrier that counts them."""

    order: random.Random
    letters: list[tuple[int, bytes, int]] = field(default_factory=list)

    def deliver(self, cta: Any) -> None:
        """Some of them arrive."""
        self.order.shuffle(self.letters)
        for _ in range(self.order.randint(0, len(self.letters))):
            start, data, address = self.letters.pop()
            cta.shared[start : start + len(data)] = data
            barrier = cta.barriers[address]
            barrier.bytes -= len(data)
            barrier.settle()


def _lanes(doing: Tensor) -> list[int]:
    return doing.nonzero().flatten().tolist()


def _ballot(warp: Warp, instruction: Any, doing: Tensor) -> None:
    assert doing.all(), f"a vote that not all lanes come to: {instruction.text}"
    votes = warp.read(instruction.operands[1], "pred").long()
    mask = int((votes << torch.arange(LANES)).sum())
    warp.write(instruction.operands[0], torch.full((LANES,), mask), doing)


def _redux(warp: Warp, instruction: Any, doing: Tensor) -> None:
    assert doing.all() and "add" in instruction.op, instruction.text
    total = int(warp.read(instruction.operands[1], "s32").sum())
    warp.write(instruction.operands[0], torch.full((LANES,), total & 0xFFFF_FFFF), doing)


def _popc(warp: Warp, instruction: Any, doing: Tensor) -> None:
    bits = warp.read(instruction.operands[1], "u32").tolist()
    counts = torch.tensor([value.bit_count() for value in bits])
    warp.write(instruction.operands[0], counts, doing)


def _prmt(warp: Warp, instruction: Any, doing: Tensor) -> None:
    target, low, high, selector = instruction.operands
    both = warp.read(low, "u32") | warp.read(high, "u32") << 32
    result, chosen = torch.zeros(LANES, dtype=torch.int64), int(selector, 0)
    for place in range(4):
        nibble = chosen >> 4 * place & 15
        byte = both >> 8 * (nibble & 7) & 255
        if nibble & 8:
            byte = (byte >> 7) * 255
        result = result | byte << 8 * place
    warp.write(target, result, doing)


def half_towards_zero(value: Tensor) -> Tensor:
    """int64 [n]: bits of FP32 values cut to FP16, infinities only of infinities."""
    half = value.half()
    bits = half.view(torch.int16).long() & 0xFFFF
    further = half.float().abs() > value.abs()
    return torch.where(further, bits - 1, bits)


def convert_halves(warp: Warp, instruction: Any, doing: Tensor) -> None:
    """cvt.rz.f16x2.f32: the second operand goes below."""
    assert instruction.op[1:] == ("rz", "f16x2", "f32"), instruction.text
    target, high, low = instruction.operands
    high, low = (half_towards_zero(warp.read(o, "f32")) for o in (high, low))
    warp.write(target, high << 16 | low, doing)


def _atomic(warp: Warp, instruction: Any, doing: Tensor) -> None:
    """red and atom: lanes one after the other, in an order that nobody may rely on."""
    assert instruction.op[1:] in (("shared", "add", "u32"), ("shared", "or", "b32"))
    sets = instruction.op[2] == "or"
    returns = instruction.op[0] == "atom"
    address, value = instruction.operands[returns:]
    addresses, values = warp.addresses(address), warp.read(value, "u32").tolist()
    before = torch.zeros(LANES, dtype=torch.int64)
    lanes = _lanes(doing)
    warp.cta.mail.order.shuffle(lanes)
    for lane in lanes:
        start = warp.cta.offset(addresses[lane], 4)
        (held,) = struct.unpack_from("<I", warp.cta.shared, start)
        before[lane] = held
        result = held | values[lane] if sets else held + values[lane] & 0xFFFF_FFFF
        struct.pack_into("<I", warp.cta.shared, start, result)
    if returns:
        warp.write(instruction.operands[0], before, doing)


def _mapa(warp: Warp, instruction: Any, doing: Tensor) -> None:
    target, address, rank = instruction.operands
    mapped = warp.read(address, "u32") | warp.read(rank, "u32") + 1 << PEER_BITS
    warp.write(target, mapped, doing)


def _mbarrier(warp: Warp, instruction: Any, doing: Tensor) -> None:
    lanes, barriers = _lanes(doing), warp.cta.barriers
    kind = instruction.op[1]
    if kind == "try_wait":
        predicate, address, parity = instruction.operands
        places, parities = warp.addresses(address), warp.read(parity, "u32").tolist()
        over = [lane in lanes and barriers[places[lane]].phases for lane in range(LANES)]
        done = [phases % 2 != parities[lane] for lane, phases in enumerate(over)]
        warp.write(predicate, torch.tensor(done), doing)
        warp.patient = not all(done[lane] for lane in lanes)
        return
    at = 0 if kind == "init" else 1
    address, count = instruction.operands[at : at + 2]
    places, counts = warp.addresses(address), warp.read(count, "u32").tolist()
    for lane in lanes:
        if kind == "init":
            barriers[places[lane]] = Barrier(counts[lane], counts[lane])
            continue
        assert instruction.op[1:3] == ("arrive", "expect_tx"), instruction.text
        barrier = barriers[places[lane]]
        barrier.bytes, barrier.pending = barrier.bytes + counts[lane], barrier.pending - 1
        assert barrier.pending >= 0, "more arrivals than a phase has"
        barrier.settle()


def store_async(warp: Warp, instruction: Any, doing: Tensor) -> None:
    """st.async: a letter to the peer that the address names."""
    address, words, barrier = instruction.operands
    names = [name.strip() for name in words.strip("{} ").split(",")]
    values = torch.stack([warp.read(name, "b32") for name in names], 1).tolist()
    places, barriers = warp.addresses(address), warp.addresses(barrier)
    inside = (1 << PEER_BITS) - 1
    for lane in _lanes(doing):
        rank = (places[lane] >> PEER_BITS) - 1
        assert barriers[lane] >> PEER_BITS == rank + 1, instruction.text
        peer = warp.cta.cluster[rank]
        assert peer.living, "a store into a CTA that has ended"
        start = peer.offset(places[lane] & inside, 4 * len(names))
        data = struct.pack(f"<{len(names)}I", *values[lane])
        peer.mail.letters.append((start, data, barriers[lane] & inside))


OPS: dict[str, Callable[..., None]] = {
    "vote": _ballot,
    "redux": _redux,
    "popc": _popc,
    "prmt": _prmt,
    "red": _atomic,
    "atom": _atomic,
    "mapa": _mapa,
    "mbarrier": _mbarrier,
}
