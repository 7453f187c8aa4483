"""The winners of a tuning run as edits of the spec: its tables, with where they come from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kpipe.codegen.diagnostics import Diagnostic, Edit, Span, SpecError
from kpipe.codegen.edits import edited, lines_of
from kpipe.codegen.places.describe import mode_lines
from kpipe.codegen.places.survey import layout_of
from kpipe.codegen.plan.api import resolve_spec
from kpipe.codegen.plan.build import build_plan, refuse_unbuilt
from kpipe.codegen.plan.model import PipelinePlan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.resolve import Resolved
from kpipe.codegen.proof.prove import prove
from kpipe.codegen.repair.trial import planned
from kpipe.codegen.spec.document import Mapping as MappingNode
from kpipe.codegen.spec.document import Node, find, read_document
from kpipe.codegen.tune.fingerprint import changes, made_from
from kpipe.codegen.tune.model import MODE, TILE
from kpipe.codegen.tune.results import Results, Verdict, verdicts
from kpipe.codegen.tune.tables import (
    CannotEdit,
    Cells,
    TableText,
    add_entry,
    flow,
    is_flow,
    table_edits,
    table_text,
)

MARK = "# tuned: "
_MARKED = re.compile(rf"^\s*{MARK}")
_MODES = ("overlap", "modes")


@dataclass(frozen=True)
class Applied:
    """The verdicts of a run and the spec's new text, equal to the old where nothing changes."""

    verdicts: tuple[Verdict, ...]
    old: str
    new: str
    tables: tuple[str, ...]  # what changes, in words


def apply_results(path: str, results: Results, texts: dict[str, str]) -> Applied:
    """The text of a spec with the winners in its tables; no file is written.

    Raises SpecError: KP820 for another pipeline's results, KP822 for a spec, a geometry or kernels
    that have changed since the plan, and for text that cannot be edited; what the new text breaks.
    """
    resolved = resolve_spec(path, texts)
    refuse_unbuilt(resolved)
    plan = prove(build_plan(resolved, Report(resolved.source))).pipeline
    found = verdicts(results)
    _check_fresh(resolved, plan, results, found)
    wanted = _Wanted(resolved, plan, results.plan["arch"], found)
    try:
        edits, tables = _edits(wanted, results, texts)
    except CannotEdit as error:
        raise _refused(str(error), error.span) from None
    old = texts[path]
    new = edited(old, edits)
    if edits:
        _check_new(wanted, path, {**texts, path: new})
    return Applied(tuple(found), old, new, tables)


def _refused(message: str, span: Span | None, help: str = "") -> SpecError:
    hint = help or "edit the table by hand; `--format json` lists the winners"
    return SpecError((Diagnostic("KP822", message, span, help=hint),))


def _stale(what: str, span: Span | None = None) -> SpecError:
    help = "plan and measure again: `kpipe tune plan`"
    return _refused(f"the results are stale: {what}", span, help)


