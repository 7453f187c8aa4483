"""One shot or two: the output projection and its sum over the ranks, at every number of rows.

Both forms of `o_proj` and `o_reduce` run on real ranks, chained over layers with weights of their
own; their outputs are compared with each other and between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kpipe.runtime.bench_inputs import TimedLayer
from rank_parts.rank import Rank

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
LAYERS, REPLAYS = 4, 100
CONTEXT = 64
BOUND = 2.0**-7
"""A BF16 sum of BF16 sums against a BF16 sum, relative to the largest value."""


def run(rank: Rank) -> dict[str, Any]:
    """Microseconds a layer of each form, and from which row on two shots are faster."""
    layers = rank.layers(max(rank.layer_class.TABLE[(rank.arch, 1)]), 1, CONTEXT, LAYERS)
    generator = torch.Generator(rank.device).manual_seed(50 + rank.number)
    gated = layers[0].layer.buffers["gated"]
    gated.copy_(torch.randn(gated.shape, generator=generator, device=rank.device))
    found: list[dict[str, Any]] = []
    for rows in (rows for rows in ROWS if rows <= gated.shape[0]):
        outs: dict[str, torch.Tensor] = {}
        record: dict[str, Any] = {"rows": rows}
        for name, two_shot in (("one_shot", False), ("two_shot", True)):
            runs = [_launches(one, rows, two_shot) for one in layers]
            graph = rank.captured(runs)
            times = rank.slowest_us(graph, REPLAYS)
            record[name] = {"us": times["us"] / LAYERS}
            outs[name] = layers[0].step.out[:rows].clone()
        record["error"] = _error(outs["two_shot"], outs["one_shot"])
        record["same_on_ranks"] = _same(rank, outs)
        found.append(record)
        rank.save("crossover", {"complete": False, "rows": found})
    ok = all(one["error"] <= BOUND and all(one["same_on_ranks"].values()) for one in found)
    text = [
        f"{one['rows']} rows: one shot {one['one_shot']['us']:.1f} us, "
        f"two shots {one['two_shot']['us']:.1f} us"
        for one in found
    ]
    first = next((o["rows"] for o in found if o["two_shot"]["us"] < o["one_shot"]["us"]), None)
    text.append(f"two shots are faster from {first} rows on" if first else "one shot is faster")
    return {"ok": ok, "rows": found, "two_shot_from": first, "text": text}


def _launches(one: TimedLayer, rows: int, two_shot: bool) -> Callable[[], object]:
    """The two launches of a layer as its generated methods write them."""
    layer: Any = one.layer
    at, out = layer.views(rows), one.step.out[:rows]

    def body() -> None:
        layer._views = at
        if two_shot:
            layer.o_proj(at.gated, o_mail=at.o_mail, two_shot=True)
            layer.o_reduce(at.o_mail, out, o_gather=at.o_gather, two_shot=True, pdl=False)
        else:
            layer.o_proj(at.gated, o_mail=at.o_mail)
            layer.o_reduce(at.o_mail, out, pdl=False)

    return body


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    scale = wanted.float().abs().max().clamp(min=1e-20)
    return float((found.float() - wanted.float()).abs().max() / scale)


def _same(rank: Rank, outs: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Whether every rank holds the same bits, by a sum of them weighted by place."""
    found = {}
    for name, out in outs.items():
        bits = out.view(torch.int16).long().reshape(-1)
        places = torch.arange(1, bits.numel() + 1, device=bits.device)
        sums = rank.told(f"bits of {name}", int((bits * places).sum()))
        found[name] = len(set(sums)) == 1
    return found
