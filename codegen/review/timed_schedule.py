"""One step's schedule laid out in time: what every picture of it shows, in microseconds.

Start and end of a launch come from the model of `plan/cost.py`; its duration is measured where
times were handed in.  Text, SVG and trace draw this and compute nothing of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from kpipe.codegen.plan.cost import (
    BANDWIDTH,
    CONTEXT,
    FLOOR,
    GAP_FULL,
    GAP_PDL,
    Timed,
    critical,
    timeline,
)
from kpipe.codegen.plan.links import link_of
from kpipe.codegen.plan.model import Launch, PipelinePlan, StepPlan
from kpipe.codegen.plan.wire import ranks_of
from kpipe.codegen.review.captions import Caption, caption_of

if TYPE_CHECKING:
    from kpipe.codegen.review.timings import Measured

LinkKind = Literal["stream", "fork", "join", "words"]
ESTIMATED = "estimated"


class Bar(NamedTuple):
    """One launch in time.

    `early`: it may start while its predecessor in the stream still runs.  `plain` and `held` are
    numbers of notes, 0 for none: why it does not start early, why it does not let its successor.
    `slack` is by how much us it can be late before another launch is.
    """

    name: str
    stage: str
    stream: str
    start: float
    duration: float
    bytes: int
    measured: bool
    critical: bool
    slack: float
    early: bool
    plain: int
    held: int

    @property
    def end(self) -> float:
        """When it is over, us from the start of the layer."""
        return self.start + self.duration

    @property
    def notes(self) -> tuple[int, ...]:
        """Numbers of the notes that speak of it, ascending."""
        return tuple(sorted(filter(None, {self.plain, self.held})))


class Link(NamedTuple):
    """Bar `second` starts behind bar `first`; of kind `words`, behind what that sends alone."""

    first: int
    second: int
    kind: LinkKind
    critical: bool


class TimedSchedule(NamedTuple):
    """A step in time; bars in host order, `streams` main first.

    `notes` are the reasons that bars refer to, from number 1 on.  `label` says in two words where
    the durations come from, `basis` in a sentence or two.
    """

    caption: Caption
    streams: tuple[str, ...]
    bars: tuple[Bar, ...]
    links: tuple[Link, ...]
    notes: tuple[str, ...]
    total: float
    label: str
    basis: str

    @property
    def path(self) -> tuple[Bar, ...]:
        """The launches of the critical path, in order of time."""
        return tuple(sorted((b for b in self.bars if b.critical), key=lambda bar: bar.start))


def timed_schedule(
    plan: PipelinePlan, step: StepPlan, method: str, measured: Measured | None = None
) -> TimedSchedule:
    """The schedule of a step whose overlap is decided; `method` is the name of its launch list."""
    times = dict(measured.launches) if measured else {}
    timed = timeline(plan, step, times)
    on_path = frozenset(critical(timed))
    slack = _slack(timed)
    notes: dict[str, int] = {}
    bars: list[Bar] = []
    last: dict[str, Launch] = {}
    for position, (one, launch) in enumerate(zip(timed, step.launches, strict=True)):
        before = last.get(launch.stream)
        last[launch.stream] = launch
        bars.append(
            Bar(
                one.name,
                launch.stage,
                one.stream,
                one.start,
                one.duration,
                one.bytes,
                one.measured,
                position in on_path,
                slack[position],
                _overlaps(before, launch),
                0 if launch.pdl.attribute else _note(notes, launch, launch.pdl.attribute_reason),
                _note(notes, launch, launch.pdl.release_reason) if is_held(launch) else 0,
            )
        )
    total = max((bar.end for bar in bars), default=0.0)
    label, basis = _basis(bars, measured, _left_out(plan, step))
    return TimedSchedule(
        caption_of(plan, step, method),
        step.streams,
        tuple(bars),
        _links(timed, on_path),
        tuple(notes),
        total,
        label,
        basis,
    )


def is_held(launch: Launch) -> bool:
    """Whether a launch that could let its successor start early does not."""
    return not launch.pdl.release and not launch.contract.release.fixed


def _overlaps(before: Launch | None, launch: Launch) -> bool:
    if before is None or not launch.pdl.attribute:
        return False
    return before.pdl.release or before.contract.release.value == "library"


def _note(notes: dict[str, int], launch: Launch, reason: str) -> int:
    return notes.setdefault(f"{launch.name} {reason}", len(notes) + 1)


def _slack(timed: tuple[Timed, ...]) -> list[float]:
    """How late each launch may be until the layer is: backwards over what starts behind it."""
    end = max((one.end for one in timed), default=0.0)
    latest = [end] * len(timed)
    for position in reversed(range(len(timed))):
        starts = latest[position] - timed[position].duration
        for before, gap in timed[position].behind:
            latest[before] = min(latest[before], starts - gap)
    return [max(0.0, last - one.end) for last, one in zip(latest, timed, strict=True)]


def _links(timed: tuple[Timed, ...], on_path: frozenset[int]) -> tuple[Link, ...]:
    found = []
    for second, one in enumerate(timed):
        first_of_stream = all(
            timed[p].stream != one.stream for p, _ in one.behind if p not in one.words
        )
        binding = max(one.behind, key=lambda at: (timed[at[0]].end + at[1], -at[0]), default=None)
        for first, _ in one.behind:
            kind: LinkKind = "stream"
            if first in one.words:
                kind = "words"
            elif timed[first].stream != one.stream:
                kind = "fork" if first_of_stream else "join"
            hot = {first, second} <= on_path and binding is not None and binding[0] == first
            found.append(Link(first, second, kind, hot))
    return tuple(found)


def _left_out(plan: PipelinePlan, step: StepPlan) -> str:
    """What the model does not know of; where ranks exchange words, how these travel."""
    if ranks_of(plan) < 2 or not plan.mailboxes:
        return "arithmetic, waiting for peers and L2 hits are left out"
    link = link_of(step.arch)
    return (
        f"words of peers take {link.one_way_latency_us:g} us and their bytes at "
        f"{link.peer_store_gb_s:g} GB/s ({link.source}); arithmetic, late ranks and L2 hits are "
        "left out"
    )


def _basis(bars: list[Bar], measured: Measured | None, left_out: str) -> tuple[str, str]:
    model = (
        f"its bytes at {BANDWIDTH / 1e6:.1f} TB/s, shared by what runs side by side, and at least "
        f"{FLOOR:g} us; {GAP_FULL} us between launches, {GAP_PDL} us by PDL; {CONTEXT} tokens a "
        f"request. The figures are those of one H200; {left_out}"
    )
    lacking = [bar.name for bar in bars if not bar.measured]
    if measured is None or len(lacking) == len(bars):
        return ESTIMATED, f"Estimated, not run: a launch takes {model}."
    whole = f" Whole layer, measured: {measured.layer:.1f} us." if measured.layer else ""
    how = (
        f"Measured on {measured.gpu}, {measured.context} tokens a request: each launch alone, in a "
        "chain with itself, its gap included; starts are computed from the schedule."
    )
    if not lacking:
        words = f" Computed: {left_out}." if left_out.startswith("words") else ""
        return f"measured on {measured.gpu}", how + words + whole
    rest = f" Not measured, so estimated ({', '.join(lacking)}): {model}."
    count = f"{len(bars) - len(lacking)} of {len(bars)}"
    return f"{count} launches measured on {measured.gpu}", how + whole + rest
