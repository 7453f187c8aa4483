"""Two sides of a pipeline to their difference: a pure function of two plans and two verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kpipe.codegen.plan.cost import critical_path, layer_time
from kpipe.codegen.plan.model import MAIN, Launch, PipelinePlan, StepPlan
from kpipe.codegen.render.timeline import timeline
from kpipe.codegen.review.captured import Graph, captured_layer
from kpipe.codegen.review.launches import edge_changes, launch_changes, overlap_changes
from kpipe.codegen.review.model import Difference, LaunchChange, ListChange, Rename, RowRange
from kpipe.codegen.review.numerics import declared_numerics, step_numerics
from kpipe.codegen.review.renames import find_renames, renamed
from kpipe.codegen.review.settings import memory_of, setting_changes
from kpipe.codegen.review.side import Side

_At = tuple[str, int, int]
Selected = Callable[[StepPlan], bool]


def difference(old: Side, new: Side, selected: Selected = lambda _: True) -> Difference:
    """What differs between two sides that both have a plan, files and evidence left out.

    Row counts for which `selected` is false on their side are not looked at.
    """
    assert new.pipeline is not None
    names, renames = find_renames(old, new)
    if old.path != new.path:
        renames = (Rename("spec", old.path, new.path), *renames)
    old = renamed(old, names)
    ranges, lists = _Ranges(old, new, selected).run()
    assert old.pipeline is not None
    before, after = memory_of(old.pipeline), memory_of(new.pipeline)
    settings = setting_changes(old, new)
    numerics = declared_numerics(old.pipeline, new.pipeline)
    changed = any(one.state != "same" or one.mode_before != one.mode_after for one in ranges)
    changed = changed or bool(renames or settings or numerics) or old.verdict != new.verdict
    return Difference(
        new.pipeline.name,
        new.path,
        "changed" if changed else "same",
        old.verdict,
        new.verdict,
        renames,
        ranges,
        lists,
        settings,
        numerics,
        (before, after),
        found=new.found,
        old_found=old.found,
    )


def lone(side: Side, state: str, selected: Selected = lambda _: True) -> Difference:
    """A pipeline that one side has alone: `state` is new or deleted (or no base: new, and the old
    side could not be read)."""
    plan = side.pipeline
    assert plan is not None
    gone = state == "deleted"
    ranges = tuple(_lone_ranges(plan, gone, selected))
    lists = len(plan.methods)
    facts = (
        f"{len(plan.plans)} steps, {lists} launch list{'' if lists == 1 else 's'}, "
        f"{len(plan.modes)} modes, targets {', '.join(plan.targets)}",
    )
    return Difference(
        plan.name,
        side.path,
        state,  # type: ignore[arg-type]
        side.verdict if gone else None,
        None if gone else side.verdict,
        ranges=ranges,
        facts=facts,
        found=() if gone else side.found,
    )


class _Ranges:
    """Row ranges of two plans, and the pairs of launch lists behind them."""

    def __init__(self, old: Side, new: Side, selected: Selected) -> None:
        assert old.pipeline is not None and new.pipeline is not None
        self.old, self.new = old.pipeline, new.pipeline
        self.before = _steps(self.old, selected)
        self.after = _steps(self.new, selected)
        self.methods = [
            {method.plan.identity: method.name for method in plan.methods}
            for plan in (self.old, self.new)
        ]
        self.lists: dict[ListChange, int] = {}
        self.known: dict[tuple, ListChange | None] = {}
        self.graphs: dict[tuple, Graph] = {}

    def run(self) -> tuple[tuple[RowRange, ...], tuple[ListChange, ...]]:
        ranges: list[RowRange] = []
        places = dict.fromkeys((*self.after, *self.before))
        for key in sorted(places, key=lambda at: _order(self.old, self.new, at)):
            one = self._at(key)
            if ranges and _same_range(ranges[-1], one):
                ranges[-1] = _joined(ranges[-1], one)
            else:
                ranges.append(one)
        return tuple(ranges), tuple(self.lists)

    def _at(self, key: _At) -> RowRange:
        before, after = self.before.get(key), self.after.get(key)
        change = self._list(before, after) if before and after else None
        number = -1 if change is None else self.lists.setdefault(change, len(self.lists))
        state = "changed" if change else "same"
        if before is None or after is None:
            state = "new" if before is None else "gone"
        return RowRange(
            key[0],
            key[1],
            (key[2],),
            _mode(before),
            _mode(after),
            state,  # type: ignore[arg-type]
            number,
            (layer_time(self.old, before),) if before else (),
            (layer_time(self.new, after),) if after else (),
            critical_path(self.old, before) if before else (),
            critical_path(self.new, after) if after else (),
        )

    def _list(self, old: StepPlan, new: StepPlan) -> ListChange | None:
        key = (*_content(old), *_content(new))
        if key not in self.known:
            self.known[key] = self._compared(old, new)
        return self.known[key]

    def _compared(self, old: StepPlan, new: StepPlan) -> ListChange | None:
        launches = launch_changes(old, new)
        graphs = self._graph(0, self.old, old), self._graph(1, self.new, new)
        edges = edge_changes(*graphs)
        if not launches and not edges:
            launches = _issued(old, new)
        if not launches and not edges and old.head_rows == new.head_rows:
            return None
        return ListChange(
            self.methods[0].get(old.identity, ""),
            self.methods[1].get(new.identity, ""),
            old.mode,
            new.mode,
            timeline(old),
            timeline(new),
            launches,
            edges,
            (len(old.streams), len(new.streams)),
            (len(graphs[0].nodes), len(graphs[1].nodes)),
            (len(graphs[0].edges), len(graphs[1].edges)),
            (graphs[0].programmatic, graphs[1].programmatic),
            (old.head_rows, new.head_rows) if old.head_rows != new.head_rows else (0, 0),
            *overlap_changes(*graphs),
            step_numerics(old, new),
        )

    def _graph(self, side: int, plan: PipelinePlan, step: StepPlan) -> Graph:
        key = (side, step.identity)
        if key not in self.graphs:
            self.graphs[key] = captured_layer(plan, step)
        return self.graphs[key]


def _steps(plan: PipelinePlan, selected: Selected) -> Mapping[_At, StepPlan]:
    return {(step.arch, step.q, step.rows): step for step in plan.plans if selected(step)}


def _order(old: PipelinePlan, new: PipelinePlan, at: _At) -> tuple[int, str, int, int]:
    targets = dict.fromkeys((*new.targets, *old.targets))
    return [*targets].index(at[0]), at[0], at[1], at[2]


def _content(step: StepPlan) -> tuple:
    """All of a step that its difference depends on; without the rows, and cheap to hash."""
    return (
        step.mode,
        step.head_rows,
        step.identity,
        tuple((launch.tactic, launch.options) for launch in step.launches),
    )


def _mode(step: StepPlan | None) -> str:
    """The mode; with the one that the table asks for, where a fallback took its place."""
    if step is None:
        return ""
    return step.mode if step.mode == step.asked_mode else f"{step.asked_mode}, so {step.mode}"


def _issued(old: StepPlan, new: StepPlan) -> tuple[LaunchChange, ...]:
    """Side streams that the host issues at another place, with nothing else changed."""
    before, after = _heads(old), _heads(new)
    return tuple(
        LaunchChange("issued", stream, before[stream], after[stream])
        for stream in after
        if before.get(stream, after[stream]) != after[stream]
    )


def _heads(step: StepPlan) -> dict[str, str]:
    """Side stream -> the launch behind which the host issues its first launch."""
    found: dict[str, str] = {}
    last = ""
    for item in step.items:
        if isinstance(item, Launch):
            if item.stream != MAIN:
                found.setdefault(item.stream, f"behind {last}" if last else "first")
            last = item.name
    return found


def _same_range(last: RowRange, one: RowRange) -> bool:
    return (last.arch, last.q, last.mode_before, last.mode_after, last.state, last.change) == (
        *(one.arch, one.q, one.mode_before, one.mode_after, one.state, one.change),
    )


def _joined(last: RowRange, one: RowRange) -> RowRange:
    return RowRange(
        *(last.arch, last.q, (*last.rows, *one.rows), last.mode_before, last.mode_after),
        *(last.state, last.change),
        (*last.times_before, *one.times_before),
        (*last.times_after, *one.times_after),
        *(last.path_before, last.path_after),
    )


def _lone_ranges(plan: PipelinePlan, gone: bool, selected: Selected) -> list[RowRange]:
    ranges: list[RowRange] = []
    for step in filter(selected, plan.plans):
        times, path = (layer_time(plan, step),), critical_path(plan, step)
        mode = _mode(step)
        one = RowRange(
            *(step.arch, step.q, (step.rows,)),
            *((mode, "", "gone") if gone else ("", mode, "new")),
            -1,
            *((times, ()) if gone else ((), times)),
            *((path, ()) if gone else ((), path)),
        )
        if ranges and _same_range(ranges[-1], one):
            ranges[-1] = _joined(ranges[-1], one)
        else:
            ranges.append(one)
    return ranges
