"""The figures of a plan whose ranks exchange words: bytes, launches, and a predicted time.

The prediction is that of `cost.py`: its timeline once as the ranks run it, and once with words
that are always there; the difference is what the layer waits for the link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kpipe.codegen.plan.cost import BANDWIDTH, CONTEXT, FLOOR, critical, timeline, total
from kpipe.codegen.plan.links import AT_ONCE, Link, link_of
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.plan.wire import Alternative, Count, Post, alternatives, count, posts, ranks_of

ROWS = (1, 4, 16, 64)
"""Token rows that are shown, as far as the spec declares them."""


@dataclass(frozen=True)
class Durations:
    """Measured durations of a step's launches in us by name, and the GPU they are from."""

    launches: Mapping[str, float] = field(default_factory=dict)
    gpu: str = ""


@dataclass(frozen=True)
class Prediction:
    """One layer in us: as its ranks run it, and with words that are always there.

    `measured` of `launches` durations are measured, on `gpu`; `path` are the launches that decide
    the time, in order.
    """

    layer: float
    words_there: float
    path: tuple[str, ...]
    measured: int
    launches: int
    gpu: str

    @property
    def waiting(self) -> float:
        """Us that the layer takes longer because words travel."""
        return self.layer - self.words_there


@dataclass(frozen=True)
class StepWire:
    """What one step sends, launches and is predicted to take."""

    step: StepPlan
    posts: tuple[Post, ...]
    count: Count
    prediction: Prediction

    @property
    def sent(self) -> int:
        """Bytes that a rank sends to all its peers in one layer, and that it receives."""
        return sum(post.sent for post in self.posts) * self.step.rows


@dataclass(frozen=True)
class WireReport:
    """Steps of one architecture and query length, fewest rows first; `assumptions` has a line for
    everything that the prediction takes for granted."""

    arch: str
    q: int
    ranks: int
    link: Link
    steps: tuple[StepWire, ...]
    alternatives: tuple[Alternative, ...]
    assumptions: tuple[str, ...]


def wire_report(
    plan: PipelinePlan,
    rows: int | None = None,
    q: int | None = None,
    arch: str | None = None,
    link: Link | None = None,
    durations: Callable[[StepPlan], Durations] = lambda step: Durations(),
) -> WireReport | None:
    """The figures of the selected steps, all of them declared; None where nothing is exchanged.

    Without a selection: the first target and query length, at ROWS.  `link` replaces that of the
    architecture, `durations` says what was measured of a step.
    """
    if ranks_of(plan) < 2 or not plan.mailboxes:
        return None
    arch = arch or plan.targets[0]
    q = q or plan.rows[0][0]
    link = link or link_of(arch)
    shown = _shown(plan, rows, q, arch)
    steps = tuple(_step_wire(plan, step, link, durations(step)) for step in shown)
    last = steps[-1].posts if steps else ()
    other = alternatives(plan, last)
    return WireReport(arch, q, ranks_of(plan), link, steps, other, _assumptions(link, steps))


def _shown(plan: PipelinePlan, rows: int | None, q: int, arch: str) -> tuple[StepPlan, ...]:
    here = sorted((s for s in plan.plans if (s.arch, s.q) == (arch, q)), key=lambda s: s.rows)
    if rows is not None:
        return tuple(step for step in here if step.rows == rows)
    usual = tuple(step for step in here if step.rows in ROWS)
    return usual or tuple(dict.fromkeys((*here[:1], *here[-1:])))


def _step_wire(plan: PipelinePlan, step: StepPlan, link: Link, known: Durations) -> StepWire:
    own = {launch.name for launch in step.launches}
    times = {name: us for name, us in known.launches.items() if name in own}
    there = timeline(plan, step, times, AT_ONCE)
    timed = timeline(plan, step, times, link)
    prediction = Prediction(
        total(timed),
        total(there),
        tuple(timed[position].name for position in critical(timed)),
        sum(one.measured for one in timed),
        len(timed),
        known.gpu if times else "",
    )
    return StepWire(step, posts(plan, step), count(plan, step), prediction)


def _assumptions(link: Link, steps: tuple[StepWire, ...]) -> tuple[str, ...]:
    measured = any(one.prediction.measured for one in steps)
    estimated = any(one.prediction.measured < one.prediction.launches for one in steps)
    lines = [
        f"link ({link.source}): {link.name}, {link.peer_store_gb_s:g} GB/s of peer stores a rank, "
        f"{link.one_way_latency_us:g} us from store to poll",
        "words leave when their sender ends, all at once; transfers at the same time do not slow "
        "each other down",
        "all ranks start at the same time and do the same; none is late, and the host keeps up",
    ]
    if measured:
        lines.append(
            "measured durations: a launch alone on one GPU, its gap included, its words there; no "
            "NVLink in them"
        )
    if estimated:
        lines.append(
            f"estimated durations: bytes at {BANDWIDTH / 1e6:.1f} TB/s, at least {FLOOR:g} us, "
            f"{CONTEXT} tokens a request over all ranks; no arithmetic"
        )
    return tuple(lines)
