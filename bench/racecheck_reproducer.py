"""Minimal hand-overs between two warps, each of which compute-sanitizer can be asked about.

    compute-sanitizer --tool racecheck python bench/racecheck_reproducer.py --case a

Every kernel is one CTA of a few warps; what one warp puts into shared memory another reads (each
lane what another lane has put there) and stores. All but `f` are correct, and are checked. What
racecheck reports on them tells which hand-overs the tool can follow; what it says of `f` tells
whether it looks at all. `--case all` runs each in turn, `--list` names them. Exit code 1 where a
correct one gives a wrong result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import barrier, bulk, copy_async, memory, reduce
from kpipe.runtime.host.compile import TensorSpec, compile_kernel

WORDS = 4  # of a lane: 16 bytes
GROUP = reduce.WARP * WORDS  # words of a hand-over
GROUPS = 8
SLOTS = 2
BARRIERS = 8
GROUP_BYTES = GROUP * 4
WRITER, READER, RELAY = 0, 1, 2
THREADS = 3 * reduce.WARP


@dataclass(frozen=True)
class HandOver:
    """result[group, lane + 1] = source[group, lane], 16 bytes a lane, by way of shared memory."""

    @cute.jit
    def __call__(self, source: cute.Tensor, result: cute.Tensor, stream):
        self.hand_over(source, result).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    def _shared(self) -> tuple[cute.Tensor, cute.Pointer]:
        """(slot, word) and BARRIERS barriers; all of a CTA's threads call it."""
        shared = SmemAllocator()
        slots = memory.allocate(shared, Int32, SLOTS, GROUP, align=128)
        return slots, barrier.allocate(shared, BARRIERS)

    def _fetch(self, source: cute.Tensor, group, slot: cute.Tensor):
        """Requests this lane's words of a group."""
        lane = cute.arch.lane_idx()
        here = memory.vector_at(slot, lane, WORDS)
        copy_async.copy(memory.vector_at(source[group, None], lane, WORDS), here)

    def _fetch_whole(self, source: cute.Tensor, group, slot: cute.Tensor, counter: cute.Pointer):
        """Announces and requests a whole group; one thread calls it."""
        barrier.expect(counter, GROUP_BYTES)
        bulk.copy_run(source[group, None], slot, counter)

    def _put(self, source: cute.Tensor, group, slot: cute.Tensor):
        """Stores this lane's words of a group."""
        lane = cute.arch.lane_idx()
        memory.vector_at(slot, lane, WORDS).store(
            memory.vector_at(source[group, None], lane, WORDS).load()
        )

    def _take(self, slot: cute.Tensor, result: cute.Tensor, group):
        """Stores what the neighbouring lane's words are."""
        lane = cute.arch.lane_idx()
        words = memory.vector_at(slot, lane, WORDS).load()
        memory.vector_at(result[group, None], (lane + 1) % reduce.WARP, WORDS).store(words)


@dataclass(frozen=True)
class CopyOnce(HandOver):
    """cp.async of every lane, cp.async.mbarrier.arrive.noinc; the reader waits."""

    @cute.kernel
    def hand_over(self, source: cute.Tensor, result: cute.Tensor):
        slots, counters = self._shared()
        if cute.arch.thread_idx()[0] == 0:
            barrier.make_ready(counters, 1, reduce.WARP)
            barrier.fence_ready()
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == WRITER:
            self._fetch(source, 0, slots[0, None])
            copy_async.arrive_when_done(counters)
        elif cute.arch.warp_idx() == READER:
            barrier.wait(counters, 0)
            self._take(slots[0, None], result, 0)


