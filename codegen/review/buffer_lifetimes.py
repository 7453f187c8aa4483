"""Who writes and reads each scratch buffer, and between which launches its content matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kpipe.codegen.ops.contract import Access
from kpipe.codegen.plan.model import Binding, BufferPlan, Launch, PipelinePlan, StepPlan
from kpipe.codegen.plan.workspace import workspaces

# Who else has the memory, by the scope of a buffer.
SHARED = {
    "layer": "each layer its own",
    "kind": "one for all layers",
    "model": "one for all pipelines of the model",
    "device": "one for all pipelines of the device",
    "launch": "its op alone",
}


@dataclass(frozen=True)
class Lifetime:
    """One piece of memory over the launches of a step.

    `touches` has one letter a launch: W writes, R reads, U both, or nothing.  `first` and `last`
    are positions of launches, -1 where the step does not touch it.  `inner` is the buffer that a
    column is a part of, else empty; `bytes` are those of the whole at the largest row count, 0 for
    a column.
    """

    name: str
    inner: str
    shape: str
    dtype: str
    scope: str
    bytes: int
    touches: tuple[str, ...]
    first: int
    last: int


@dataclass(frozen=True)
class Lifetimes:
    """All scratch of a step, in the order of the spec; `launches` are names, in host order.

    `live` is the largest sum of bytes whose content matters at one launch, `total` that of all.
    """

    launches: tuple[str, ...]
    streams: tuple[str, ...]
    pieces: tuple[Lifetime, ...]
    live: int
    total: int


def lifetimes(plan: PipelinePlan, step: StepPlan) -> Lifetimes:
    """The lifetimes of every buffer, of its columns, and of private workspaces."""
    pieces: list[Lifetime] = []
    for buffer in plan.buffers:
        names = {buffer.name, *(name for name, _, _ in buffer.columns)}
        pieces.append(_whole(buffer, _touches(step.launches, names)))
        for name, offset, width in buffer.columns:
            touches = _touches(step.launches, {buffer.name, name})
            shape = f"columns {offset} to {offset + width}"
            pieces.append(_piece(name, buffer.name, shape, buffer.dtype, buffer.scope, 0, touches))
    for space in workspaces(plan, step):
        touches = tuple("U" if launch.op == space.op else "" for launch in step.launches)
        name = f"{space.op}.{space.name}"
        pieces.append(_piece(name, "", "workspace", "bytes", "launch", space.bytes, touches))
    whole = [piece for piece in pieces if not piece.inner]
    live = max(
        (
            sum(piece.bytes for piece in whole if piece.first <= position <= piece.last)
            for position in range(len(step.launches))
        ),
        default=0,
    )
    return Lifetimes(
        tuple(launch.name for launch in step.launches),
        tuple(launch.stream for launch in step.launches),
        tuple(pieces),
        live,
        sum(piece.bytes for piece in whole),
    )


def _whole(buffer: BufferPlan, touches: tuple[str, ...]) -> Lifetime:
    shape = f"[{', '.join(map(str, buffer.shape))}]"
    return _piece(buffer.name, "", shape, buffer.dtype, buffer.scope, buffer.bytes, touches)


def _piece(
    name: str,
    inner: str,
    shape: str,
    dtype: str,
    scope: str,
    size: int,
    touches: tuple[str, ...],
) -> Lifetime:
    places = [position for position, letter in enumerate(touches) if letter]
    first, last = (places[0], places[-1]) if places else (-1, -1)
    return Lifetime(name, inner, shape, dtype, scope, size, touches, first, last)


def _touches(launches: Sequence[Launch], names: set[str]) -> tuple[str, ...]:
    return tuple(
        _letter([b for b in launch.bindings if b.target in names and b.access is not Access.LAYOUT])
        for launch in launches
    )


def _letter(bindings: Sequence[Binding]) -> str:
    reads = any(binding.access.reads for binding in bindings)
    writes = any(binding.access.writes for binding in bindings)
    return "U" if reads and writes else "W" if writes else "R" if reads else ""
