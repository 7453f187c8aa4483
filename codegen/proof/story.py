"""A race in words, and as a timeline: one execution that the documents allow, with the two
accesses colliding."""

from __future__ import annotations

from collections.abc import Sequence

from kpipe.codegen.proof.instants import LETTERS, Point, begin, end, point
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Access, Copy, Kernel, Program
from kpipe.codegen.proof.races import Race, Site

WIDTH = 100  # columns of a line, at most
NAME_WIDTH = 20
PITCH = 3  # columns from one instant to the next
LEGEND = (
    "S start, W wait returns, T last trigger, X last exit, E stores visible; = access in flight"
)
CODES = {"RAW": "KP301", "WAR": "KP302", "WAW": "KP303"}
_VERBS = {
    "RAW": ("reads", "has written it"),
    "WAR": ("rewrites", "has read it"),
    "WAW": ("writes", "has written it"),
}


def race_sentence(race: Race, first: str, second: str) -> str:
    """What the second does before the first has done with the memory."""
    verb, done = _VERBS[race.kind]
    return f"{second} {verb} `{race.declared}` before {first} {done}"


def race_story(program: Program, race: Race, silent: Sequence[int]) -> tuple[str, ...]:
    """The race as lines of at most 100 columns: one per launch in host order, then the letters.

    The instants stand in the order of one allowed execution, the one in which the second access
    begins as early as it may: everything ordered ahead of its begin, the begin, and then the rest
    by host order.  A stretch of `=` is the time in which the access may happen.  `silent` are the
    launches that start early and never wait; the last one between the two is shown.  An instant
    that coincides with another (W with S, T with X) is left out.
    """
    order = Order(program, fences=race.assumption == "fence")
    first, second = race.first[0], race.second[0]
    between = [position for position in silent if first < position < second][-1:]
    shown = [first, *between, second]
    columns = _columns(order, shown, (second, begin(*_site(program, race.second))))
    buffer = race.declared
    rows = []
    for label, position in zip(_labels(len(shown)), shown, strict=True):
        letters = {p[1]: column for p, column in columns.items() if p[0] == position}
        node = program.launches[position].node
        if position in between:
            rows.append((label, node.name, _bar(letters, "", ""), "never waits"))
            continue
        site = race.first if position == first else race.second
        access = _site(program, site)[1]
        opens, closes = begin(node, access), end(access)
        verb = "writes" if access.write else "reads"
        when = f"until {closes}" if position == first else f"from {opens}"
        rows.append((label, node.name, _bar(letters, opens, closes), f"{verb} `{buffer}` {when}"))
    return (*_aligned(rows), LEGEND)


def _labels(count: int) -> tuple[str, ...]:
    return ("first", "second") if count == 2 else ("first", "between", "second")


def _site(program: Program, site: Site) -> tuple[Kernel | Copy, Access]:
    node = program.launches[site[0]].node
    return node, node.accesses[site[1]]


def _columns(order: Order, shown: Sequence[int], opening: Point) -> dict[Point, int]:
    """The column of each distinct instant of the launches, in the execution described above."""
    numbers = {order.number((position, letter)) for position in shown for letter in LETTERS}
    points = {number: point(number) for number in sorted(numbers)}
    # Numbers grow along every edge, so both halves are in an allowed order.
    ahead = [n for n in points if order.ordered(points[n], opening)]
    rest = [n for n in points if n not in ahead]
    return {points[n]: PITCH * place for place, n in enumerate([*ahead, *rest])}


def _bar(letters: dict[str, int], opens: str, closes: str) -> str:
    """`   S--W==X--E`: letters in their columns, the stretch from `opens` to `closes` marked."""
    start, stop = min(letters.values()), max(letters.values())
    cells = [" "] * start + ["-"] * (stop - start + 1)
    if opens:
        for column in range(letters[opens], letters[closes]):
            cells[column] = "="
    for letter, column in letters.items():
        cells[column] = letter
    return "".join(cells)


def _aligned(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    named = [(label, _clipped(name, NAME_WIDTH), bar, text) for label, name, bar, text in rows]
    widths = [max(len(row[column]) for row in named) for column in range(3)]
    return [
        _clipped(
            "  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3])), WIDTH
        )
        for row in named
    ]


def _clipped(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
