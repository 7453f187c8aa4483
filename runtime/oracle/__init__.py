"""Independent oracle of the DSA decode layer: float64, all heads, no staging, no runtime code."""

from __future__ import annotations
