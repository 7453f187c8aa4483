"""The time of a layer on ranks that have a GPU each: graphs of several layers, back to back."""

from __future__ import annotations

from typing import Any

from rank_parts.rank import Rank

ROWS = (1, 4, 16, 64)
CONTEXT, LAYERS, REPLAYS = 32768, 4, 100


def run(rank: Rank) -> dict[str, Any]:
    """Microseconds a layer at each number of rows; the slowest rank of every replay counts."""
    found: list[dict[str, Any]] = []
    for rows in ROWS:
        layers = rank.layers(rows, 1, CONTEXT, LAYERS)
        graph = rank.captured([one.run for one in layers])
        times = rank.slowest_us(graph, REPLAYS)
        found.append(
            {
                "rows": rows,
                "method": rank.layer_class.TABLE[(rank.arch, 1)][rows],
                "us": times["us"] / LAYERS,
                "us_by_rank": [us / LAYERS for us in times["us_by_rank"]],
            }
        )
        rank.save("times", {"complete": False, "layers": found})
        del layers, graph
    text = [f"{one['rows']} rows: {one['us']:.1f} us a layer" for one in found]
    about = {"context": CONTEXT, "layers_in_graph": LAYERS, "replays": REPLAYS}
    return {"ok": True, **about, "layers": found, "text": text}
