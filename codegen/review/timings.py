"""Times that `kpipe bench --out` has measured, for the pictures of a schedule.

Such a file may also lie in a generated folder's `evidence/`, where it is found without being
named.  Its times count for one architecture and for the kernels with which they were taken; where
the file says by hash which those were and the folder holds others, they are left aside.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kpipe.codegen.evidence import kernel_digest, same_blocks
from kpipe.codegen.plan.cost import CONTEXT
from kpipe.codegen.plan.model import PipelinePlan, StepPlan

LAYER = "layer"  # what a whole layer is called among the times
_ARCHS = {"H100": "sm_90a", "H200": "sm_90a", "B200": "sm_100a", "GB200": "sm_100a"}
_KEYS = {"pipeline": str, "what": str, "method": str, "rows": int, "q": int, "context": int}


class TimingsError(ValueError):
    """A file of times that cannot be used; the text says why."""


@dataclass(frozen=True)
class Timings:
    """One file of times: `entries` as the file has them, each with the keys of `_KEYS` and `us`.

    `kernels` are what the kernels that ran were made of, as in evidence: name -> digest and device
    blocks; empty where the file does not say.
    """

    gpu: str
    arch: str
    entries: tuple[Mapping[str, Any], ...] = field(repr=False)
    kernels: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Times of one step: us by launch name, of the whole layer (None where it was not timed)."""

    gpu: str
    context: int
    launches: Mapping[str, float]
    layer: float | None


def read_timings(path: Path) -> Timings | None:
    """The times of a file; None for JSON that holds none, such as other evidence.

    Raises TimingsError for what cannot be read or has times that are not as `kpipe bench` writes
    them.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise TimingsError(error.strerror or "cannot be read") from None
    except ValueError:
        raise TimingsError("it is not JSON") from None
    if not isinstance(data, dict) or "timings" not in data:
        return None
    gpu, entries = data.get("gpu"), data["timings"]
    if not isinstance(gpu, str) or not isinstance(entries, list):
        raise TimingsError("`gpu` and `timings` are not what `kpipe bench --out` writes")
    for entry in entries:
        if not isinstance(entry, dict) or not _complete(entry):
            raise TimingsError(f"entry {entry!r:.60} of `timings` lacks a name, a number or `us`")
    arch = data.get("arch") or _ARCHS.get(gpu.split()[-1] if gpu else "", "")
    return Timings(gpu, arch, tuple(entries), data.get("kernels") or {})


def _complete(entry: Mapping[str, Any]) -> bool:
    us = entry.get("us")
    known = all(isinstance(entry.get(key), kind) for key, kind in _KEYS.items())
    return known and isinstance(us, int | float) and us > 0


def evidence_timings(folder: Path) -> tuple[Timings, ...]:
    """The times among a generated folder's evidence; files that cannot be used say nothing."""
    found = []
    for path in sorted((folder / "evidence").glob("*.json")):
        try:
            timings = read_timings(path)
        except TimingsError:
            continue
        if timings is not None:
            found.append(timings)
    return tuple(found)


def measured_rows(all_timings: Iterable[Timings], pipeline: str, arch: str) -> tuple[int, ...]:
    """Row counts of the pipeline for which there are times on the architecture."""
    return tuple(
        sorted(
            {
                entry["rows"]
                for timings in all_timings
                if timings.arch == arch
                for entry in timings.entries
                if entry["pipeline"] == pipeline and entry["what"] != LAYER
            }
        )
    )


def measured_step(
    all_timings: Iterable[Timings], plan: PipelinePlan, step: StepPlan, method: str, folder: Path
) -> Measured | None:
    """The times of a step from the first file that has some for its rows and architecture.

    Those at the model's own context come first, else those of the longest.  A launch whose kernel
    in `folder` is not the one that was timed has none.
    """
    for timings in all_timings:
        if timings.arch != step.arch:
            continue
        here = [
            entry
            for entry in timings.entries
            if (entry["pipeline"], entry["rows"], entry["q"]) == (plan.name, step.rows, step.q)
        ]
        contexts = {entry["context"] for entry in here if entry["what"] != LAYER}
        if not contexts:
            continue
        context = CONTEXT if CONTEXT in contexts else max(contexts)
        times = {e["what"]: float(e["us"]) for e in here if e["context"] == context}
        layers = [e["us"] for e in here if e["what"] == LAYER and e["context"] == context]
        same = [e for e in here if e["what"] == LAYER and e["method"] == method]
        kernels = {x.name: plan.kernel(x.contract) for x in step.launches}
        launches = {
            name: times[name]
            for name, kernel in kernels.items()
            if name in times and not _other_kernel(timings, kernel, folder)
        }
        if launches:
            whole = float(layers[0]) if layers and same else None
            return Measured(timings.gpu, context, launches, whole)
    return None


def _other_kernel(timings: Timings, kernel: str, folder: Path) -> bool:
    """Whether the file says that another kernel was timed than the one in the folder."""
    if kernel not in timings.kernels:
        return False
    made, path = timings.kernels[kernel], folder / "kernels" / f"{kernel}.py"
    same = path.is_file() and kernel_digest(path.read_bytes()) == made.get("sha256")
    return not same or not same_blocks(made.get("device", {}))
