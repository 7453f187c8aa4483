"""The chains whose outcome the checker cites, as experiments.

A chain in words: `A(trig); fork; side D; join; C(pdl wait)`.  In order of issue, on main unless
`side` or `third` stands in front:

    NAME(...)      a kernel: pdl, wait; trig (at entry), late (behind its wait), some (one CTA)
    memset, memcpy
    fork, join     side starts behind main; main waits for side (`fork third`, `join third`)
    self           an event, recorded and waited for on main
    graph, eager   begins a graph, launched on main, or what is issued eagerly

A writes `x` late, as it sleeps first.  C looks at `x`: in front of its wait, if it has one, and
behind it.  Experiments of one row are variants of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kpipe.runtime.schedules.form import Action, Launch, Record, Schedule, Segment, Touch, Wait

LATE_US = 300
STREAMS = ("main", "side", "third")
FIRST, LAST = "A", "C"
HUGE, HUGE_CTAS = 1 << 24, 528  # 64 MB
SMALL = 1 << 10

_ITEM = re.compile(r"(?:(side|third) )?(\w+)(?: (third))?(?:\(([a-z ]+)\))?")
_TRIGGERS = {"trig": "early", "late": "after_wait", "some": "some"}
_BOUNDARIES = {"graph": True, "eager": False}


@dataclass(frozen=True)
class Experiment:
    """One chain; `long` are the launches that sleep, `words` the size of `x` (0: as usual) and
    `ctas` the grid of A and C.  A mixed one has segments of its own; the others run twice."""

    row: str
    chain: str
    long: tuple[str, ...] = (FIRST,)
    repetitions: int = 40
    words: int = 0
    ctas: int = 1

    @property
    def mixed(self) -> bool:
        """Whether the chain says itself what is captured."""
        return any(word in self.chain.split("; ") for word in _BOUNDARIES)

    @property
    def modes(self) -> tuple[str, ...]:
        """How it is run: eager and captured, or mixed."""
        return ("mixed",) if self.mixed else ("eager", "captured")

    def schedule(self, mode: str) -> Schedule:
        """The schedule in one of its modes.  Raises ValueError for a word that is none."""
        segments: list[tuple[bool, list[Action]]] = [(mode == "captured", [])]
        event = 0
        for item in self.chain.split("; "):
            if item in _BOUNDARIES:
                segments.append((_BOUNDARIES[item], []))
                continue
            segments[-1][1].extend(self._item(item, event))
            event += 1
        made = tuple(Segment(tuple(actions), one) for one, actions in segments if actions)
        return Schedule(made, {"x": self.words} if self.words else {})

    def _item(self, item: str, event: int) -> tuple[Action, ...]:
        found = _ITEM.fullmatch(item)
        if found is None:
            raise ValueError(f"row {self.row}: {item!r} is no item of a chain")
        stream, name, other, flags = found.groups()
        main, aside = 0, STREAMS.index(other or "side")
        ends = {"fork": (main, aside), "join": (aside, main), "self": (main, main)}
        if name in ends:
            source, target = ends[name]
            return Record(source, event), Wait(target, event)
        number = STREAMS.index(stream or "main")
        if name in ("memset", "memcpy"):
            return (Launch(number, name, name),)
        return (self._kernel(number, name, (flags or "").split()),)

    def _kernel(self, stream: int, name: str, flags: list[str]) -> Launch:
        unknown = set(flags) - {"pdl", "wait", *_TRIGGERS}
        if unknown:
            raise ValueError(f"row {self.row}: {name} is {', '.join(sorted(unknown))}")
        trigger = next((_TRIGGERS[flag] for flag in flags if flag in _TRIGGERS), "never")
        launch = Launch(stream, name, "kernel", "pdl" in flags, "wait" in flags, trigger)
        if name == FIRST:
            ctas = 4 if trigger == "some" else self.ctas
            return replace(launch, touches=(Touch("x", write=True),), ctas=ctas)
        if name == LAST:
            looks = [Touch("x", write=False, early=True)] if launch.waits else []
            touches = (*looks, Touch("x", write=False))
            return replace(launch, touches=touches, ctas=self.ctas)
        return launch


_BOTH = ("A", "Z")
EXPERIMENTS = (
    Experiment("1", "A; C"),
    Experiment("2", "A(trig); C(pdl wait)"),
    Experiment("3", "A(trig); C(pdl)"),
    Experiment("4", "A; C(pdl)"),
    Experiment("5", "A(trig); C"),
    Experiment("6", "A(trig); B(pdl); C(pdl wait)"),
    Experiment("7", "A(trig); B(pdl trig wait); C(pdl wait)"),
    Experiment("8", "A(trig); B(pdl trig wait); C(pdl)"),
    Experiment("9", "A(trig); B(pdl); C"),
    Experiment("9", "A(trig); B(pdl); fork; side C"),
    Experiment("10", "A(trig); fork; side C(pdl)"),
    Experiment("11", "A(trig); memset; C(pdl)"),
    Experiment("11", "A(trig); memcpy; C(pdl)"),
    Experiment("12", "A(some); C(pdl)"),
    Experiment("13", "fork; side Z(trig); A(trig); join; C(pdl)"),
    Experiment("14", "fork; side A(trig); B(trig); join; C(pdl)"),
    Experiment("15", "A(trig); fork; side C"),
    Experiment("16", "A(trig); fork; side C(pdl wait)"),
    Experiment("17", "A(trig); fork; side D(pdl trig); side C(pdl wait)"),
    Experiment("18", "A(trig); fork; side D; side C(pdl)"),
    Experiment("19", "A(trig); fork; side D; C(pdl)"),
    Experiment("19", "A(trig); fork; side D(pdl); C(pdl)"),
    Experiment("20", "fork; side A(trig); join; C(pdl)"),
    Experiment("21", "A(trig); self; C(pdl)"),
    Experiment("22", "graph; A(trig); graph; C(pdl)"),
    Experiment("22", "graph; A(trig); eager; C(pdl)"),
    Experiment("22", "eager; A(trig); graph; C(pdl)"),
    Experiment("23", "A(trig); B(pdl wait late); C(pdl)"),
    Experiment("24", "fork; side A(trig); Z(trig); join; C(pdl)", _BOTH),
    Experiment("25", "A; C(pdl)", (), 100, HUGE, HUGE_CTAS),
    Experiment("26", "A; C(pdl)", (), 1000, SMALL),
    Experiment("27", "A(trig); C(pdl)", (), 100, HUGE, HUGE_CTAS),
    Experiment(
        "28", "root(trig); fork; side A(pdl trig); Z(pdl trig); join; C(pdl)", _BOTH
    ),
    Experiment("29", "A(trig); fork; join; C(pdl)"),
    Experiment("30", "A(trig); B(pdl); fork; side C(pdl)"),
    Experiment("31", "A(trig); B(pdl); D(pdl); C(pdl wait)"),
    Experiment("32", "fork; side memset; A(trig); join; C(pdl)"),
    Experiment("P1", "fork; side A(trig); Z(trig); join; C(pdl)", _BOTH),
    Experiment("P4", "A(trig); fork; side D; join; C(pdl)"),
    Experiment("P4b", "A(trig); fork; side D(pdl trig); join; C(pdl)"),
    # Two and three long programmatic parents, seen from each.
    Experiment(
        "33", "root(trig); fork; side Z(pdl trig); A(pdl trig); join; C(pdl)", _BOTH
    ),
    Experiment(
        "34", "root(trig); fork; side A(pdl trig); Z(pdl trig); join; C(pdl wait)", _BOTH
    ),
    Experiment(
        "35",
        "root(trig); fork; fork third; side A(pdl trig); third Y(pdl trig); Z(pdl trig); join; "
        "join third; C(pdl)",
        (*_BOTH, "Y"),
    ),
    Experiment("36", "root; fork; side A(trig); Z(trig); join; C(pdl)", _BOTH),
)  # fmt: skip
