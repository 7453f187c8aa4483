"""Tables over rows: one reader for every table of the language.

A table is a single value, or a mapping from row ranges to values; above the ranges it may be
keyed by architecture and by query length.  It is total over the declared rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingType
from dataclasses import dataclass

from kpipe.codegen.diagnostics import Span
from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.document import Mapping, Node
from kpipe.codegen.spec.rows import RowRange, check_table, lookup

_ARCH = re.compile(r"^sm_\d+[af]?$")
_QUERY = re.compile(r"^q\d+$")
_RANGE = re.compile(r"^[\d\s]")


@dataclass(frozen=True)
class Cell:
    """One entry: the value node and the span of its key (or of the whole table)."""

    value: Node
    span: Span


@dataclass(frozen=True)
class Table:
    """Cells by architecture and query length."""

    cells: MappingType[tuple[str, int], tuple[tuple[RowRange | None, Cell], ...]]

    def at(self, arch: str, q: int, rows: int) -> Cell | None:
        """The cell of a step, or None where the table was refused."""
        entries = self.cells.get((arch, q), ())
        if len(entries) == 1 and entries[0][0] is None:
            return entries[0][1]
        found = lookup([row_range for row_range, _ in entries], rows) if entries else None
        return next((cell for row_range, cell in entries if row_range is found), None)

    def values(self) -> tuple[Cell, ...]:
        """Every cell once, in file order."""
        seen: dict[int, Cell] = {}
        for entries in self.cells.values():
            for _, cell in entries:
                seen.setdefault(id(cell.value), cell)
        return tuple(sorted(seen.values(), key=lambda cell: (cell.span.line, cell.span.column)))


def read_table(
    node: Node,
    where: str,
    targets: tuple[str, ...],
    rows_by_query: MappingType[int, tuple[int, ...]],
    report: Report,
) -> Table:
    """A table of the spec, checked to be total; errors go to the report."""
    cells: dict[tuple[str, int], tuple[tuple[RowRange | None, Cell], ...]] = {}
    by_arch = _keyed(node, _ARCH)
    if by_arch:
        _unused_keys(by_arch, targets, "targets", where, report)
    for arch in targets:
        arch_node = _choose(node, by_arch, arch, where, report)
        if arch_node is None:
            continue
        by_query = _keyed(arch_node, _QUERY)
        if by_query:
            words = [f"q{q}" for q in rows_by_query]
            _unused_keys(by_query, words, "rows.queries", where, report)
        for q, declared in rows_by_query.items():
            query_node = _choose(arch_node, by_query, f"q{q}", where, report)
            if query_node is None:
                continue
            every = _union(rows_by_query) if not by_query else declared
            cells[(arch, q)] = _rows(query_node, where, every, report)
    return Table(cells)


def _union(rows_by_query: MappingType[int, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({row for rows in rows_by_query.values() for row in rows}))


def _keyed(node: Node, pattern: re.Pattern[str]) -> dict[str, tuple[Span, Node]]:
    """Entries by key if any key is of that pattern; empty otherwise."""
    if not isinstance(node, Mapping) or not any(pattern.match(e.key) for e in node.entries):
        return {}
    return {entry.key: (entry.key_span, entry.value) for entry in node.entries}


def _choose(
    node: Node,
    keyed: dict[str, tuple[Span, Node]],
    key: str,
    where: str,
    report: Report,
) -> Node | None:
    if not keyed:
        return node
    if key not in keyed:
        report.error(
            "KP121",
            f"`{where}` says nothing for `{key}`",
            node.span,
            help=f"add `{key}: ...`",
        )
        return None
    return keyed[key][1]


def _unused_keys(
    keyed: dict[str, tuple[Span, Node]],
    known: tuple[str, ...] | list[str],
    source: str,
    where: str,
    report: Report,
) -> None:
    for key, (span, _) in keyed.items():
        if key not in known:
            report.error(
                "KP109",
                f"`{where}` has a key `{key}` that nothing reads: it is not in `{source}`",
                span,
                allowed=known,
                help=f"delete the entry, or add it to `{source}`",
            )


def _extended(report: Report) -> tuple[str, ...]:
    """Files below the one that declares the rows: it may declare fewer of them than they did."""
    source = report.source
    declares = source.span("rows", "batches").path
    return source.files[source.files.index(declares) + 1 :] if declares in source.files else ()


def _rows(
    node: Node, where: str, declared: tuple[int, ...], report: Report
) -> tuple[tuple[RowRange | None, Cell], ...]:
    entries = node.entries if isinstance(node, Mapping) else None
    if entries is None or (entries and not any(_RANGE.match(e.key) for e in entries)):
        return ((None, Cell(node, node.span)),)
    keys = [(entry.key, entry.key_span) for entry in entries]
    ranges, findings = check_table(keys, declared, where, node.span, _extended(report))
    report.extend(findings)
    if findings:
        return ()
    cells = [Cell(entry.value, entry.key_span) for entry in entries]
    return tuple((row_range, cells[row_range.entry]) for row_range in ranges)
