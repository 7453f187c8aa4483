"""A picture read back: boxes of its texts, poles of its flags, classes that it uses and defines.

Widths are those of the fonts that most viewers fall back to, measured there, not the estimate
that placed the texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import cos, radians, sin
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
MONO, SANS, BOLD = 0.602, 0.56, 0.62  # advance in units of the size: DejaVu, on average


@dataclass(frozen=True)
class Box:
    """A text's rectangle, from its ascent to its descent."""

    words: str
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


@dataclass(frozen=True)
class Picture:
    """What the tests look at."""

    width: float
    height: float
    boxes: tuple[Box, ...]  # of upright texts
    tilted: tuple[tuple[str, float, float, float, float], ...]  # words, x, y, far x, far y
    sizes: frozenset[float]
    poles: tuple[tuple[float, float, float], ...]  # x, upper and lower y
    classes: frozenset[str]
    defined: frozenset[str]
    titles: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return [box.words for box in self.boxes]


def read(text: str) -> Picture:
    """Parse a picture; ElementTree raises where it is not well-formed."""
    root = ElementTree.fromstring(text)
    boxes, tilted, poles, classes = [], [], [], set()
    sizes = set()
    for node in root.iter():
        names = node.get("class", "").split()
        classes |= set(names)
        if node.tag == f"{SVG}text":
            x, y, size = (float(node.get(key, "")) for key in ("x", "y", "font-size"))
            sizes.add(size)
            words = node.text or ""
            advance = MONO if "m" in names else BOLD if "b" in names else SANS
            long = len(words) * size * advance
            turn = re.match(r"rotate\((-?\d+)", node.get("transform", ""))
            if turn:
                angle = radians(float(turn[1]))
                tilted.append((words, x, y, x + long * cos(angle), y + long * sin(angle)))
                continue
            shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[node.get("text-anchor", "start")]
            left = x - shift * long
            boxes.append(Box(words, left, y - 0.76 * size, left + long, y + 0.22 * size))
        elif "lead" in names:
            a, b, c, d = map(float, re.findall(r"-?[\d.]+", node.get("d", "")))
            assert a == c
            poles.append((a, min(b, d), max(b, d)))
    style = root.findtext(f"{SVG}style") or ""
    light = style.partition("@media")[0]
    return Picture(
        float(root.get("width", "")),
        float(root.get("height", "")),
        tuple(boxes),
        tuple(tilted),
        frozenset(sizes),
        tuple(poles),
        frozenset(classes),
        frozenset(re.findall(r"\.([a-z][\w-]*)", light)),
        tuple(node.text or "" for node in root.iter(f"{SVG}title")),
    )
