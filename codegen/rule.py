"""What the catalogue says of one rule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One rule of the catalogue; `bad` is an excerpt, `repair` one sentence or two."""

    code: str
    name: str
    why: str
    bad: str
    repair: str
