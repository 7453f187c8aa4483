"""Runs the PTX of a kernel on the CPU, on host memory, as far as the kernels on mailboxes use it.

A warp executes in lockstep what its lanes have in common: those at the least place go first. Warps
of all CTAs of a launch (and of other launches beside it) take turns, so that polls see what others
store. Every global access must lie in memory that the launch was given, aligned to its size.
"""

from __future__ import annotations

import ctypes
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from ptx_async import MORE
from ptx_ops import ALL_LANES, LANES, OPS, SHARED_BASE, SHARED_BYTES, Instruction
from torch import Tensor

TURN = 400
"""Instructions that a warp executes before another one is at it."""

_TOKEN = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_LINE = re.compile(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)")


_EXECUTE = {**OPS, **MORE}


class OutOfMemory(AssertionError):
    """An access that lies outside of what the launch was given, or off its alignment."""


@dataclass
class Program:
    """The instructions of a kernel; `labels` are places among them."""

    threads: int
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(ptx: str) -> Program:
    """The only kernel of `ptx`. Labels of inline assembly hold within its braces."""
    head, _, body = ptx.partition("\n{\n")
    program = Program(int(re.search(r"\.reqntid (\d+)", head)[1]))
    scope, scopes = "", 0
    for line in body.splitlines():
        line = line.partition("//")[0].strip()
        if line in ("{", "}"):
            scopes += line == "{"
            scope = f"@{scopes}" if line == "{" else ""
        elif line.endswith(":"):
            program.labels[line[:-1] + scope] = len(program.instructions)
        for text in line.split(";") if not line.startswith(".") and ";" in line else ():
            if match := _LINE.fullmatch(text.strip()):
                program.instructions.append(_instruction(match, scope))
    return program


def _instruction(match: re.Match, scope: str) -> Instruction:
    negated, predicate, op, rest = match.groups()
    operands = tuple(_TOKEN.findall(rest))
    if op.startswith("bra") and not operands[0].startswith("$"):
        operands = (operands[0] + scope,)
    guard = (bool(negated), predicate) if predicate else None
    return Instruction(tuple(op.split(".")), operands, guard, match[0])


def packed(tensors: Sequence[tuple[Tensor, Sequence[int]]]) -> list[bytes]:
    """Kernel parameters: an address and the sizes that are known at the launch only."""
    return [
        int(tensor.data_ptr()).to_bytes(8, "little")
        + b"".join(int(size).to_bytes(4, "little") for size in sizes)
        for tensor, sizes in tensors
    ]


@dataclass
class Launch:
    """A grid of CTAs, `cluster` neighbours of which work together; `memory` is all that it may
    touch."""

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
        for number in range(sizes[0] * sizes[1] * sizes[2]):
            x, rest = number % sizes[0], number // sizes[0]
            ctas.append(_Cta(launch, (x, rest % sizes[1], rest // sizes[1])))
            if x % launch.cluster == launch.cluster - 1:
                for cta in (peers := ctas[-launch.cluster :]):
                    cta.peers = {rank + 1: peer for rank, peer in enumerate(peers)}
    for _ in range(most_turns):
        ctas = [cta for cta in ctas if not cta.turn()]
        if not ctas:
            return
    raise AssertionError(f"{len(ctas)} CTAs wait for ever")


class _Cta:
    """Warps that share memory and barriers."""

    def __init__(self, launch: Launch, place: tuple[int, int, int], number: int) -> None:
        self.launch, self.place = launch, place
        self.peers: dict[int, _Cta] = {}  # by rank and one, as addresses have it
        self.barriers: dict = {}
        self.cluster_arrived = 0
        self.shared = ctypes.create_string_buffer(b"\x7f" * SHARED_BYTES, SHARED_BYTES)
        warps = launch.program.threads // LANES
        self.warps = [_Warp(self, number) for number in range(warps)]

    def turn(self) -> bool:
        """Every warp goes on for a while; True once all have ended."""
        self.mail.deliver(self)
        for warp in self.warps:
            warp.patient = False
            warp.go_on()
        living = [warp for warp in self.warps if not warp.ended]
        waiting: dict[tuple[int, int], list[_Warp]] = {}
        for warp in living:
            if warp.at_barrier:
                waiting.setdefault(warp.at_barrier, []).append(warp)
            warp.at_cluster = warp.at_cluster and not self._cluster_met
        for (_, threads), there in waiting.items():
            if len(there) * LANES == threads or (not threads and len(there) == len(living)):
                for warp in there:
                    warp.at_barrier = None
        return not living

    @property
    def _cluster_met(self) -> bool:
        """Whether every thread of the cluster has arrived at its barrier."""
        everybody = len(self.peers) * self.launch.program.threads
        return sum(peer.cluster_arrived for peer in self.peers.values()) == everybody


class _Warp:
    """`together` is the place of all lanes, -1 where they have gone apart; `places` holds then."""

    def __init__(self, cta: _Cta, number: int) -> None:
        self.cta, self.launch = cta, cta.launch
        self.alive, self.together = ALL_LANES, 0
        self.places = torch.zeros(LANES, dtype=torch.int64)
        self.at_barrier: tuple[int, int] | None = None  # which one, and for how many threads
        self.at_cluster = self.rests = False
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
            if self.at_barrier or self.at_cluster or self.rests or self.ended:
                self.rests = False
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
            elif op == "bar" and "warp" in instruction.op:
                continue  # lanes are in step where it matters: at the least place
            elif op == "bar":
                assert doing.equal(self.alive), "a barrier that not all lanes come to"
                which, *threads = (self.read(name, "u32") for name in instruction.operands)
                self.at_barrier = int(which[0]), int(threads[0][0]) if threads else 0
            elif op == "trap":
                raise AssertionError(f"a poll of CTA {self.cta.place} has given up")
            elif op not in ("griddepcontrol", "fence"):
                name = "st.async" if op == "st" and "async" in instruction.op else op
                _EXECUTE[name](self, instruction, doing)

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
        size = 1 if kind == "pred" else int(kind.lstrip("bfsu"))
        negated, operand = operand.startswith("!"), operand.removeprefix("!")
        if operand in self.registers:
            held = self.registers[operand]
        else:
            value = int(operand[2:], 16) if operand[:2] in ("0f", "0F") else int(operand, 0)
            held = torch.full((LANES,), value)
        if kind == "pred":
            return ~held.bool() if negated else held.bool()
        if size == 64:
            return held
        signed = held << (64 - size) >> (64 - size)
        if kind == "f32":
            return signed.int().view(torch.float32)
        return signed if kind[0] == "s" else held & ((1 << size) - 1)

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
