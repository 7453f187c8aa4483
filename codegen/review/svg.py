"""Pieces of a static SVG picture that is legible on a light and on a dark page.

A picture brings its own background and picks its colours by `prefers-color-scheme`; fonts are
generic.  Sizes are in pixels; the width of a text is the estimate of `width`, on the wide side, so
that what fits here fits with any fallback font.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

WIDTH = 1000.0  # of every picture
PAD = 20.0
SMALL, TEXT, HEAD = 11.0, 12.0, 15.0
ADVANCE = 0.61  # of a monospaced character, in units of its size
_PROPORTIONAL = 0.6  # of a proportional one, on the wide side

# Fill and stroke of each stage, light and dark.
_LIGHT = (
    ("#cfe1f7", "#2f6fb2"),
    ("#fbe9b0", "#9a7000"),
    ("#cfe8d2", "#36803f"),
    ("#f8d9bf", "#b05a15"),
    ("#e4d5f3", "#7648ad"),
    ("#c6e7e6", "#1d7776"),
    ("#f6d3e0", "#a83a68"),
    ("#dfe3e8", "#5c6672"),
)
_DARK = (
    ("#1f3f63", "#6ea8e6"),
    ("#4d3d10", "#d9b44a"),
    ("#1f4a2a", "#6fc483"),
    ("#57321a", "#e8965a"),
    ("#3f2b5a", "#b493e6"),
    ("#174646", "#5cc2c1"),
    ("#57233a", "#e885ab"),
    ("#343b44", "#9aa5b1"),
)
_PAGE_LIGHT = {
    "page": "#ffffff",
    "line": "#d5dae1",
    "grid": "#e6e9ee",
    "ink": "#1f2733",
    "soft": "#566170",
    "hot": "#c22f4d",
    "wall": "#3a424d",
    "pdl": "#0b66c3",
    "span": "#d7e6f7",
}
_PAGE_DARK = {
    "page": "#14181d",
    "line": "#39424d",
    "grid": "#262d35",
    "ink": "#e6e9ee",
    "soft": "#a6b0bc",
    "hot": "#ff7b8f",
    "wall": "#c9d1da",
    "pdl": "#6db1ff",
    "span": "#1f3a57",
}
# What a class means: rules that hold everywhere, and those with a colour of the page.
_FIXED = {
    "m": "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace",
    "b": "font-weight:600",
    "dash": "stroke-dasharray:4 3",
    "faint": "fill-opacity:.55;stroke-opacity:.55",
    "lead": "stroke-width:1",
    "link": "stroke-width:1.5;fill:none",
    "hot": "stroke-width:2.25;fill:none",
    "pdl": "stroke-width:1.75;fill:none",
    "badge": "fill:none",
    "halo": "paint-order:stroke;stroke-width:3",
}
_COLOURED = {
    "soft": "fill:{soft}",
    "page": "fill:{page};stroke:{line}",
    "grid": "stroke:{grid}",
    "axis": "stroke:{line}",
    "lead": "stroke:{soft}",
    "link": "stroke:{soft}",
    "hot": "stroke:{hot}",
    "pdl": "stroke:{pdl}",
    "wall": "fill:{wall}",
    "fill-soft": "fill:{soft}",
    "fill-hot": "fill:{hot}",
    "fill-pdl": "fill:{pdl}",
    "badge": "stroke:{soft}",
    "cell": "fill:{grid}",
    "halo": "stroke:{page}",
    "span": "fill:{span}",
}


def escape(words: str, *, quote: bool = True) -> str:
    """Text as XML content, or as the value of an attribute in double quotes."""
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return words.replace('"', "&quot;") if quote else words


def style(used: Collection[str]) -> str:
    """The style element for the classes `used`: light colours, and dark ones for a dark page.

    Raises KeyError for a class that has no rule.
    """
    known = {*_FIXED, *_COLOURED, *(f"s{number}" for number in range(len(_LIGHT)))}
    for name in used:
        if name not in known:
            raise KeyError(name)
    fixed = "".join(f".{name}{{{rule}}}" for name, rule in _FIXED.items() if name in used)
    light, dark = _colours(_PAGE_LIGHT, _LIGHT, used), _colours(_PAGE_DARK, _DARK, used)
    font = "text{font-family:ui-sans-serif,system-ui,'Segoe UI',sans-serif}"
    return f"<style>{font}{fixed}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"


def _colours(
    page: dict[str, str], stages: tuple[tuple[str, str], ...], used: Collection[str]
) -> str:
    rules = {name: rule.format(**page) for name, rule in _COLOURED.items()}
    for number, (fill, stroke) in enumerate(stages):
        rules[f"s{number}"] = f"fill:{fill};stroke:{stroke}"
    listed = "".join(f".{name}{{{rule}}}" for name, rule in rules.items() if name in used)
    return f"text{{fill:{page['ink']}}}{listed}"


def document(height: float, label: str, body: Iterable[str], width: float = WIDTH) -> str:
    """A whole picture of `width` x `height`; `label` is what a screen reader says."""
    size = f"{number(width)} {number(height)}"
    w, h = size.split()
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{w}" height="{h}" '
        f'role="img" aria-label="{escape(label)}">'
    )
    content = [rect(0.5, 0.5, width - 1, height - 1, "page", radius=8), *body]
    named = re.findall(r' class="([^"]*)"', "".join(content))
    used = {word for names in named for word in names.split()}
    whole = "\n".join([head, style(used), *content, "</svg>"]) + "\n"
    return whole.encode("ascii", "xmlcharrefreplace").decode()  # no encoding to guess


def number(value: float) -> str:
    """A coordinate with at most one digit behind the point; the same text everywhere."""
    words = f"{value:.1f}"
    if words[-2:] == ".0":
        words = words[:-2]
    return "0" if words == "-0" else words


def width(text: str, size: float, *, mono: bool = False) -> float:
    """Pixels that a text takes at most."""
    return len(text) * size * (ADVANCE if mono else _PROPORTIONAL)


def text(
    x: float,
    y: float,
    words: str,
    size: float = TEXT,
    *,
    mono: bool = False,
    anchor: str = "start",
    kind: str = "",
    tilt: int = 0,
) -> str:
    """One line of text with its baseline at `y`; `kind` are classes such as `soft` or `b`.

    `tilt` are degrees by which it is turned around its start, clockwise.
    """
    classes = " ".join(filter(None, ("m" if mono else "", kind)))
    named = f' class="{classes}"' if classes else ""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    place = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}"'
    if tilt:
        place += f' transform="rotate({tilt} {number(x)} {number(y)})"'
    return f'<text {place}{named}{where} xml:space="preserve">{escape(words, quote=False)}</text>'


def paragraph(x: float, y: float, lines: Iterable[str], *, mono: bool = False) -> list[str]:
    """Small lines of text, the first with its baseline at `y`, 16 pixels apart."""
    kind = "" if mono else "soft"
    return [
        text(x, y + 16 * count, words, SMALL, mono=mono, kind=kind)
        for count, words in enumerate(lines)
    ]


def rect(x: float, y: float, w: float, h: float, kind: str, *, radius: float = 0) -> str:
    """A rectangle of the classes `kind`."""
    corner = f' rx="{number(radius)}"' if radius else ""
    size = f'width="{number(w)}" height="{number(h)}"'
    return f'<rect x="{number(x)}" y="{number(y)}" {size}{corner} class="{kind}"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<path d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}" class="{kind}"/>'


def path(points: str, kind: str) -> str:
    """A path, its data ready made."""
    return f'<path d="{points}" class="{kind}"/>'


def head(x: float, y: float, kind: str, towards: str = "right", size: float = 4.5) -> str:
    """An arrow head with its tip at a point."""
    dx, dy = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}[towards]
    back_x, back_y = x - dx * 1.6 * size, y - dy * 1.6 * size
    a = f"{number(back_x + dy * size)} {number(back_y + dx * size)}"
    b = f"{number(back_x - dy * size)} {number(back_y - dx * size)}"
    return f'<path d="M{number(x)} {number(y)}L{a}L{b}Z" class="{kind}"/>'


def titled(title: str, parts: Iterable[str]) -> str:
    """A group that shows `title` under the pointer."""
    return f"<g><title>{escape(title, quote=False)}</title>{''.join(parts)}</g>"


def badge(right: float, baseline: float, words: str, kind: str) -> str:
    """A pill whose right end is at `right`."""
    long = 1.12 * width(words, SMALL) + 18  # bold
    pill = rect(right - long, baseline - 14, long, 20, kind, radius=10)
    return pill + text(right - long / 2, baseline, words, SMALL, anchor="middle", kind="b")


def wrapped(words: str, size: float, room: float, *, mono: bool = False) -> list[str]:
    """Lines of at most `room` pixels, broken at spaces; a longer word stands alone."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width(longer, size, mono=mono) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
