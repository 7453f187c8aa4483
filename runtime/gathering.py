"""What the ranks of a group of processes hold after a run, brought together on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kpipe.runtime.comm.processes import Processes
from kpipe.runtime.layer import Layer
from kpipe.runtime.oracle.caches import PagedBytes
from kpipe.runtime.prepared import RankRun


def gathered(
    processes: Processes, layer_class: type[Layer], here: Sequence[Sequence[RankRun]]
) -> list[list[RankRun]]:
    """By rank, what every layer has left, on rank 0; nothing on the others.

    `here` holds this rank's runs alone.  They travel through files of the group's folder.  Raises
    RankAborted where another rank has failed.
    """
    (mine,) = here
    path = processes.folder / f"results-{processes.rank}"
    if processes.rank:
        torch.save([_plain(run) for run in mine], path)
    processes.barrier("results")
    if processes.rank:
        processes.barrier("results taken")
        path.unlink()
        return []
    found = [list(mine)]
    for rank in range(1, processes.ranks):
        held = torch.load(processes.folder / f"results-{rank}", weights_only=True)
        found.append([_run(layer_class, plain) for plain in held])
    processes.barrier("results taken")
    return found


def _plain(run: RankRun) -> dict[str, Any]:
    """A run without its layer, as tensors, numbers and text."""
    return {
        "rank": run.rank,
        "method": run.method,
        "views": vars(run.views),
        "out": run.out,
        "latent": vars(run.latent),
        "index": vars(run.index),
        "unstable": run.unstable,
    }


def _run(layer_class: type[Layer], plain: dict[str, Any]) -> RankRun:
    """The run again; its layer is not prepared, and only says what its class does."""
    return RankRun(
        plain["rank"],
        layer_class(),
        plain["method"],
        SimpleNamespace(**plain["views"]),
        plain["out"],
        PagedBytes(**plain["latent"]),
        PagedBytes(**plain["index"]),
        plain["unstable"],
    )
