"""What CTAs of a cluster do for each other in PTX: mbarriers, stores to a peer, the meeting of all.

What is under way lands later than it is made, in no order, so that whoever does not wait for it is
found out: stores and arrivals at a peer, and copies from global memory. See ptx_machine.py.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from ptx_program import Instruction, names_of
from torch import Tensor

LANES = 32
RUN_BYTES = 16
PEER_BITS = 24
"""An address in the CTA of rank n of a cluster has n + 1 above these bits."""
_INSIDE = (1 << PEER_BITS) - 1

Warp = Any  # of ptx_machine.py
Cta = Any


@dataclass
class Barrier:
    """An mbarrier: what its phase still waits for, and how many phases are over."""

    arrivals: int
    pending: int
    bytes: int = 0
    phases: int = 0

    def count(self, arrivals: int, announced: int = 0, landed: int = 0) -> None:
        """Takes arrivals, and bytes announced or landed; ends the phase where nothing is missing.

        Raises AssertionError for more arrivals than a phase has.
        """
        self.pending -= arrivals
        self.bytes += announced - landed
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == 0 and self.bytes == 0:
            self.phases, self.pending = self.phases + 1, self.arrivals


@dataclass(frozen=True)
class Letter:
    """Bytes that come to places of a CTA's memory, and what a barrier there hears of them."""

    parts: tuple[tuple[int, bytes], ...]
    barrier: Barrier
    arrivals: int = 0
    landed: int = 0


@dataclass
class Mail:
    """Letters on their way to one CTA."""

    order: random.Random
    letters: list[Letter] = field(default_factory=list)

    def deliver(self, shared: Any) -> None:
        """Some of them arrive in that memory."""
        self.order.shuffle(self.letters)
        for _ in range(self.order.randint(0, len(self.letters))):
            letter = self.letters.pop()
            for start, data in letter.parts:
                shared[start : start + len(data)] = data
            letter.barrier.count(letter.arrivals, landed=letter.landed)


def lanes_of(doing: Tensor) -> list[int]:
    """The lanes that do something."""
    return doing.nonzero().flatten().tolist()


def cta_at(warp: Warp, address: int) -> Cta:
    """Whose shared memory that is; AssertionError for a peer that has ended."""
    rank = address >> PEER_BITS
    if rank == 0:
        return warp.cta
    cta = warp.cta.cluster[rank - 1]
    assert cta.living, "an access to a CTA that has ended"
    return cta


def _barrier_at(warp: Warp, address: int) -> Barrier:
    return cta_at(warp, address).barriers[address & _INSIDE]


# -- mbarriers -----------------------------------------------------------------------------------


def _mbarrier(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    kinds = {"init": _init, "try_wait": _try_wait, "arrive": _arrive}
    kinds[instruction.op[1]](warp, instruction, doing)


def _init(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    address, count = instruction.operands
    places, counts = warp.addresses(address), warp.read(count, "u32").tolist()
    for lane in lanes_of(doing):
        assert places[lane] not in warp.cta.barriers, "a barrier is initialised twice"
        warp.cta.barriers[places[lane]] = Barrier(counts[lane], counts[lane])


def _try_wait(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    predicate, address, parity = instruction.operands[:3]  # and for how long it may be suspended
    places, parities = warp.addresses(address), warp.read(parity, "u32").tolist()
    over = torch.zeros(LANES, dtype=torch.bool)
    for lane in lanes_of(doing):
        over[lane] = _barrier_at(warp, places[lane]).phases % 2 != parities[lane]
    warp.write(predicate, over, doing)
    warp.patient = not bool(over[doing].all())


def _arrive(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """One arrival that announces bytes, or as many as the operand says. At a peer it is mail."""
    _, address, *amount = instruction.operands
    announces = "expect_tx" in instruction.op
    places = warp.addresses(address)
    amounts = warp.read(amount[0], "u32").tolist() if amount else [1] * LANES
    for lane in lanes_of(doing):
        barrier, cta = _barrier_at(warp, places[lane]), cta_at(warp, places[lane])
        if cta is not warp.cta:
            assert not announces, instruction.text
            cta.mail.letters.append(Letter((), barrier, amounts[lane]))
        elif announces:
            barrier.count(1, announced=amounts[lane])
        else:
            barrier.count(amounts[lane])


def arrive_behind_copies(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """cp.async.mbarrier.arrive: one arrival a lane, once the copies that it has made are over."""
    assert instruction.op[3:5] == ("arrive", "noinc"), instruction.text
    places = warp.addresses(instruction.operands[0])
    for lane in lanes_of(doing):
        parts = tuple(warp.copies.pop(lane, ()))
        barrier = warp.cta.barriers[places[lane]]
        warp.cta.mail.letters.append(Letter(parts, barrier, arrivals=1))


def copy_run(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """cp.async.bulk: a letter with a whole run of device memory, whose bytes a barrier counts."""
    assert instruction.op[3:5] == ("shared::cluster", "global"), instruction.text
    target, source, size, barrier = instruction.operands[:4]  # and how long L2 keeps it
    targets, sources, barriers = (warp.addresses(name) for name in (target, source, barrier))
    sizes = warp.read(size, "u32").tolist()
    for lane in lanes_of(doing):
        count = sizes[lane]
        assert count % RUN_BYTES == 0, instruction.text
        for place in range(0, count, RUN_BYTES):
            warp.launch.check(sources[lane] + place, RUN_BYTES, instruction.text)
        start = warp.cta.offset(targets[lane], RUN_BYTES)
        part = start, ctypes.string_at(sources[lane], count)
        heard = warp.cta.barriers[barriers[lane]]
        warp.cta.mail.letters.append(Letter((part,), heard, landed=count))


# -- peers ---------------------------------------------------------------------------------------


def store_async(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """st.async: a letter to the peer that the address names, whose barrier counts the bytes."""
    address, words, barrier = instruction.operands
    values = [warp.read(name, "b32").tolist() for name in names_of(words)]
    places, barriers = warp.addresses(address), warp.addresses(barrier)
    for lane in lanes_of(doing):
        assert places[lane] >> PEER_BITS == barriers[lane] >> PEER_BITS, instruction.text
        peer = cta_at(warp, places[lane])
        data = b"".join(word[lane].to_bytes(4, "little") for word in values)
        part = peer.offset(places[lane] & _INSIDE, len(data)), data
        letter = Letter((part,), _barrier_at(warp, barriers[lane]), landed=len(data))
        peer.mail.letters.append(letter)


def _mapa(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    target, address, rank = instruction.operands
    mapped = warp.read(address, "u32") | warp.read(rank, "u32") + 1 << PEER_BITS
    warp.write(target, mapped, doing)


def _meet(warp: Warp, instruction: Instruction, doing: Tensor) -> None:
    """barrier.cluster: a warp arrives as a whole, and waits for all others to have done so."""
    assert "cluster" in instruction.op and doing.equal(warp.alive), instruction.text
    if "arrive" in instruction.op:
        assert warp.meetings == warp.met, "arrives twice at the barrier of its cluster"
        warp.meetings += 1
    else:
        assert warp.meetings == warp.met + 1, "waits for its cluster without an arrival"
        warp.at_cluster = True


OPS: dict[str, Callable[..., None]] = {"mapa": _mapa, "mbarrier": _mbarrier, "barrier": _meet}
