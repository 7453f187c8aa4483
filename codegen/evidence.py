"""What is known of the kernels of a generated folder: which launches have run on a GPU as they are.

A record of `evidence/*.json` is for one kernel file and one state of the device building blocks,
both by hash, for the flags and rows that it names.  Every launch that the table can select is

    valid     such a record exists for its kernel, architecture, rows and flags, and was right
    stale     there are records for the kernel, but of other bytes
    missing   nobody has run it; so it is for every launch on an architecture without a machine
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kpipe.codegen.plan.model import Launch, PipelinePlan

STATES = ("valid", "stale", "missing")
DEVICE = Path(__file__).parents[1] / "runtime" / "device"


@dataclass(frozen=True)
class LaunchEvidence:
    """The state of one launch of one declared step."""

    arch: str
    op: str
    kernel: str
    rows: int
    state: str
    gpu: str = ""


def evidence_of(
    pipeline: PipelinePlan,
    folder: Path,
    digests: Mapping[str, str] | None = None,
    device: Path = DEVICE,
) -> tuple[LaunchEvidence, ...]:
    """Every distinct launch of our own kernels, in the order of arch, rows and launch.

    `folder` is the pipeline's generated folder; one that does not exist has no evidence.
    `digests` (kernel -> sha256) stand for kernel files that are not there as they should be,
    `device` for the folder of the building blocks.
    """
    records = [*_records(folder)]
    blocks = device_digest(device)
    found: dict[LaunchEvidence, None] = {}
    for step in pipeline.plans:
        for launch in step.launches:
            kernel = pipeline.kernel(launch.contract)
            if kernel:
                path = folder / "kernels" / f"{kernel}.py"
                digest = file_digest(path) if path.is_file() else ""
                digest = digest if digests is None else digests.get(kernel, "")
                state, gpu = _state(launch, kernel, step.arch, step.rows, digest, blocks, records)
                one = LaunchEvidence(step.arch, launch.op, kernel, step.rows, state, gpu)
                found[one] = None
    return tuple(found)


def summary(found: Iterable[LaunchEvidence]) -> tuple[str, ...]:
    """One line per architecture: how many launches are valid, which kernels are not."""
    lines = []
    known = list(found)
    for arch in dict.fromkeys(one.arch for one in known):
        of_arch = [one for one in known if one.arch == arch]
        counts = {state: sum(one.state == state for one in of_arch) for state in STATES}
        gpus = ", ".join(sorted({one.gpu for one in of_arch if one.gpu}))
        text = f"evidence {arch}: {counts['valid']} of {len(of_arch)} launches valid"
        text += f" ({gpus})" if gpus else ""
        for state in STATES[1:]:
            names = sorted({one.kernel for one in of_arch if one.state == state})
            if names and counts["valid"] + counts["stale"]:
                text += f"; {state}: {', '.join(names)}"
        if not counts["valid"] + counts["stale"]:
            text += "; compiled, not run"
        lines.append(text)
    return tuple(lines)


@cache
def device_digest(folder: Path = DEVICE) -> str:
    """sha256 over the device building blocks that kernels are made of."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a kernel file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _records(folder: Path) -> Iterable[Mapping[str, Any]]:
    for path in sorted((folder / "evidence").glob("*.json")):
        try:
            document = json.loads(path.read_text())
            entries = [dict(entry) for entry in document["records"]]
        except (ValueError, KeyError, TypeError):
            continue  # a file that says nothing is no evidence; its launches are missing
        for entry in entries:
            yield {"gpu": document.get("gpu", ""), **entry}


def _state(
    launch: Launch,
    kernel: str,
    arch: str,
    rows: int,
    digest: str,
    blocks: str,
    records: Iterable[Mapping[str, Any]],
) -> tuple[str, str]:
    state = "missing"
    wanted = {
        "pdl": launch.pdl.attribute,
        "release": launch.pdl.release,
        **dict(launch.flags),
        **dict(launch.tactic),
        **dict(launch.options),
    }
    for entry in records:
        if entry.get("kernel") != kernel or entry.get("arch", arch) != arch or not entry.get("ok"):
            continue
        if entry.get("sha256") != digest or entry.get("device_sha256") != blocks:
            state = "stale"
            continue
        flags = entry.get("flags", {})
        agrees = all(flags.get(name, value) == value for name, value in wanted.items())
        if agrees and entry.get("rows") == rows:
            return "valid", str(entry["gpu"])
    return state, ""
