"""What is known of the kernels of a generated folder: which launches have run on a GPU as they are.

A record of `evidence/*.json` is for one kernel file and the device building blocks that it imports,
all by hash, for the flags and rows that it names.  A kernel that stands in several folders with the
same text, but for the name of its spec, has the records of all of them.  Every launch that the
table can select is

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
    `digests` (kernel -> `kernel_digest`) stand for kernel files that are not there as they should
    be, `device` for the folder of the building blocks.
    """
    records = [*_records(folder, digests, device)]
    found: dict[LaunchEvidence, None] = {}
    for step in pipeline.plans:
        for launch in step.launches:
            kernel = pipeline.kernel(launch.contract)
            if kernel:
                state, gpu = _state(launch, kernel, step.arch, step.rows, records)
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


def kernel_digest(text: bytes) -> str:
    """sha256 (hex) of a kernel file without its first line, which names its spec."""
    return hashlib.sha256(b"".join(text.splitlines(keepends=True)[1:])).hexdigest()


def _records(
    folder: Path, digests: Mapping[str, str] | None, device: Path
) -> Iterable[Mapping[str, Any]]:
    """Records of this folder and those beside it, with their GPU and whether they still count."""
    if digests is None:
        kept = sorted((folder / "kernels").glob("*.py"))
        digests = {path.stem: kernel_digest(path.read_bytes()) for path in kept}
    beside = sorted(folder.parent.glob("*/evidence/*.json"))
    for path in sorted(beside, key=lambda path: path.parent.parent != folder):
        try:
            document = json.loads(path.read_text())
            entries = [dict(entry) for entry in document["records"]]
            kernels = {
                name: (made["sha256"], dict(made["device"]))
                for name, made in document["kernels"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a file that says nothing is no evidence; its launches are missing
        current = {
            name: digests.get(name) == digest and same_blocks(blocks, device)
            for name, (digest, blocks) in kernels.items()
        }
        own = path.parent.parent == folder
        for entry in entries:
            known = current.get(entry.get("kernel", ""), False)
            if own or known:  # what is not ours is no reason to call ours stale
                yield {"gpu": document.get("gpu", ""), **entry, "current": known}


def same_blocks(blocks: Mapping[str, str], device: Path = DEVICE) -> bool:
    """Whether the device building blocks (file -> sha256) that a kernel imported are the same.

    What a file imports follows from its bytes: nothing that was not recorded can matter.
    """
    return all(_file_digest(device / block) == known for block, known in blocks.items())


@cache
def _file_digest(path: Path) -> str:
    """sha256 of a device building block; they do not change while a command runs."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _state(
    launch: Launch, kernel: str, arch: str, rows: int, records: Iterable[Mapping[str, Any]]
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
        if not entry["current"]:
            state = "stale"
            continue
        flags = entry.get("flags", {})
        agrees = all(flags.get(name, value) == value for name, value in wanted.items())
        if agrees and entry.get("rows") == rows:
            return "valid", str(entry["gpu"])
    return state, ""