@dataclass(frozen=True)
class _Wanted:
    """The tables of the spec as they are and as the winners want them."""

    resolved: Resolved
    plan: PipelinePlan
    arch: str
    found: Sequence[Verdict]

    def modes(self, *, new: bool) -> Cells:
        """Mode by (arch, q) and rows; the words of the table, before any fallback."""
        cells: dict[tuple[str, int], dict[int, str]] = {}
        for step in self.plan.plans:
            cells.setdefault((step.arch, step.q), {})[step.rows] = step.asked_mode
        for verdict in self._changed(MODE) if new else ():
            for count in verdict.step["stands_for"]:
                cells[self.arch, verdict.step["q"]][count] = verdict.winner
        return cells

    def tactics(self, op: str, *, new: bool) -> Cells:
        """Tile of an op by arch (under the first query length) and rows, as text."""
        counts = sorted({count for _, known in self.plan.rows for count in known})
        q = self.plan.rows[0][0]
        cells = {
            (arch, q): {count: self._tile_at(op, arch, count) for count in counts}
            for arch in self.plan.targets
        }
        for verdict in self._changed(TILE) if new else ():
            for count in verdict.step["stands_for"] if verdict.step["op"] == op else ():
                cells[self.arch, q][count] = _tile(verdict.candidate["tactic"])
        return cells

    def _tile_at(self, op: str, arch: str, rows: int) -> str:
        return _tile(dict(tactic_of(self.plan, op, arch, rows)))

    def tuned_ops(self) -> list[str]:
        """Ops of which some tile changes."""
        return list(dict.fromkeys(verdict.step["op"] for verdict in self._changed(TILE)))

    def tuned_stages(self) -> dict[str, list[str]]:
        """These ops by the stage that owns them."""
        stages: dict[str, list[str]] = {}
        for op in self.tuned_ops():
            stages.setdefault(self.plan.stages[op], []).append(op)
        return stages

    def new_modes(self) -> list[str]:
        """Winning modes that the spec does not have yet."""
        names = dict.fromkeys(verdict.winner for verdict in self._changed(MODE))
        return [name for name in names if name not in self.resolved.modes]

    def _changed(self, kind: str) -> list[Verdict]:
        return [v for v in self.found if v.changes and v.step["kind"] == kind]


def tactic_of(plan: PipelinePlan, op: str, arch: str, rows: int) -> tuple[tuple[str, int], ...]:
    """The tile of an op at that many rows; empty for the kernel's own."""
    known = plan.tactics.get(op, ())
    return next((t for place, most, t in known if place == arch and rows <= most), ())


def _tile(tactic: Mapping[str, int]) -> str:
    return flow([(name, str(value)) for name, value in tactic.items()], quoted=False)


def _check_fresh(
    resolved: Resolved, plan: PipelinePlan, results: Results, found: Sequence[Verdict]
) -> None:
    """Every reason for which the results say nothing of this spec."""
    made = results.plan
    if made.get("pipeline") != plan.name:
        raise _stale(f"they are of `{made.get('pipeline')}`, this spec is `{plan.name}`")
    arch = made["arch"]
    if arch not in plan.targets:
        raise _stale(f"they are for {arch}, which is no target any more")
    if changed := changes(made["made_from"], made_from(resolved, plan)):
        verb = "has" if len(changed) == 1 else "have"
        raise _stale(f"{', '.join(changed)} {verb} changed since the plan")
    for name, entry in made["modes"].items():
        _check_mode(resolved, name, entry)
    modes = {(s.q, s.rows): s.mode for s in plan.plans if s.arch == arch}
    for verdict in found:
        step = verdict.step
        for count in step["stands_for"]:
            if step["kind"] == MODE:
                now, allowed = modes.get((step["q"], count)), {verdict.present, verdict.winner}
            else:
                now = _tile(dict(tactic_of(plan, step["op"], arch, count)))
                listed = (verdict.candidate, step["candidates"][0])
                allowed = {_tile(one["tactic"]) for one in listed}
            if now not in allowed:
                what = step["op"] or "overlap.table"
                said = f"`{what}` is `{now}` at {arch} q{step['q']} rows {count}"
                raise _stale(f"{said}; the run compared with `{verdict.present}`")


def _check_mode(resolved: Resolved, name: str, entry: Mapping[str, Any]) -> None:
    """A mode of the plan is still the same, or not there yet where it was found."""
    mode = resolved.modes.get(name)
    if mode is None:
        if entry["declared"]:
            raise _stale(f"mode `{name}` is gone since the plan")
        return
    now = {stream: list(words) for stream, words in layout_of(resolved, name).streams}
    if now != entry["streams"] or dict(mode.requires) != entry["requires"]:
        raise _stale(f"mode `{name}` has changed since the plan", mode.span)


def _edits(
    wanted: _Wanted, results: Results, texts: Mapping[str, str]
) -> tuple[list[Edit], tuple[str, ...]]:
    writer = _Writer(wanted, results, texts)
    for stage, ops in wanted.tuned_stages().items():
        writer.tactics(stage, ops)
    writer.modes()
    return [*writer.edits, *writer.comments.values()], tuple(writer.tables)


