"""The stand-in for a kernel: it waits, triggers, sleeps, reads and writes as it is told.

    entry   trigger "early" (every CTA) or "some" (the first CTA only)
            the rows of `early`, in order
    wait    where `waits`
            trigger "after_wait"
            the rows of `body`, in order

A row of work is (kind, first word, words, value, slot, 0, 0, 0):

    NOTHING  0
    READ     counts in `seen[slot]` the words that are not `value`; the last words first
    WRITE    stores `value`, with plain stores
    SLEEP    lets every thread wait `value` microseconds, MAX_SLEEP_US at most

Grid     `ctas` CTAs; word i of a row is thread i's, modulo the grid.
Loads    relaxed at GPU scope, so that no old line of L1 answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, Int64, cute
from cutlass.cute.arch import inline_ptx

from kpipe.runtime.device import pdl
from kpipe.runtime.host.compile import Symbol, TensorSpec
from kpipe.runtime.schedules.work import COLUMNS, MAX_SLEEP_US, READ, SLEEP, WRITE

THREADS = 128
NAP_NS = 500
TURNS = MAX_SLEEP_US * 1000 // NAP_NS  # bounds the loop, whatever the clock says


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    return (
        TensorSpec("early", "i32", (Symbol("early_rows"), COLUMNS)),
        TensorSpec("body", "i32", (Symbol("body_rows"), COLUMNS)),
        TensorSpec("words", "i32", (Symbol("words"),)),
        TensorSpec("seen", "i32", (Symbol("slots"),)),
    )


@dataclass(frozen=True)
class StandIn:
    """A kernel of this name with the overlap of the one that it stands for.

    pdl:     launched with the attribute.
    waits:   every thread waits between `early` and `body`.
    trigger: never, early, after_wait, or some.
    """

    name: str
    pdl: bool = False
    waits: bool = False
    trigger: str = "never"
    ctas: int = 1

    @cute.jit
    def __call__(
        self, early: cute.Tensor, body: cute.Tensor, words: cute.Tensor, seen: cute.Tensor, stream
    ):
        self.stand_in.set_name_prefix(self.name)
        self.stand_in(early, body, words, seen).launch(
            grid=[self.ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def stand_in(
        self, early: cute.Tensor, body: cute.Tensor, words: cute.Tensor, seen: cute.Tensor
    ):
        block = cute.arch.block_idx()[0]
        place = block * THREADS + cute.arch.thread_idx()[0]
        if self.trigger == "early":
            pdl.release()
        if self.trigger == "some":  # noqa: SIM102 - decided when compiling, unlike the inner one
            if block == 0:
                pdl.release()
        self._work(early, place, words, seen)
        if self.waits:
            pdl.wait()
        if self.trigger == "after_wait":
            pdl.release()
        self._work(body, place, words, seen)

    @cute.jit
    def _work(self, rows: cute.Tensor, place, words: cute.Tensor, seen: cute.Tensor):
        for row in range(rows.shape[0]):
            kind, first, count, value = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3]
            if kind == SLEEP:
                _sleep(value)
            if kind == WRITE:
                for word in range(place, count, self.ctas * THREADS):
                    words[first + word] = value
            if kind == READ:
                wrong = Int32(0)
                for word in range(place, count, self.ctas * THREADS):
                    found = cute.arch.load(
                        (words.iterator + (first + count - 1 - word)).llvm_ptr,
                        Int32,
                        sem="relaxed",
                        scope="gpu",
                    )
                    if found != value:
                        wrong += 1
                if wrong != 0:
                    cute.arch.atomic_add((seen.iterator + rows[row, 4]).llvm_ptr, wrong)


@cute.jit
def _sleep(microseconds: Int32):
    """Returns after that time, or after TURNS naps."""
    end = cute.arch.globaltimer() + Int64(microseconds) * 1000
    turn = Int32(0)
    while (turn < TURNS) & (cute.arch.globaltimer() < end):
        inline_ptx(f"nanosleep.u32 {NAP_NS};")
        turn += 1
