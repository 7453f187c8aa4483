"""What the exchanges of a layer cost as NCCL collectives: the form without mailboxes.

Per layer: all-gather of the query heads, all-gather of the candidates, all-to-all of the partial
latents and of their log-sum-exps, all-reduce of the output.  The collectives alone are timed, one
behind the other in a graph over several layers: a layer in that form takes at least this much on
top of its kernels.  NVLink multicast is off, for NCCL as for the mailboxes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kpipe.runtime.generated_folder import geometry_of
from rank_parts.rank import Rank

ROWS = (1, 4, 16, 64)
LAYERS, REPLAYS = 4, 100


def run(rank: Rank) -> dict[str, Any]:
    """Each collective, and all of a layer, at each number of rows."""
    dist_group = dist.new_group(backend="nccl")
    found: list[dict[str, Any]] = []
    for rows in ROWS:
        calls = exchanges(rank, rows, dist_group)
        record: dict[str, Any] = {"rows": rows}
        for name, runs in (
            {"layer": list(calls.values())} | {n: [c] for n, c in calls.items()}
        ).items():
            record[name] = _us(rank, runs)
        found.append(record)
        rank.save("collectives", {"complete": False, "layers": found})
    text = [f"{one['rows']} rows: {one['layer']['us']:.1f} us a layer" for one in found]
    return {"ok": True, "layers_in_graph": LAYERS, "layers": found, "text": text}


def exchanges(rank: Rank, rows: int, group: Any) -> dict[str, Callable[[], object]]:
    """The collectives of one layer by name, on buffers of their own."""
    geometry, ranks = geometry_of(rank.layer_class), rank.ranks
    heads, latent = geometry.heads(ranks), geometry.kv_lora + geometry.pe

    def buffer(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=rank.device)

    def gather(*shape: int, dtype: torch.dtype = torch.uint8) -> Callable[[], object]:
        mine, whole = buffer(*shape, dtype=dtype), buffer(ranks, *shape, dtype=dtype)
        return lambda: dist.all_gather_into_tensor(whole, mine, group=group)

    def swap(*shape: int, dtype: torch.dtype) -> Callable[[], object]:
        sent, come = buffer(ranks, *shape, dtype=dtype), buffer(ranks, *shape, dtype=dtype)
        return lambda: dist.all_to_all_single(come, sent, group=group)

    out = buffer(rows, geometry.hidden, dtype=torch.bfloat16)
    return {
        "all-gather of queries": gather(rows, heads, latent),
        "all-gather of candidates": gather(rows, geometry.top_k, 2, dtype=torch.int32),
        "all-to-all of partials": swap(rows, heads, geometry.kv_lora, dtype=torch.bfloat16),
        "all-to-all of log-sum-exps": swap(rows, heads, dtype=torch.float32),
        "all-reduce of outputs": lambda: dist.all_reduce(out, group=group),
    }


def _us(rank: Rank, runs: list[Callable[[], object]]) -> dict[str, Any]:
    """Microseconds of one turn through `runs`, captured where NCCL allows it, else eager."""
    turns = [run for _ in range(LAYERS) for run in runs]
    for run in runs:
        run()
    rank.barrier("collectives warm")
    problem = ""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            for run in turns:
                run()
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    if any(rank.told("captured", problem)):
        return _eager_us(rank, turns) | {"captured": False, "why": problem}
    rank.barrier("collectives captured")
    times = rank.slowest_us(graph, REPLAYS)
    return {
        "us": times["us"] / LAYERS,
        "us_by_rank": [us / LAYERS for us in times["us_by_rank"]],
        "captured": True,
    }


def _eager_us(rank: Rank, turns: list[Callable[[], object]]) -> dict[str, Any]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rank.barrier("eager")
    start.record()
    for _ in range(REPLAYS):
        for run in turns:
            run()
    end.record()
    rank.synchronize()
    mine = start.elapsed_time(end) * 1e3 / REPLAYS / LAYERS
    by_rank = rank.told("eager", mine)
    return {"us": max(by_rank), "us_by_rank": by_rank}
