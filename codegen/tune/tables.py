"""Edits of a table over rows in the text of a spec: only the cells that change, comments kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kpipe.codegen.diagnostics import Edit, Span
from kpipe.codegen.edits import lines_of
from kpipe.codegen.spec.document import Mapping as MappingNode
from kpipe.codegen.spec.document import Node
from kpipe.codegen.spec.document import Sequence as SequenceNode

Cells = Mapping[tuple[str, int], Mapping[int, str]]  # (arch, q) -> rows -> text of the value


class CannotEdit(ValueError):
    """A table whose text cannot be changed without losing something; `span` is its place."""

    def __init__(self, message: str, span: Span) -> None:
        super().__init__(message)
        self.span = span


@dataclass(frozen=True)
class TableText:
    """A table as it is written: its node, and which keys stand above its rows."""

    node: Node
    text: str  # of the whole file
    by_arch: bool
    by_query: bool

    def leaf(self, arch: str, q: int) -> Node:
        """The part for one architecture and query length."""
        node = self.node
        for keyed, key in ((self.by_arch, arch), (self.by_query, f"q{q}")):
            entry = node.entry(key) if keyed and isinstance(node, MappingNode) else None
            node = entry.value if entry else node
        return node


def row_entries(values: Mapping[int, str]) -> list[tuple[str, str]]:
    """Range and value of each run of equal values; a range begins behind the one before."""
    counts = sorted(values)
    runs: list[list[int]] = []
    for count in counts:
        if runs and values[runs[-1][-1]] == values[count]:
            runs[-1].append(count)
        else:
            runs.append([count])
    entries, first = [], counts[0]
    for run in runs:
        last = run[-1]
        entries.append((f"{first}-{last}" if first < last else str(last), values[last]))
        first = last + 1
    return entries


def flow(entries: Sequence[tuple[str, str]], *, quoted: bool = True) -> str:
    """`{"1-4": front, "5-64": fork}`."""
    mark = '"' if quoted else ""
    return "{" + ", ".join(f"{mark}{key}{mark}: {value}" for key, value in entries) + "}"


def table_edits(table: TableText, old: Cells, new: Cells, queries: bool) -> list[Edit]:
    """Edits that make the table say `new` where it says `old`; nothing where they are equal.

    `queries`: whether the table may be keyed by query length.  Raises CannotEdit where a comment
    inside would be lost.
    """
    changed = [key for key in new if new[key] != old[key]]
    if not changed:
        return []
    alone = {key: [k for k in new if table.leaf(*k) is table.leaf(*key)] for key in changed}
    if all(_agree(new, keys) for keys in alone.values()):
        leaves = {id(table.leaf(*key)): key for key in changed}
        return [edit for key in leaves.values() for edit in _leaf_edits(table, key, old, new)]
    _refuse_comments(table.text, table.node)
    return [Edit(table.node.span, table_text(new, queries))]


def _agree(cells: Cells, keys: Sequence[tuple[str, int]]) -> bool:
    """Whether these parts can share one leaf: no row count has two values."""
    seen: dict[int, str] = {}
    return all(
        seen.setdefault(count, value) == value
        for key in keys
        for count, value in cells[key].items()
    )


def table_text(cells: Cells, queries: bool) -> str:
    """The whole table in one line, keyed by what its values depend on."""
    archs = list(dict.fromkeys(arch for arch, _ in cells))
    texts = {}
    for arch in archs:
        parts = {q: rows for (place, q), rows in cells.items() if place == arch}
        if queries and len(parts) > 1:
            listed = [(f"q{q}", flow(row_entries(rows))) for q, rows in parts.items()]
            texts[arch] = flow(listed, quoted=False)
        else:
            merged = {count: text for rows in parts.values() for count, text in rows.items()}
            texts[arch] = flow(row_entries(merged))
    if len(set(texts.values())) == 1:
        return texts[archs[0]]
    return flow(list(texts.items()), quoted=False)


def _leaf_edits(table: TableText, key: tuple[str, int], old: Cells, new: Cells) -> list[Edit]:
    leaf = table.leaf(*key)
    shared = [k for k in new if table.leaf(*k) is leaf]
    before = {count: text for k in shared for count, text in old[k].items()}
    after = {count: text for k in shared for count, text in new[k].items()}
    one_line = leaf.span.line == leaf.span.end_line
    if one_line or not isinstance(leaf, MappingNode):
        return [Edit(leaf.span, flow(row_entries(after)))]
    return _cell_edits(table.text, leaf, before, after)


def _cell_edits(
    text: str, leaf: MappingNode, before: Mapping[int, str], after: Mapping[int, str]
) -> list[Edit]:
    """Entry by entry, so that what stands between them stays."""
    from kpipe.codegen.spec.rows import parse_range

    block = not is_flow(text, leaf)
    edits = []
    for entry in leaf.entries:
        inside = parse_range(entry.key)
        counts = [count for count in sorted(after) if count in inside]
        if all(before[count] == after[count] for count in counts):
            continue
        listed = row_entries({count: after[count] for count in counts})
        first = listed[0][0].partition("-")
        begin = str(inside.first)
        if first[0] != begin:  # the range may begin at a count that is not declared
            last = first[2] or first[0]
            listed[0] = (f"{begin}-{last}", listed[0][1])
        between = "\n" + " " * (entry.key_span.column - 1) if block else ", "
        start, end = entry.key_span, entry.value.span
        span = Span(start.path, start.line, start.column, end.end_line, end.end_column)
        edits.append(Edit(span, between.join(f'"{k}": {v}' for k, v in listed)))
    return edits


def is_flow(text: str, node: Node) -> bool:
    """Whether a mapping or list is written in braces or brackets."""
    return lines_of(text)[node.span.line - 1][node.span.column - 1 :].startswith(("{", "["))


def _refuse_comments(text: str, node: Node) -> None:
    """A text that spans lines is replaced only where no line of it has a comment."""
    span = node.span
    if span.line == span.end_line:
        return
    lines = lines_of(text)
    for number in range(span.line, span.end_line + 1):
        if number - 1 < len(lines) and "#" in lines[number - 1]:
            place = Span(span.path, number, 1, number, len(lines[number - 1]) + 1)
            raise CannotEdit(
                "the table has to be keyed anew, and a comment inside it would be lost", place
            )


def last_line(text: str, node: Node) -> int:
    """The line on which a node's own text ends, without the lines behind it."""
    if isinstance(node, MappingNode) and node.entries and not is_flow(text, node):
        return last_line(text, node.entries[-1].value)
    if isinstance(node, SequenceNode) and node.items and not is_flow(text, node):
        return last_line(text, node.items[-1])
    return node.span.end_line


def add_entry(text: str, mapping: MappingNode, lines: Sequence[str]) -> Edit:
    """A further entry of a mapping, given as its lines without margin; one for a flow mapping."""
    last = mapping.entries[-1]
    path = mapping.span.path
    if is_flow(text, mapping):
        span = last.value.span
        place = Span(path, span.end_line, span.end_column, span.end_line, span.end_column)
        return Edit(place, f", {lines[0]}")
    number = last_line(text, mapping)
    end = len(lines_of(text)[number - 1]) + 1
    margin = "\n" + " " * (mapping.entries[0].key_span.column - 1)
    return Edit(Span(path, number, end, number, end), "".join(f"{margin}{line}" for line in lines))
