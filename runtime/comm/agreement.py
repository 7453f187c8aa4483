"""What all ranks of a group must have in common, and the error where they have not.

A rank that polls words which another one never sends, because it runs another schedule, waits
until its time is up and then names a word.  So ranks compare what they are made of first.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kpipe.runtime.evidence import DEVICE, file_digest, versions
from kpipe.runtime.metadata import LayerError

if TYPE_CHECKING:
    from kpipe.runtime.layer import Layer

SHOWN = 5
"""Differences that an error names; behind them it counts."""
_SHORT = 12  # hexadecimal digits of a digest
_NOT_THERE = "nothing"


class Telling(Protocol):
    """Who can tell all ranks something and hear what they say."""

    rank: int

    def exchange(self, topic: str, value: Any = None) -> list[Any]:
        """What every rank says, in rank order."""


def agree(processes: Telling, said: Mapping[str, str]) -> None:
    """Returns where all ranks say the same; raises LayerError with the differences on every rank.

    Digests travel first; what they stand for only where they differ.
    """
    name = said.get("pipeline", "")
    text = json.dumps(said, sort_keys=True)
    digests = processes.exchange(f"plan of {name}", hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    every = processes.exchange(f"differences of {name}", dict(said))
    found = list(differences(every))
    shown = "; ".join(found[:SHOWN])
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    raise LayerError(f"{name}: the ranks are not prepared alike: {shown}{more}")


def differences(every: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """A sentence for every key whose value is not the same on all ranks: the two values of rank 0
    and of the first rank that differs."""
    keys = dict.fromkeys(key for said in every for key in said)
    for key in keys:
        values = [said.get(key, _NOT_THERE) for said in every]
        for rank, value in enumerate(values):
            if value != values[0]:
                yield f"{key} is {values[0]} on rank 0, {value} on rank {rank}"
                break


def plan_of(layer: Layer, number: int, processors: int) -> dict[str, str]:
    """What a layer says to the others when it is prepared as number `number` of its kind.

    The generated files as they stand on the disk, the device's building blocks, dimensions, table,
    mailboxes, caches, ops with kernels and tactics, architecture and backend; `processors` are
    those that a rank counts on, because grids depend on them.
    """
    said = {
        "pipeline": layer.NAME,
        "backend": layer.backend,
        "arch": layer.arch,
        "layer": str(number),
        "ranks": str(layer.RANKS),
        "interleave": str(layer.INTERLEAVE),
        "rows_cap": str(layer.ROWS_CAP),
        "streams": str(dict(layer.STREAMS)),
        "multiprocessors": str(processors),
    }
    said |= {f"version of {name}": found for name, found in versions().items()}
    for (arch, q), sizes in layer.TABLE.items():
        said |= {f"method of {rows} rows, q {q}, {arch}": name for rows, name in sizes.items()}
    for name, value in layer.MEMORY.geometry.items():
        said[f"geometry {name}"] = repr(value)
    for name, spec in layer.MEMORY.mailboxes.items():
        said[f"mailbox {name}"] = str(spec)
    for name, cache in layer.MEMORY.caches.items():
        said[f"cache {name}"] = f"{cache.format}, pages of {cache.page}"
    for op in layer.OPS:
        constants = {name: repr(value) for name, value in sorted(op.constants.items())}
        tactics = {f"{arch} {rows}": dict(held) for (arch, rows), held in op.tactics.items()}
        said[f"op {op.name}"] = f"{op.kernel or op.source} {constants} {tactics}"
    return said | dict(_files(layer.PACKAGE))


def _files(package: str) -> Iterator[tuple[str, str]]:
    """Digests of the sources of a generated package and of the device's building blocks."""
    module = sys.modules.get(package)
    if module is not None and module.__file__:
        folder = Path(module.__file__).parent
        for path in sorted(folder.rglob("*.py")):
            yield f"file {path.relative_to(folder)}", file_digest(path)[:_SHORT]
    whole = "".join(file_digest(path) for path in sorted(DEVICE.glob("*.py")))
    yield "building blocks", hashlib.sha256(whole.encode()).hexdigest()[:_SHORT]