class _Writer:
    """Collects the edits of one spec file."""

    def __init__(self, wanted: _Wanted, results: Results, texts: Mapping[str, str]) -> None:
        self.wanted, self.results = wanted, results
        self.path = wanted.resolved.source.path
        self.root = wanted.resolved.source.root
        self.text = texts[self.path]
        self.edits: list[Edit] = []
        self.comments: dict[int, Edit] = {}
        self.tables: list[str] = []

    def modes(self) -> None:
        """The table of modes, and modes that it needs."""
        old, new = self.wanted.modes(new=False), self.wanted.modes(new=True)
        fused = self.wanted.resolved.spec.features.fused_indexer
        name = "table"
        if not fused and self.wanted.resolved.spec.overlap.table_unfused is not None:
            name = "table_unfused"
        where = ("overlap", name)
        if old != new and self._node(where).span.path != self.path:
            self._override(name, new)
        elif self._replaced(where, where, old, new, queries=True, metric="whole layers"):
            for mode in self.wanted.new_modes():
                self._new_mode(mode)

    def _override(self, name: str, new: Cells) -> None:
        """A table of the file that this one extends: this one says its own, and its own modes."""
        modes = [line for mode in self.wanted.new_modes() for line in self._mode_lines(mode)]
        lines = ["modes:", *(f"  {line}" for line in modes)] if modes else []
        lines += [self._origin("whole layers"), f"{name}: {table_text(new, True)}"]
        own = read_document(self.path, self.text.encode()).entry("overlap")
        if own is None:
            end = lines_of(self.text)
            place = Span(self.path, len(end), len(end[-1]) + 1, len(end), len(end[-1]) + 1)
            text = "".join(f"\n  {line}" for line in lines)
            first = "" if not end[-1] else "\n"
            self.edits.append(Edit(place, f"{first}overlap:{text}\n"))
        elif isinstance(own.value, MappingNode) and not is_flow(self.text, own.value):
            if modes and own.value.entry("modes"):
                raise CannotEdit("modes and table of `overlap` stand in two files", own.key_span)
            self.edits.append(add_entry(self.text, own.value, lines))
        else:
            raise CannotEdit("`overlap` has no room for a table in one line", own.key_span)
        self.tables += [f"overlap.{name}", *(f"overlap.modes.{m}" for m in self.wanted.new_modes())]

    def tactics(self, stage: str, ops: Sequence[str]) -> None:
        """The tactics of ops of a stage; tables and the key are put in where there are none."""
        owner, metric = ("stages", stage, "tactics"), "whole layers"
        added = []
        for op in ops:
            old, new = self.wanted.tactics(op, new=False), self.wanted.tactics(op, new=True)
            where = (*owner, op)
            if find(self.root, where) is None:
                added.append(f"{op}: {table_text(new, False)}")
                self.tables.append(".".join(where))
            else:
                self._replaced(where, owner, old, new, queries=False, metric=metric)
        if not added:
            return
        there = find(self.root, owner)
        inner = there if isinstance(there, MappingNode) and there.entries else None
        target = inner or self._node(owner[:2])
        assert isinstance(target, MappingNode)  # the model has seen it
        self._own(target.span, ".".join(owner[:2]))
        if inner:
            self.edits += [add_entry(self.text, target, [line]) for line in added]
            self._comment(self.wanted.resolved.source.span(*owner, key=True).line, metric)
            return
        line = f"tactics: {{{', '.join(added)}}}"
        if is_flow(self.text, target):
            self.edits.append(add_entry(self.text, target, [line]))
            self._comment(self.wanted.resolved.source.span(*owner[:2], key=True).line, metric)
        else:
            self.edits.append(add_entry(self.text, target, [self._origin(metric), line]))

    def _replaced(
        self,
        where: tuple[str, ...],
        owner: tuple[str, ...],
        old: Cells,
        new: Cells,
        *,
        queries: bool,
        metric: str,
    ) -> bool:
        if old == new:
            return False
        node = self._node(where)
        self._own(node.span, ".".join(where))
        table = TableText(node, self.text, _has(node, old, 0), _has_queries(node, old))
        if table.by_query and not queries:
            raise CannotEdit("a tile holds for all query lengths, this table is keyed", node.span)
        self.edits += table_edits(table, old, new, queries)
        self._comment(self.wanted.resolved.source.span(*owner, key=True).line, metric)
        self.tables.append(".".join(where))
        return True

    def _mode_lines(self, name: str) -> list[str]:
        entry = self.results.plan["modes"][name]
        streams = [(stream, tuple(words)) for stream, words in entry["streams"].items()]
        return mode_lines(name, streams, tuple(entry["requires"].items()), "")

    def _new_mode(self, name: str) -> None:
        node = self._node(_MODES)
        assert isinstance(node, MappingNode)
        self._own(node.span, "overlap.modes")
        lines = self._mode_lines(name)
        if node.span.line == node.span.end_line:
            listed = "\n".join(lines)
            help = f"write `overlap.modes` over several lines, or add the mode by hand:\n{listed}"
            raise _refused(f"mode `{name}` cannot be added to a list in one line", node.span, help)
        self.edits.append(add_entry(self.text, node, lines))
        self.tables.append(f"overlap.modes.{name}")

    def _node(self, where: tuple[str, ...]) -> Node:
        node = find(self.root, where)
        assert node is not None  # the model has seen it
        return node

    def _own(self, span: Span, what: str) -> None:
        """Only the file that was named is edited: others may extend the same one."""
        if span.path != self.path:
            raise _refused(
                f"`{what}` stands in `{span.path}`, which `{self.path}` extends",
                span,
                f"tune `{span.path}`, or copy the section into `{self.path}` and plan again; "
                "`kpipe tune plan --tiles 1` asks for modes alone",
            )

    def _origin(self, metric: str) -> str:
        run = f"{self.results.gpu}, {self.results.date}, {_plain(self.results.name)}"
        of = " of one rank" if self.wanted.plan.context_parallel else ""
        return f"{MARK}{self.wanted.arch} by {metric}{of}; {run}"

    def _comment(self, line: int, metric: str) -> None:
        """Where the numbers come from, above the line of the table's key."""
        lines = lines_of(self.text)
        margin = re.match(r" *", lines[line - 1])
        assert margin is not None
        text = f"{margin[0]}{self._origin(metric)}\n"
        marked = line > 1 and _MARKED.match(lines[line - 2])
        first = line - 1 if marked else line
        self.comments[line] = Edit(Span(self.path, first, 1, line, 1), text)


def _plain(name: str) -> str:
    """A file's name as it may stand in a comment."""
    return re.sub(r"[^\w .-]", "_", name)[:80]


def _has(node: Node, cells: Cells, part: int) -> bool:
    keys = {str(key[part]) for key in cells}
    return isinstance(node, MappingNode) and any(entry.key in keys for entry in node.entries)


def _has_queries(node: Node, cells: Cells) -> bool:
    parts = [node]
    if _has(node, cells, 0) and isinstance(node, MappingNode):
        parts = [entry.value for entry in node.entries]
    queries = {f"q{q}" for _, q in cells}
    return any(
        entry.key in queries
        for part in parts
        if isinstance(part, MappingNode)
        for entry in part.entries
    )


def _check_new(wanted: _Wanted, path: str, texts: Mapping[str, str]) -> None:
    """The new text is planned and proved, and says what the winners say."""
    plan = prove(planned(path, texts)).pipeline
    after = _Wanted(wanted.resolved, plan, wanted.arch, wanted.found)
    same = after.modes(new=False) == wanted.modes(new=True) and all(
        after.tactics(op, new=False) == wanted.tactics(op, new=True) for op in wanted.tuned_ops()
    )
    if not same:
        raise AssertionError("the edited tables do not say what was measured")
