"""Runs the PTX of a kernel on the CPU, on host memory, as far as tests of kernels need it.

A warp executes in lockstep what its lanes have in common: those at the least place go first. Warps
of all CTAs of a launch (and of other launches beside it) take turns, so that polls see what others
store. Every global access must lie in memory that the launch was given, aligned to its size.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

import ptx_cluster
import ptx_lanes
import ptx_memory
import ptx_ops
import torch
from ptx_cluster import LANES, Barrier, Mail
from ptx_program import Instruction, Program, bits_of, parse
from torch import Tensor

__all__ = ["Launch", "OutOfMemory", "packed", "parse", "run"]

ALL_LANES = torch.ones(LANES, dtype=torch.bool)
SHARED_BASE, SHARED_BYTES = 1024, 228 * 1024
TURN = 400
"""Instructions that a warp executes before another one is at it."""

_EXECUTE = {**ptx_ops.OPS, **ptx_lanes.OPS, **ptx_memory.OPS, **ptx_cluster.OPS}


class OutOfMemory(AssertionError):
    """An access that lies outside of what the launch was given, or off its alignment."""


def packed(tensors: Sequence[tuple[Tensor, Sequence[int]]]) -> list[bytes]:
    """Kernel parameters: an address and the sizes that are known at the launch only."""
    return [
        int(tensor.data_ptr()).to_bytes(8, "little")
        + b"".join(int(size).to_bytes(4, "little") for size in sizes)
        for tensor, sizes in tensors
    ]


@dataclass
class Launch:
    """A grid of CTAs, `cluster` neighbours of which along x work together; `memory` is all that it
    may touch."""

    program: Program
    grid: tuple[int, int, int]
    parameters: list[bytes]
    memory: Iterable[Tensor]
    cluster: int = 1

    def __post_init__(self) -> None:
        storages = [tensor.untyped_storage() for tensor in self.memory]
        self.ranges = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages})

    def check(self, address: int, size: int, text: str) -> None:
        """Raises OutOfMemory unless the bytes lie in one tensor's storage, aligned."""
        place = bisect_right(self.ranges, (address, 1 << 64)) - 1
        if address % size or place < 0 or address + size > self.ranges[place][1]:
            raise OutOfMemory(f"{text} at 0x{address:X}")


