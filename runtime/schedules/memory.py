"""Where the buffers of a schedule lie, what each launch does there, and what it must find.

Every launch writes a number of its own.  A read must find what the host order of the launches
leaves there; whatever else it finds, it has read too early or too late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kpipe.runtime.schedules.form import Launch, Schedule, Touch
from kpipe.runtime.schedules.work import NOTHING, READ, WRITE, Row, row, sleep

WORDS = 64  # of a buffer whose size the schedule does not give
PAGE = 32  # words from which on a buffer may begin


@dataclass(frozen=True)
class Look:
    """A place where values are compared: a read of a launch, or memory after everything.

    `launch` is a position, or -1 behind the last launch; `early` in front of the launch's wait.
    """

    launch: int
    buffer: str
    early: bool = False


@dataclass(frozen=True)
class Final:
    """Words [first, end) of the arena hold `value` once everything has ended."""

    first: int
    end: int
    value: int
    buffer: str


@dataclass(frozen=True)
class Copying:
    """A memset of `value` at words [first, end), or a memcpy from there into `target`."""

    first: int
    end: int
    value: int = 0
    target: int = -1


@dataclass(frozen=True)
class Layout:
    """Everything that an execution needs to know of the memory.

    `work`: per launch the rows of its early phase and of its body; `copies`: the launches that
    are copies; `looks` names the slots.  Words of `finals` are compared on the host.
    """

    size: int
    work: Mapping[int, tuple[tuple[Row, ...], tuple[Row, ...]]]
    copies: Mapping[int, Copying]
    looks: tuple[Look, ...]
    finals: tuple[Final, ...]


def lay_out(
    schedule: Schedule,
    delays: Mapping[tuple[int, bool], int],
    holds: Mapping[int, int] = MappingProxyType({}),
) -> Layout:
    """The layout; `delays` are microseconds in front of a launch's accesses, by (position, early).

    A launch in `holds` sleeps that long behind its last write and reads back what it wrote, as it
    would in a workspace.  Raises ValueError for a launch that cannot be stood in for: a copy that
    is delayed or has several accesses, a box outside its buffer.
    """
    return _Layout(schedule, delays, holds).made()


class _Layout:
    def __init__(
        self,
        schedule: Schedule,
        delays: Mapping[tuple[int, bool], int],
        holds: Mapping[int, int],
    ) -> None:
        self.schedule = schedule
        self.delays = delays
        self.kept = holds
        self.starts: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.size = PAGE  # words that nobody looks at: copies without an access use them
        for launch in schedule.launches:
            for touch in launch.touches:
                self._place(touch.buffer)
        self.holds: dict[str, list[tuple[int, int, int]]] = {
            name: [(0, size, 0)] for name, size in self.sizes.items()
        }
        self.looks: list[Look] = []
        self.finals: list[Final] = []

    def _place(self, buffer: str) -> None:
        if buffer not in self.starts:
            words = self.schedule.words.get(buffer, WORDS)
            self.starts[buffer], self.sizes[buffer] = self.size, words
            self.size += -(-words // PAGE) * PAGE

    def made(self) -> Layout:
        """All launches in host order."""
        work: dict[int, tuple[tuple[Row, ...], tuple[Row, ...]]] = {}
        copies: dict[int, Copying] = {}
        for position, launch in enumerate(self.schedule.launches):
            if launch.kind == "kernel":
                early = self._phase(position, launch, True)
                body = (*self._phase(position, launch, False), *self._back(position, launch))
                work[position] = early or (row(NOTHING),), body or (row(NOTHING),)
            else:
                copies[position] = self._copy(position, launch)
        for buffer, pieces in self.holds.items():
            start = self.starts[buffer]
            self.finals += [Final(start + a, start + b, value, buffer) for a, b, value in pieces]
        return Layout(self.size, work, copies, tuple(self.looks), tuple(self.finals))

    def _phase(self, position: int, launch: Launch, early: bool) -> tuple[Row, ...]:
        rows: list[Row] = []
        delay = self.delays.get((position, early), 0)
        nap = [sleep(delay)] if delay else []
        touches = [touch for touch in launch.touches if touch.early == early]
        zeros = [touch for touch in touches if touch.zero]
        for touch in zeros:  # a counter: zero at first, then its own, then zero again
            rows += [self._read(position, touch, 0), self._write(touch, position + 1)]
        rows += nap
        for touch in zeros:
            rows += [self._read(position, touch, position + 1), self._write(touch, 0)]
        for touch in touches:
            if not touch.write:
                rows += self._reads(position, touch)
        for touch in touches:
            if touch.write and not touch.zero:
                rows.append(self._write(touch, position + 1))
        return tuple(rows)

    def _back(self, position: int, launch: Launch) -> tuple[Row, ...]:
        written = [touch for touch in launch.touches if touch.write and not touch.zero]
        if position not in self.kept or not written:
            return ()
        back = (self._read(position, touch, position + 1) for touch in written)
        return (sleep(self.kept[position]), *back)

    def _span(self, touch: Touch) -> tuple[int, int]:
        size = self.sizes[touch.buffer]
        first, end = (touch.first, touch.end) if touch.end else (0, size)
        if not 0 <= first < end <= size:
            raise ValueError(f"{touch.buffer} {first}:{end} lies outside its {size} words")
        return first, end

    def _read(self, position: int, touch: Touch, value: int) -> Row:
        first, end = self._span(touch)
        return self._seen(position, touch, first, end, value)

    def _seen(self, position: int, touch: Touch, first: int, end: int, value: int) -> Row:
        look = Look(position, touch.buffer, touch.early)
        if look not in self.looks:
            self.looks.append(look)
        start = self.starts[touch.buffer]
        return row(READ, start + first, end - first, value, self.looks.index(look))

    def _reads(self, position: int, touch: Touch) -> list[Row]:
        first, end = self._span(touch)
        return [
            self._seen(position, touch, max(a, first), min(b, end), value)
            for a, b, value in self.holds[touch.buffer]
            if a < end and first < b
        ]

    def _write(self, touch: Touch, value: int) -> Row:
        first, end = self._span(touch)
        kept: list[tuple[int, int, int]] = []
        for a, b, old in self.holds[touch.buffer]:
            kept += [(a, min(b, first), old)] if a < first else []
            kept += [(max(a, end), b, old)] if b > end else []
        self.holds[touch.buffer] = sorted([*kept, (first, end, value)])
        return row(WRITE, self.starts[touch.buffer] + first, end - first, value)

    def _copy(self, position: int, launch: Launch) -> Copying:
        if any(self.delays.get((position, early), 0) for early in (False, True)):
            raise ValueError(f"{launch.name} is a copy, and a copy cannot be delayed")
        if len(launch.touches) > 1:
            raise ValueError(f"{launch.name} is a copy with {len(launch.touches)} accesses")
        for touch in launch.touches:
            first, end = self._span(touch)
            start = self.starts[touch.buffer]
            if touch.write:
                value = 0 if touch.zero else position + 1
                self._write(touch, value)
                return Copying(start + first, start + end, value)
            target = self.size
            self.size += -(-(end - first) // PAGE) * PAGE
            for a, b, value in self.holds[touch.buffer]:
                if a < end and first < b:
                    low, high = max(a, first) - first, min(b, end) - first
                    final = Final(target + low, target + high, value, f"copy by {launch.name}")
                    self.finals.append(final)
            return Copying(start + first, start + end, target=target)
        if launch.kind == "memcpy":
            return Copying(0, PAGE // 4, target=PAGE // 2)
        return Copying(0, PAGE // 4)


def long_launches(
    schedule: Schedule, names: Sequence[str], microseconds: int
) -> dict[tuple[int, bool], int]:
    """Delays of every launch of these names, in both phases that touch something."""
    return {
        (position, early): microseconds
        for position, launch in enumerate(schedule.launches)
        if launch.name in names
        for early in sorted({touch.early for touch in launch.touches} or {False})
    }
