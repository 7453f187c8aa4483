"""The content of a review in order of weight; text and Markdown only dress it.

Each pipeline has a head (what a decision needs) and details.  Names of ops, buffers, modes and
files stand in backticks; the text form takes them off again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kpipe.codegen.plan.describe import row_list
from kpipe.codegen.review.model import Difference, ListChange, Memory, Review, RowRange
from kpipe.codegen.review.phrases import (
    edge_lines,
    evidence_lines,
    file_lines,
    launch_lines,
    numerics_line,
    overlap_lines,
    proof_line,
    state_line,
)
from kpipe.codegen.review.verdict import VISIBLE, count

MIB = 1024 * 1024
SHORT = 48  # characters of a declaration that fits a table
PREDICTED = (
    "Times are predictions of a cost model (bytes, launch gaps, one H200), not measurements."
)


@dataclass(frozen=True)
class Table:
    """A header and rows of cells."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Bullets:
    """One point a line."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Picture:
    """Lines of fixed width; `language` is text or diff."""

    lines: tuple[str, ...]
    language: str = "text"


@dataclass(frozen=True)
class Section:
    """A titled part.  `level` 1: a pipeline; 2: a part of it.  `folded`: long and of second rank.
    `detail`: may be left out where room is short."""

    title: str
    blocks: tuple[Table | Bullets | Picture, ...]
    level: int = 2
    folded: bool = False
    detail: bool = True


def sections_of(review: Review) -> tuple[Section, ...]:
    """Every section of a review; pipelines without any change share one at the end."""
    found: list[Section] = []
    seen: dict[tuple, str] = {}  # what changes alike -> where it was shown
    quiet = []
    for one in review.pipelines:
        if _is_quiet(one):
            quiet.append(one)
            continue
        found.append(_head(one, review))
        found += _details(one, seen)
    if quiet:
        lines = tuple(f"`{one.name}` ({one.path}): {_quiet_text(one)}" for one in quiet)
        title = "Unchanged" if found else "No schedule change"
        found.append(Section(title, (Bullets(lines),), 1, detail=False))
    return tuple(found)


def _is_quiet(one: Difference) -> bool:
    files = one.files is None or not any(
        change.effect or (change.disk != "current" and not one.files.never_written)
        for change in one.files.changes
    )
    if one.state == "draft":
        return one.before is None or one.before.kind == "draft"
    bad = one.found or one.warnings or one.old_found or one.evidence
    return one.state == "same" and files and not bad


def _quiet_text(one: Difference) -> str:
    if one.state == "draft":
        return "a draft, checked and not planned"
    return f"{count(len(one.ranges), 'row range')}, no schedule change, no generated file changes"


def _head(one: Difference, review: Review) -> Section:
    changed = [entry for entry in one.ranges if _shown(entry)]
    blocks: list[Table | Bullets | Picture] = []
    lines = [*state_line(one, review.base)]
    if changed:
        blocks.append(_range_table(one, changed))
        rest = len(one.ranges) - len(changed)
        if not one.changed_ranges and one.state == "changed":
            total = count(len(one.ranges), "row range")
            lines.append(f"No schedule change in {total}; listed is where the time differs.")
        elif rest:
            keep = "keeps its schedule" if rest == 1 else "keep their schedule"
            lines.append(f"The other {count(rest, 'row range')} {keep}.")
    elif one.state in ("changed", "same"):
        lines.append(f"No schedule change in {count(len(one.ranges), 'row range')}.")
    lines += [f"Rename: {r.kind} `{r.before}` -> `{r.after}`." for r in one.renames]
    lines += [*proof_line(one), *numerics_line(one), *file_lines(one), *evidence_lines(one)]
    lines += [*_memory_line(one), *([PREDICTED] if changed else [])]
    blocks.append(Bullets(tuple(lines)))
    return Section(f"`{one.name}` ({one.path})", tuple(blocks), 1, detail=False)


def _shown(entry: RowRange) -> bool:
    moved = any(abs(delta) > VISIBLE for delta in entry.deltas) if entry.timed else False
    return entry.state != "same" or entry.mode_before != entry.mode_after or moved


def _range_table(one: Difference, ranges: list[RowRange]) -> Table:
    header = ("arch", "q", "rows", "mode", "streams", "nodes", "edges", "us a layer")
    rows = []
    for entry in ranges:
        change = one.lists[entry.change] if entry.change >= 0 else None
        numbers = (
            (_pair(*change.streams), _pair(*change.nodes), _pair(*change.edge_counts))
            if change
            else ("", "", "")
        )
        mode = _modes(entry)
        rows.append((entry.arch, str(entry.q), row_list(entry.rows), mode, *numbers, _times(entry)))
    merged: dict[tuple[str, ...], list[str]] = {}
    for arch, *cells in rows:
        merged.setdefault(tuple(cells), []).append(arch)
    return Table(header, tuple((", ".join(archs), *cells) for cells, archs in merged.items()))


def _modes(entry: RowRange) -> str:
    if entry.state == "new":
        return f"new: {entry.mode_after}"
    if entry.state == "gone":
        return f"gone: {entry.mode_before}"
    if entry.mode_before != entry.mode_after:
        alike = " (launches alike)" if entry.state == "same" else ""
        return f"{entry.mode_before} -> {entry.mode_after}{alike}"
    return entry.mode_after


def _pair(before: int, after: int) -> str:
    return str(after) if before == after else f"{before} -> {after}"


def _times(entry: RowRange) -> str:
    if not entry.timed:
        return _span(entry.times_after or entry.times_before)
    deltas = [round(delta, 1) + 0.0 for delta in entry.deltas]
    low, high = min(deltas), max(deltas)
    change = f"{low:+.1f}" if low == high else f"{low:+.1f} to {high:+.1f}"
    return f"{_span(entry.times_before)} -> {_span(entry.times_after)} ({change})"


def _span(times: tuple[float, ...]) -> str:
    low, high = min(times), max(times)
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f}..{high:.1f}"


def _memory_line(one: Difference) -> list[str]:
    if one.memory is None:
        return []
    before, after = one.memory
    total = f"{_bytes(after.total)} a rank at the largest row count"
    if before == after:
        return [f"Memory: unchanged, {total}."]
    parts = [
        f"{what} {_grown(now - then)}"
        for what, then, now in zip(
            ("buffers", "mailboxes", "workspaces"), _parts(before), _parts(after), strict=True
        )
        if now != then
    ]
    grown = _grown(after.total - before.total)
    return [f"Memory: {grown} ({', '.join(parts)}), now {total}."]


def _bytes(size: int) -> str:
    return f"{size / MIB:.1f} MiB" if abs(size) >= MIB else f"{size / 1024:.1f} KiB"


def _grown(size: int) -> str:
    return f"{'+' if size > 0 else ''}{_bytes(size)}"


def _parts(memory: Memory) -> tuple[int, int, int]:
    return memory.buffers, memory.mailboxes, memory.workspaces


def _details(one: Difference, seen: dict[tuple, str]) -> Iterator[Section]:
    for number, change in enumerate(one.lists):
        uses = [entry for entry in one.ranges if entry.change == number]
        title = f"{_title(change)} at {_uses(uses)}"
        graph = _graph(change, uses)
        if _alike(change) in seen:
            line = f"Launch by launch as for {seen[_alike(change)]}."
            yield Section(title, (Bullets((line, *graph)),), folded=True)
            continue
        seen[_alike(change)] = f"`{one.name}`, {_uses(uses)}"
        yield Section(title, tuple(_list_blocks(change)), folded=number > 0)
        yield Section(f"Graph and critical path of {title}", (Bullets(graph),), folded=True)
    yield from _settings(one, seen)


def _alike(change: ListChange) -> tuple:
    """What two lists share that change alike, around another core for example."""
    return (
        *(change.mode_before, change.mode_after, change.launches, change.parted, change.met),
        *(change.head_rows, change.numerics),
    )


def _settings(one: Difference, seen: dict[tuple, str]) -> Iterator[Section]:
    """Short declarations as a table, long ones as a diff; one line where they were shown."""
    if not one.settings:
        return
    known = seen.setdefault(("declarations", *one.settings), one.name)
    if known != one.name:
        line = f"The same {count(len(one.settings), 'declaration')} as for `{known}`."
        yield Section("Declarations", (Bullets((line,)),), folded=True)
        return
    used = {entry.mode_after for entry in one.ranges} | {e.mode_before for e in one.ranges}
    cells = [
        (s.section, _setting_name(s.section, s.name, used), s.before, s.after) for s in one.settings
    ]
    short = [c for c in cells if max(len(c[2]), len(c[3])) <= SHORT]
    blocks: list[Table | Bullets | Picture] = []
    if short:
        rows = tuple((a, b, before or "-", after or "-") for a, b, before, after in short)
        blocks.append(Table(("declaration", "name", "before", "after"), rows))
    lines: list[str] = []
    for section, name, before, after in (c for c in cells if c not in short):
        lines += [f"  {section} {name}"]
        lines += [f"- {part}" for part in before.split("; ") if part]
        lines += [f"+ {part}" for part in after.split("; ") if part]
    if lines:
        blocks.append(Picture(tuple(lines), "diff"))
    title = f"{count(len(cells), 'declaration')} differ{'s' if len(cells) == 1 else ''}"
    yield Section(title, tuple(blocks), folded=len(cells) > 8)


def _setting_name(section: str, name: str, used: set[str]) -> str:
    return f"{name} (no row selects it)" if section == "mode" and name not in used else name


def _uses(ranges: list[RowRange]) -> str:
    """`sm_90a, sm_100a: q 1 rows 1-4; q 4 rows 4`."""
    rows: dict[str, dict[int, list[int]]] = {}
    for entry in ranges:
        rows.setdefault(entry.arch, {}).setdefault(entry.q, []).extend(entry.rows)
    alike: dict[str, list[str]] = {}
    for arch, queries in rows.items():
        text = "; ".join(f"q {q} rows {row_list(listed)}" for q, listed in queries.items())
        alike.setdefault(text, []).append(arch)
    return "; ".join(f"{', '.join(archs)}: {text}" for text, archs in alike.items())


def _title(change: ListChange) -> str:
    if change.mode_before != change.mode_after:
        return f"`{change.mode_before}` -> `{change.mode_after}`"
    return f"`{change.mode_after}`, changed,"


def _list_blocks(change: ListChange) -> Iterator[Bullets | Picture]:
    before, after = change.timeline_before, change.timeline_after
    if before != after:
        yield Picture(
            (
                *(f"{'before' if not n else '':<8}{line}" for n, line in enumerate(before)),
                *(f"{'after' if not n else '':<8}{line}" for n, line in enumerate(after)),
            )
        )
    lines = [*launch_lines(change.launches)]
    lines += overlap_lines(change)
    if change.head_rows != (0, 0):
        lines.append(f"Head rows of the core: {change.head_rows[0]} -> {change.head_rows[1]}.")
    lines += [f"Numerics: {line}." for line in change.numerics]
    yield Bullets(tuple(lines))


def _graph(change: ListChange, uses: list[RowRange]) -> tuple[str, ...]:
    nodes, edges = _pair(*change.nodes), _pair(*change.edge_counts)
    ports = _pair(*change.programmatic)
    lines = [
        f"Captured, one layer: nodes {nodes}, edges {edges}, of which programmatic {ports}.",
        *edge_lines(change),
    ]
    entry = uses[0]
    at = f"{entry.arch}, q {entry.q}, {count(entry.rows[0], 'row')}"
    if entry.path_before == entry.path_after:
        lines.append(f"Predicted critical path at {at}, unchanged: {' > '.join(entry.path_after)}.")
    else:
        lines.append(f"Predicted critical path at {at}, before: {' > '.join(entry.path_before)}.")
        lines.append(f"Predicted critical path at {at}, after: {' > '.join(entry.path_after)}.")
    return tuple(lines)