def run(launches: Iterable[Launch], most_turns: int = 20_000) -> None:
    """All launches beside each other, every CTA resident, until the last warp has ended.

    Raises AssertionError where they have not by then: someone waits for ever.
    """
    ctas = []
    for launch in launches:
        sizes = launch.grid
        assert sizes[0] % launch.cluster == 0, "a grid of whole clusters"
        for number in range(sizes[0] * sizes[1] * sizes[2]):
            x, rest = number % sizes[0], number // sizes[0]
            rank = x % launch.cluster
            cluster = [] if rank == 0 else ctas[-1].cluster
            ctas.append(_Cta(launch, (x, rest % sizes[1], rest // sizes[1]), number, cluster))
    for _ in range(most_turns):
        ctas = [cta for cta in ctas if not cta.turn()]
        if not ctas:
            return
    raise AssertionError(f"{len(ctas)} CTAs wait for ever")


class _Cta:
    """Warps that share memory and barriers; `cluster` holds those of lower ranks, and takes it."""

    def __init__(
        self, launch: Launch, place: tuple[int, int, int], number: int, cluster: list[_Cta]
    ) -> None:
        self.launch, self.place = launch, place
        self.cluster = cluster
        cluster.append(self)
        self.barriers: dict[int, Barrier] = {}
        self.mail = Mail(Random(number))
        self.shared = ctypes.create_string_buffer(b"\x7f" * SHARED_BYTES, SHARED_BYTES)
        warps = launch.program.threads // LANES
        self.warps = [_Warp(self, number) for number in range(warps)]

    def turn(self) -> bool:
        """Every warp goes on for a while; True once all have ended.

        Raises AssertionError where the last warp ends ahead of something that is under way to it.
        """
        self.mail.deliver(self.shared)
        for warp in self.warps:
            warp.patient = False
            warp.go_on()
        self._pass_barriers()
        peers = [warp for cta in self.cluster for warp in cta.living]
        for warp in self.living:
            if warp.at_cluster and all(peer.meetings > warp.met for peer in peers):
                warp.at_cluster, warp.met = False, warp.met + 1
        assert self.living or not (self.mail.letters or any(warp.copies for warp in self.warps)), (
            "a CTA ends before what peers have stored arrives, or what it copies"
        )
        return not self.living

    def _pass_barriers(self) -> None:
        """Warps go on from a barrier that as many threads have come to as it is for."""
        living, waiting = self.living, {}
        for warp in living:
            if warp.at_barrier:
                which, threads = warp.at_barrier
                waiting.setdefault(which, {}).setdefault(threads, []).append(warp)
        for which, by_count in waiting.items():
            assert len(by_count) == 1, f"barrier {which} for {sorted(by_count)} threads"
            ((threads, there),) = by_count.items()
            come, expected = len(there) * LANES, threads or len(living) * LANES
            assert come <= expected, f"{come} threads at barrier {which} for {expected}"
            for warp in there if come == expected else ():
                warp.at_barrier = None

    @property
    def living(self) -> list[_Warp]:
        """Warps that have not ended."""
        return [warp for warp in self.warps if not warp.ended]

    def offset(self, address: int, size: int) -> int:
        """Where in `shared` that many bytes lie; AssertionError off their alignment."""
        start = address - SHARED_BASE
        assert start % size == 0 and 0 <= start <= SHARED_BYTES - size, f"shared 0x{address:X}"
        return start


@cache
def _constant(operand: str) -> Tensor:
    """A number of the text in every lane: int64, of FP32 its bits. Nobody writes into it."""
    value = int(operand[2:], 16) if operand[:2] in ("0f", "0F") else int(operand, 0)
    return torch.full((LANES,), value)


class _Warp:
    """`together` is the place of all lanes, -1 where they have gone apart; `places` holds then."""

    def __init__(self, cta: _Cta, number: int) -> None:
        self.cta, self.launch = cta, cta.launch
        self.alive, self.together = ALL_LANES, 0
        self.places = torch.zeros(LANES, dtype=torch.int64)
        self.at_barrier: tuple[int, int] | None = None  # which one, and for how many threads
        self.meetings = self.met = 0  # arrivals at the barrier of the cluster, and waits over
        self.at_cluster = self.patient = False
        self.copies: dict[int, list[tuple[int, bytes]]] = {}  # of a lane, under way
        lanes = torch.arange(LANES)
        self.registers: dict[str, Tensor] = {
            "%laneid": lanes,
            "%tid.x": lanes + number * LANES,
            "%lanemask_lt": (1 << lanes) - 1,
            "__dynamic_shmem__0": torch.full((LANES,), SHARED_BASE),
        }
        for axis, name in enumerate("xyz"):
            for register, sizes in (("%ctaid", cta.place), ("%nctaid", cta.launch.grid)):
                self.registers[f"{register}.{name}"] = torch.full((LANES,), sizes[axis])

    def go_on(self) -> None:
        """Executes until a barrier, the end, or its turn is over."""
        program = self.launch.program
        for _ in range(TURN):
            if self.at_barrier or self.at_cluster or self.patient or self.ended:
                return
            at, here = self._next()
            instruction = program.instructions[at]
            doing = here
            if instruction.guard:
                negated, name = instruction.guard
                doing = here & (self.registers[name] ^ negated)
            op = instruction.op[0]
            if op == "bra":
                self._go(here, doing, at + 1, program.labels[instruction.operands[0]])
                continue
            self._go(here, here, at + 1, at + 1)
            if op in ("ret", "exit"):
                self.alive = self.alive & ~doing
                self._part(at + 1)
            elif op == "bar":
                self._stop(instruction, doing)
            elif op == "trap":
                raise AssertionError(f"a poll of CTA {self.cta.place} has given up")
            else:
                _EXECUTE[op](self, instruction, doing)

    def _stop(self, instruction: Instruction, doing: Tensor) -> None:
        """At a barrier of the CTA. Lanes of a warp are in step where it matters: at the least
        place."""
        if "warp" in instruction.op:
            return
        assert "sync" in instruction.op, instruction.text
        assert doing.equal(self.alive), "a barrier that not all lanes come to"
        which, *threads = (self.read(name, "u32") for name in instruction.operands)
        self.at_barrier = int(which[0]), int(threads[0][0]) if threads else 0

    @property
    def ended(self) -> bool:
        """Whether no lane is left."""
        return self.alive is not ALL_LANES and not bool(self.alive.any())

    def _next(self) -> tuple[int, Tensor]:
        """The least place, and the lanes that are there."""
        if self.together >= 0:
            return self.together, self.alive
        at = int(self.places[self.alive].min())
        return at, self.alive & (self.places == at)

    def _go(self, here: Tensor, jumping: Tensor, behind: int, target: int) -> None:
        """Lanes that jump come to `target`, the others of those here to `behind`."""
        if self.together >= 0:
            jumps = jumping is here or bool(jumping.equal(here))
            if jumps or not bool(jumping.any()):
                self.together = target if jumps else behind
                return
            self._part(behind)
        self.places[here] = behind
        self.places[jumping] = target
        left = self.places[self.alive]
        if bool((left == left[0]).all()):
            self.together = int(left[0])

    def _part(self, at: int) -> None:
        """From here on each lane has its own place."""
        if self.together >= 0:
            self.places = torch.full((LANES,), at)
            self.together = -1

    # -- operands ------------------------------------------------------------------------------

    def read(self, operand: str, kind: str) -> Tensor:
        """An operand of that type, a lane an element: FP32, bool, or int64 of its low bits."""
        if kind == "pred":
            held = self._held(operand.removeprefix("!")).bool()
            return ~held if operand[0] == "!" else held
        held = self._held(operand)
        size = bits_of(kind)
        if size == 64:
            return held
        if kind == "f32":
            return held.view(torch.float32)[::2]  # the lower words
        if kind[0] == "s":
            return held << (64 - size) >> (64 - size)
        return held & ((1 << size) - 1)

    def _held(self, operand: str) -> Tensor:
        """What a register holds, or a constant."""
        held = self.registers.get(operand)
        return _constant(operand) if held is None else held

    def write(self, operand: str, value: Tensor, doing: Tensor) -> None:
        """A register takes the value in the lanes that do something."""
        if operand == "_":
            return
        if value.dtype == torch.float32:
            value = value.contiguous().view(torch.int32).long() & 0xFFFF_FFFF
        held = self.registers.get(operand)
        if doing is not ALL_LANES and held is not None:
            value = torch.where(doing, value, held)
        self.registers[operand] = value

    def addresses(self, operand: str) -> list[int]:
        """The address of `[register+offset]`, a lane an element."""
        base, _, offset = operand.strip("[] ").partition("+")
        return [at + int(offset or 0) for at in self.registers[base].tolist()]
