"""A prediction of one layer's time: when each launch of a step starts, and how long it takes.

It ranks repairs and draws pictures; it proves nothing.  A launch takes as long as its bytes need
at the bandwidth that it gets, and never less than a floor; launches that run side by side share
the bandwidth.  It starts behind its predecessors in the stream and behind what it joins, each plus
the gap of that kind of edge.

Ranks that exchange words do the same at the same time.  A mailbox's words leave when their sender
ends, all at once: whoever polls for them starts behind that by their journey over the link, and a
launch that exchanges words with its like takes that much longer.  So transfers overlap with other
launches and never with their own sender, and two at once do not slow each other down.

Figures, all of one H200: a plain read of 4 GiB runs at 4.31 TB/s; an empty dependent kernel costs
1.1 us in a graph; launched by PDL the shipped kernels save 0.5 us and more of that
(docs/numbers.md, "Kernels on the H200", chained against plain).  The floor is what a small kernel
needs, 2 us.

Left out: ranks that are late, L2 hits and weights requested ahead of a wait,
arithmetic, workspaces whose size only a kernel knows, host time.  Bytes that depend on the context
are those of `CONTEXT` tokens a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from types import MappingProxyType

from kpipe.codegen.ops.contract import Access, Kind
from kpipe.codegen.plan.links import Link, link_of
from kpipe.codegen.plan.memory import DTYPE_BYTES
from kpipe.codegen.plan.model import Binding, Fork, Launch, PipelinePlan, StepPlan
from kpipe.codegen.plan.wire import posts
from kpipe.codegen.spec.expressions import evaluate, parse

BANDWIDTH = 4.3e6  # bytes per us
FLOOR = 2.0  # us per kernel
GAP_FULL = 1.1  # us from the end of a kernel to the start of one that waits for all of it
GAP_PDL = 0.6  # us where the second is launched programmatically
CONTEXT = 32768  # tokens of a request, over all ranks
SAVED = 4  # saved blocks of AttnRes: half of what a layer may have
_PAGE = 64


@dataclass(frozen=True)
class Timed:
    """One launch: start and duration in us from the start of the layer, bytes moved to and from
    memory; `behind` are the positions of the launches that it starts behind, each with the gap in
    us; `words` are those of them that it is behind for their words alone; `measured` is True where
    the duration was given and not predicted."""

    name: str
    stream: str
    start: float
    duration: float
    bytes: int
    behind: tuple[tuple[int, float], ...] = ()
    words: tuple[int, ...] = ()
    measured: bool = False

    @property
    def end(self) -> float:
        """When it is over, us from the start of the layer."""
        return self.start + self.duration


@dataclass
class _Running:
    """A launch in the simulation; `behind` holds earlier launches and the gap behind each.

    `shortest` is the time that it takes whatever its bytes need, `journey` what comes on top: that
    of words which it waits for once it has sent its own.
    """

    launch: Launch
    bytes: int
    shortest: float = FLOOR
    measured: bool = False
    journey: float = 0.0
    behind: dict[int, float] = field(default_factory=dict)
    words: tuple[int, ...] = ()
    start: float = -1.0
    end: float = -1.0
    left: float = 0.0


def timeline(
    pipeline: PipelinePlan,
    step: StepPlan,
    measured: Mapping[str, float] = MappingProxyType({}),
    link: Link | None = None,
) -> tuple[Timed, ...]:
    """Every launch of one layer of the step, in host order; overlap as the plan has it.

    `measured` gives durations in us by launch name.  Such a launch was timed in a chain, with the
    gap ahead of it and its words there: it takes that time, shares no bandwidth and has no gap of
    its own.  Words travel over `link`, without one over that of the step's architecture.
    """
    names, dtypes = _sizes(pipeline, step), _dtypes(pipeline)
    found = []
    for launch in step.launches:
        run = _Running(launch, _moved(pipeline, launch, names, dtypes))
        if launch.name in measured:
            run.shortest, run.measured = measured[launch.name], True
        found.append(run)
    _connect(step, found)
    _post(pipeline, step, found, link or link_of(step.arch))
    _simulate(found)
    return tuple(
        Timed(
            run.launch.name,
            run.launch.stream,
            run.start,
            run.end - run.start,
            run.bytes,
            tuple(run.behind.items()),
            run.words,
            run.measured,
        )
        for run in found
    )


def layer_time(pipeline: PipelinePlan, step: StepPlan) -> float:
    """Predicted time of one layer in us: from its first start to its last end."""
    return total(timeline(pipeline, step))


def total(timed: Sequence[Timed]) -> float:
    """Us from the first start to the last end."""
    return max((one.end for one in timed), default=0.0)


def critical(timed: Sequence[Timed]) -> tuple[int, ...]:
    """Positions of the launches that decide when the last one ends, in order.

    It goes back from the last to end, each time to what the launch waited for longest.
    """
    at = max(range(len(timed)), key=lambda position: (timed[position].end, -position), default=None)
    chain: list[int] = []
    while at is not None:
        chain.append(at)
        behind = dict(timed[at].behind)
        at = max(
            behind,
            key=lambda position: (timed[position].end + behind[position], -position),
            default=None,
        )
    return tuple(reversed(chain))


def critical_path(pipeline: PipelinePlan, step: StepPlan) -> tuple[str, ...]:
    """Launches that decide the predicted time of one layer, in order."""
    timed = timeline(pipeline, step)
    return tuple(timed[position].name for position in critical(timed))


def moved(pipeline: PipelinePlan, step: StepPlan, launch: Launch) -> int:
    """Bytes that a launch moves: of every operand what it touches, once; what it polls and re-arms
    twice."""
    return _moved(pipeline, launch, _sizes(pipeline, step), _dtypes(pipeline))


def _moved(
    pipeline: PipelinePlan, launch: Launch, names: Mapping[str, int], dtypes: Mapping[str, str]
) -> int:
    total, flags = 0, {name for name, is_set in launch.flags if is_set}
    parts = {
        operand: tuple(shape.split(", "))
        for operand, flag, shape in launch.contract.parts
        if not flag or flag in flags
    }
    for binding in launch.bindings:
        operand = launch.contract.operand(binding.operand)
        if operand is None or binding.access is Access.LAYOUT:
            continue
        if binding.kind is Kind.CACHE:
            size = _cache_bytes(pipeline, launch, binding, names)
        else:
            shape = parts.get(operand.name, operand.shape)
            axes = (evaluate(_parsed(text), names) for text in shape)
            size = prod(axes) * DTYPE_BYTES[dtypes.get(binding.target, operand.dtype)]
        both = binding.access in (Access.UPDATE, Access.CONSUME, Access.EXCHANGE)
        total += 2 * size if both else size
    return total


_parsed = lru_cache(maxsize=256)(parse)


def _sizes(pipeline: PipelinePlan, step: StepPlan) -> Mapping[str, int]:
    """Dimensions, with the sizes of this step: a mailbox is used as far as there are rows."""
    share = CONTEXT // (int(pipeline.parallel["dcp"] or 1))
    return {
        **pipeline.dims,
        "rows": step.rows,
        "rows_cap": step.rows,
        "requests": max(1, step.rows // step.q),
        "pages": -(-share // _PAGE),
        "index_pages": -(-share // _PAGE),
        "blocks": SAVED,
        "context": min(share, pipeline.dims.get("context", share)),
    }


def _dtypes(pipeline: PipelinePlan) -> Mapping[str, str]:
    """The dtype of every piece of memory; `query` operands follow what they are bound to."""
    found = {}
    for place in (*pipeline.mailboxes, *pipeline.buffers):
        found[place.name] = place.dtype
        for name, _, _ in getattr(place, "columns", ()):
            found[name] = place.dtype
    return found


def _cache_bytes(
    pipeline: PipelinePlan, launch: Launch, binding: Binding, names: Mapping[str, int]
) -> int:
    """Rows of a cache: those inserted; those selected, where a list says so; else the context."""
    row = next(c.row_bytes for c in pipeline.caches if c.name == binding.target)
    if not binding.access.reads:
        return names["rows"] * row
    ranks = int(pipeline.parallel["dcp"] or 1)
    listed = any("top_k" in o.shape and o.access.reads for o in launch.contract.operands)
    if listed:
        return names["rows"] * max(1, names.get("top_k", 1) // ranks) * row
    return names["requests"] * names["context"] * row


def _connect(step: StepPlan, found: list[_Running]) -> None:
    """What each launch waits for: its stream, and what the stream has forked from or joined."""
    last: dict[str, int] = {}
    pending: dict[str, set[int]] = {}
    following = iter(range(len(found)))
    for item in step.items:
        if isinstance(item, Launch):
            position = next(following)
            run = found[position]
            run.behind = dict.fromkeys(pending.pop(item.stream, ()), GAP_FULL)
            if item.stream in last:
                gap = GAP_PDL if item.pdl.attribute else GAP_FULL
                run.behind[last[item.stream]] = gap
            if run.measured:
                run.behind = dict.fromkeys(run.behind, 0.0)
            last[item.stream] = position
            continue
        source, target = (
            (item.origin, item.stream) if isinstance(item, Fork) else (item.stream, item.target)
        )
        reached = set(pending.get(source, ()))
        reached |= {last[source]} if source in last else set()
        pending.setdefault(target, set()).update(reached)


def _post(pipeline: PipelinePlan, step: StepPlan, found: list[_Running], link: Link) -> None:
    """Whoever polls starts behind who sends, by the journey of all words between the two."""
    sizes: dict[tuple[int, int], int] = {}
    for post in posts(pipeline, step) if pipeline.mailboxes else ():
        for poller in post.pollers:
            if poller >= post.writer and post.peers:
                pair = (post.writer, poller)
                sizes[pair] = sizes.get(pair, 0) + post.sent * step.rows
    for (writer, poller), size in sizes.items():
        journey = link.journey(size)
        if writer == poller:
            found[poller].journey = journey
        else:
            run = found[poller]
            run.words += () if writer in run.behind else (writer,)
            run.behind[writer] = max(run.behind.get(writer, 0.0), journey)


def _simulate(found: list[_Running]) -> None:
    """Start every launch as early as it may; those that run share the bandwidth equally."""
    now = 0.0
    waiting, running = list(range(len(found))), []
    while waiting or running:
        ready = {
            position: max((found[p].end + gap for p, gap in behind.items()), default=0.0)
            for position, behind in ((position, found[position].behind) for position in waiting)
            if all(found[p].end >= 0 for p in behind)
        }
        for position in [p for p, time in ready.items() if time <= now]:
            run = found[position]
            run.start, run.left = now, 0.0 if run.measured else float(run.bytes)
            waiting.remove(position)
            running.append(position)
        busy = [p for p in running if found[p].left > 0]
        rate = BANDWIDTH / len(busy) if busy else 0.0
        ends = [
            max(
                found[p].start + found[p].shortest,
                now + (found[p].left / rate if found[p].left > 0 else 0.0),
            )
            for p in running
        ]
        turns = [now + found[p].left / rate for p in busy]  # the others then get more bandwidth
        following = min([*ends, *turns, *(t for t in ready.values() if t > now)])
        for position in busy:
            run = found[position]
            run.left -= rate * (following - now)
            run.left = run.left if run.left > 1.0 else 0.0  # a byte is nothing
        now = following
        for position in list(running):
            run = found[position]
            if run.left > 0.0 or now < run.start + run.shortest:
                continue
            if run.journey:
                run.shortest, run.journey = now - run.start + run.journey, 0.0
                continue
            run.end = now
            running.remove(position)
