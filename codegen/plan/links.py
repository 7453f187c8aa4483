"""What carries words from one GPU to another, as far as a prediction needs it.

Bandwidths are the vendors' figures of one direction of all links of a GPU together; a stream of
16-byte stores reaches less.  Latencies are assumed.  A measurement replaces both: a JSON object
with the keys `peer_store_gb_s` and `one_way_latency_us`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

ASSUMED = "assumed"
KEYS = ("peer_store_gb_s", "one_way_latency_us")


@dataclass(frozen=True)
class Link:
    """Peer stores of one GPU: GB/s (10^9 bytes) to all its peers together, and us from a store to
    the poll that sees it.  `source` says where the two figures come from."""

    name: str
    peer_store_gb_s: float
    one_way_latency_us: float
    source: str = ASSUMED

    def journey(self, size: int) -> float:
        """Microseconds from the first of `size` bytes leaving to the last being seen."""
        return self.one_way_latency_us + size / (self.peer_store_gb_s * 1e3)


AT_ONCE = Link("no link", inf, 0.0, "words are always there")
"""For what a layer takes when it never waits for a word."""

LINKS: Mapping[str, Link] = {
    "sm_90a": Link("NVLink 4", 450.0, 1.5),
    "sm_100a": Link("NVLink 5", 900.0, 1.5),
    "sm_103a": Link("NVLink 5", 900.0, 1.5),
}
"""By architecture."""


def link_of(arch: str) -> Link:
    """The link that a prediction takes where nothing was measured."""
    return LINKS.get(arch, LINKS["sm_90a"])


def measured_link(data: Any, arch: str, source: str) -> Link:
    """The link of that architecture with the figures of a measurement, read from JSON.

    Raises ValueError, with what is wrong, unless both keys hold numbers that can be measured:
    finite, a bandwidth above 0 and a latency of at least 0.
    """
    if not isinstance(data, Mapping):
        raise ValueError("it is no JSON object")
    found = []
    for key, least in zip(KEYS, (1e-3, 0.0), strict=True):
        value = data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"`{key}` is {value!r}, not a number")
        if not isfinite(value) or value < least:
            raise ValueError(f"`{key}` is {value!r}: nothing that was measured")
        found.append(float(value))
    return Link(link_of(arch).name, *found, source)