@dataclass(frozen=True)
class CopyRing(HandOver):
    """`a` in a loop: the reader gives a slot back by sync_warp and an arrival of lane 0."""

    @cute.kernel
    def hand_over(self, source: cute.Tensor, result: cute.Tensor):
        slots, full = self._shared()
        free = full + SLOTS
        if cute.arch.thread_idx()[0] == 0:
            barrier.make_ready(full, SLOTS, reduce.WARP)
            barrier.make_ready(free, SLOTS, 1)
            barrier.fence_ready()
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == WRITER:
            for group in cutlass.range(GROUPS, unroll=1):
                slot = group % SLOTS
                if group >= SLOTS:
                    barrier.wait(free + slot, (group // SLOTS - 1) % 2)
                self._fetch(source, group, slots[slot, None])
                copy_async.arrive_when_done(full + slot)
        elif cute.arch.warp_idx() == READER:
            for group in cutlass.range(GROUPS, unroll=1):
                slot = group % SLOTS
                barrier.wait(full + slot, group // SLOTS % 2)
                self._take(slots[slot, None], result, group)
                barrier.arrive_as_warp(free + slot)


@dataclass(frozen=True)
class BulkOnce(HandOver):
    """One cp.async.bulk from a raw address that completes on the barrier; the reader waits."""

    @cute.kernel
    def hand_over(self, source: cute.Tensor, result: cute.Tensor):
        slots, counters = self._shared()
        if cute.arch.thread_idx()[0] == 0:
            barrier.make_ready(counters, 1, 1)
            barrier.fence_ready()
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == WRITER:
            if cute.arch.lane_idx() == 0:
                self._fetch_whole(source, 0, slots[0, None], counters)
        elif cute.arch.warp_idx() == READER:
            barrier.wait(counters, 0)
            self._take(slots[0, None], result, 0)


@dataclass(frozen=True)
class StoresOneArrival(HandOver):
    """Plain stores of all lanes, sync_warp, an arrival of lane 0; the reader waits."""

    @cute.kernel
    def hand_over(self, source: cute.Tensor, result: cute.Tensor):
        slots, counters = self._shared()
        if cute.arch.thread_idx()[0] == 0:
            barrier.make_ready(counters, 1, 1)
            barrier.fence_ready()
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == WRITER:
            self._put(source, 0, slots[0, None])
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                barrier.arrive(counters)
        elif cute.arch.warp_idx() == READER:
            barrier.wait(counters, 0)
            self._take(slots[0, None], result, 0)


@dataclass(frozen=True)
class StoresAllArrive(HandOver):
    """`d`, but every lane arrives behind its own stores."""

    @cute.kernel
    def hand_over(self, source: cute.Tensor, result: cute.Tensor):
        slots, counters = self._shared()
        if cute.arch.thread_idx()[0] == 0:
            barrier.make_ready(counters, 1, reduce.WARP)
            barrier.fence_ready()
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == WRITER:
            self._put(source, 0, slots[0, None])
            barrier.arrive(counters)
        elif cute.arch.warp_idx() == READER:
            barrier.wait(counters, 0)
            self._take(slots[0, None], result, 0)


@dataclass(frozen=True)
class NoWait(HandOver):
    """Wrong on purpose: `e` whose reader does not wait."""

    @cute.kernel
    def hand_over(self, source: cute.Tensor, result: cute.Tensor):
        slots, counters = self._shared()
        if cute.arch.thread_idx()[0] == 0:
            barrier.make_ready(counters, 1, reduce.WARP)
            barrier.fence_ready()
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == WRITER:
            self._put(source, 0, slots[0, None])
            barrier.arrive(counters)
        elif cute.arch.warp_idx() == READER:
            self._take(slots[0, None], result, 0)


@dataclass(frozen=True)
class LanesInitialise(HandOver):
    """`e`, but each of BARRIERS barriers is initialised by a thread of its own."""

    @cute.kernel
    def hand_over(self, source: cute.Tensor, result: cute.Tensor):
        slots, counters = self._shared()
        thread = cute.arch.thread_idx()[0]
        if thread < BARRIERS:
            cute.arch.mbarrier_init(counters + thread, reduce.WARP)
            barrier.fence_ready()
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == WRITER:
            self._put(source, 0, slots[0, None])
            barrier.arrive(counters)
        elif cute.arch.warp_idx() == READER:
            barrier.wait(counters, 0)
            self._take(slots[0, None], result, 0)


@dataclass(frozen=True)
class InitialiseAndRequest(HandOver):
    """`c`, but one thread initialises, announces and requests ahead of the CTA's barrier."""

    @cute.kernel
    def hand_over(self, source: cute.Tensor, result: cute.Tensor):
        slots, counters = self._shared()
        if cute.arch.thread_idx()[0] == 0:
            barrier.make_ready(counters, 1, 1)
            barrier.fence_ready()
            self._fetch_whole(source, 0, slots[0, None], counters)
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == READER:
            barrier.wait(counters, 0)
            self._take(slots[0, None], result, 0)


@dataclass(frozen=True)
class BulkRing(HandOver):
    """`c` in a loop: the reader gives a slot back by sync_warp and an arrival of lane 0."""

    @cute.kernel
    def hand_over(self, source: cute.Tensor, result: cute.Tensor):
        slots, full = self._shared()
        free = full + SLOTS
        if cute.arch.thread_idx()[0] == 0:
            barrier.make_ready(full, SLOTS, 1)
            barrier.make_ready(free, SLOTS, 1)
            barrier.fence_ready()
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == WRITER:
            for group in cutlass.range(GROUPS, unroll=1):
                slot = group % SLOTS
                if group >= SLOTS:
                    barrier.wait(free + slot, (group // SLOTS - 1) % 2)
                if cute.arch.lane_idx() == 0:
                    self._fetch_whole(source, group, slots[slot, None], full + slot)
        elif cute.arch.warp_idx() == READER:
            for group in cutlass.range(GROUPS, unroll=1):
                slot = group % SLOTS
                barrier.wait(full + slot, group // SLOTS % 2)
                self._take(slots[slot, None], result, group)
                barrier.arrive_as_warp(free + slot)


@dataclass(frozen=True)
class Relayed(HandOver):
    """`a` by way of a third warp, which waits, and arrives for the reader as in `d`."""

    @cute.kernel
    def hand_over(self, source: cute.Tensor, result: cute.Tensor):
        slots, ready = self._shared()
        scored = ready + 1
        if cute.arch.thread_idx()[0] == 0:
            barrier.make_ready(ready, 1, reduce.WARP)
            barrier.make_ready(scored, 1, 1)
            barrier.fence_ready()
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == WRITER:
            self._fetch(source, 0, slots[0, None])
            copy_async.arrive_when_done(ready)
        elif cute.arch.warp_idx() == RELAY:
            barrier.wait(ready, 0)
            barrier.arrive_as_warp(scored)
        else:
            barrier.wait(scored, 0)
            self._take(slots[0, None], result, 0)


CASES = {
    "a": CopyOnce,
    "b": CopyRing,
    "c": BulkOnce,
    "d": StoresOneArrival,
    "e": StoresAllArrive,
    "f": NoWait,
    "g": LanesInitialise,
    "h": InitialiseAndRequest,
    "i": BulkRing,
    "j": Relayed,
}
WRONG = ("f",)
LOOPS = ("b", "i")


def operands() -> tuple[TensorSpec, ...]:
    """The arguments of every kernel here."""
    return tuple(TensorSpec(name, "i32", (GROUPS, GROUP)) for name in ("source", "result"))


def compiled(case: str, arch: str) -> Callable[..., None]:
    """The kernel of a case; needs no GPU."""
    return compile_kernel(CASES[case](), operands(), arch)


def right(case: str) -> bool:
    """Runs a case on this machine's GPU: whether the result is what it must be."""
    import torch  # the kernels compile without it

    from kpipe.runtime.host.launch import arch_of

    source = torch.randint(2**31 - 1, (GROUPS, GROUP), dtype=torch.int32, device="cuda")
    result = torch.full_like(source, -1)
    compiled(case, arch_of(source.device))(source, result)
    torch.cuda.synchronize()
    expected = torch.full_like(source, -1)
    handed = GROUPS if case in LOOPS else 1
    expected[:handed] = source[:handed].roll(WORDS, dims=1)
    return case in WRONG or bool((result == expected).all())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="all", choices=[*CASES, "all"])
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{case}  {made.__doc__}" for case, made in CASES.items()))
        return 0
    verdicts = {case: right(case) for case in CASES if options.case in (case, "all")}
    for case, good in verdicts.items():
        print(case, "ok" if good else "WRONG")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
