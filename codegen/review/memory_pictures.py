"""The memory of a launch list as text and as SVG: its scratch buffers, and its mailboxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kpipe.codegen.review import svg
from kpipe.codegen.review.buffer_lifetimes import SHARED, Lifetime, Lifetimes
from kpipe.codegen.review.captions import Caption, heading, text_heading, wrapped
from kpipe.codegen.review.grid import Grid, GridRow, grid_svg, grid_text, grid_width
from kpipe.codegen.review.mailbox_phases import MEANING, Phases

MIB = 2**20
BUFFERS_ABOUT = (
    "W writes, R reads, U does both; shaded from the first to the last, in the order of issue. "
    "Indented are columns of the buffer above."
)


@dataclass(frozen=True)
class MemoryView:
    """A table of memory, what is said above it and below it."""

    caption: Caption
    facts: str
    grid: Grid
    numbers: str  # what the numbers of the text's columns stand for
    about: tuple[str, ...]


def buffers_view(caption: Caption, found: Lifetimes, rows_cap: int) -> MemoryView:
    """The scratch buffers of a launch list over its launches; sizes are for `rows_cap` rows."""
    rows = tuple(
        GridRow(
            piece.name,
            piece.touches,
            ((piece.first, piece.last),) if piece.first >= 0 else (),
            (piece.shape, piece.dtype, _mib(piece), "" if piece.inner else piece.scope),
            inner=bool(piece.inner),
            title=_story(piece, found),
        )
        for piece in found.pieces
    )
    facts = (
        f"{found.total / MIB:.2f} MiB at {rows_cap} rows, of which at most {found.live / MIB:.2f} "
        "MiB hold something that is still read"
    )
    scopes = dict.fromkeys(piece.scope for piece in found.pieces)
    shared = "; ".join(f"{scope}: {SHARED.get(scope, scope)}" for scope in scopes)
    grid = Grid(found.launches, ("",), rows, ("shape", "dtype", "MiB", "scope"))
    return MemoryView(
        caption, facts, grid, _numbered(found.launches), (BUFFERS_ABOUT, f"Scope {shared}.")
    )


def mailbox_view(caption: Caption, found: Phases) -> MemoryView:
    """The copies of every mailbox over consecutive layers."""
    groups = tuple(f"layer {layer}" for layer in range(found.layers))
    rows = tuple(
        GridRow(
            f"{copy.box} {copy.parity}",
            copy.acts,
            copy.spans,
            title=f"{copy.box}, parity {copy.parity}: layers with number % parities = "
            f"{copy.parity} use it",
        )
        for copy in found.copies
    )
    facts = f"{found.bytes / MIB:.2f} MiB a rank, {len(found.ops)} ops a layer touch a mailbox"
    grid = Grid(found.ops * found.layers, groups, rows)
    return MemoryView(caption, facts, grid, _numbered(found.ops), (MEANING, *found.facts))


def _mib(piece: Lifetime) -> str:
    if piece.inner:
        return ""
    size = f"{piece.bytes / MIB:.2f}"
    return "<0.01" if size == "0.00" and piece.bytes else size


def _story(piece: Lifetime, found: Lifetimes) -> str:
    verbs = {"W": "writes", "R": "reads", "U": "reads and writes"}
    touched = [
        f"{name} {verbs[letter]}"
        for name, letter in zip(found.launches, piece.touches, strict=True)
        if letter
    ]
    return f"{piece.name}: " + (", ".join(touched) or "no launch of this list touches it")


def _numbered(names: Sequence[str]) -> str:
    return "  ".join(f"{number}:{name}" for number, name in enumerate(names, 1))


def memory_text(views: Sequence[MemoryView]) -> str:
    """One table a launch list, what holds for all of them at the end where it is the same."""
    same = len({view.about for view in views}) == 1
    parts = []
    for view in views:
        lines = [*text_heading(view.caption), *wrapped(view.facts), *wrapped(view.numbers), ""]
        lines += grid_text(view.grid)
        parts.append(lines if same else [*lines, "", *_about(view)])
    foot = [_about(views[0])] if same else []
    return "\n\n".join("\n".join(lines) for lines in [*parts, *foot]) + "\n"


def _about(view: MemoryView) -> list[str]:
    return [line for words in view.about for line in wrapped(words, "  ")]


def memory_svg(views: Sequence[MemoryView], what: str) -> str:
    """One picture of the tables, one below the other; `what` names it for a screen reader."""
    width = max(svg.WIDTH, *(grid_width(view.grid) for view in views))
    parts: list[str] = []
    top = 0.0
    for view in views:
        parts += heading(view.caption, view.facts, "", top, width)
        drawn, bottom = grid_svg(view.grid, top + 68)
        about = [
            line
            for words in view.about
            for line in svg.wrapped(words, svg.SMALL, width - 2 * svg.PAD)
        ]
        parts += [*drawn, *svg.paragraph(svg.PAD, bottom + 24, about)]
        top = bottom + 24 + 16 * len(about) + 14
    return svg.document(top, f"{views[0].caption.pipeline}: {what}", parts, width)
