"""What a generated method launches, found by running it with nothing behind its names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from kpipe.runtime.op import Call, Op

if TYPE_CHECKING:
    from kpipe.runtime.layer import Layer


def recorded(layer: Layer, method: str, rows: int = 0) -> tuple[Call, ...]:
    """What a method of a layer (prepared or not) launches, in host order; nothing is executed."""
    found: list[Call] = []
    stand_in = type(layer)()

    def recorder(op: Op) -> Callable[..., None]:
        def record(*operands: Any, **named: Any) -> None:
            flags = {n: v for n, v in named.items() if isinstance(v, bool | int | str)}
            found.append(Call(op.name, rows, tuple(sorted(flags.items()))))

        return record

    for op in layer.OPS:
        setattr(stand_in, op.name, recorder(op))
    for name in layer.MEMORY.caches:
        setattr(stand_in, name, None)
    for name in ("main", *layer.STREAMS):
        setattr(stand_in, name, HostStream(name))
    stand_in.on = lambda stream: nullcontext(stream)
    anything = _Anything()
    getattr(stand_in, method)(anything, anything)
    return tuple(found)


class _Anything:
    """Has every attribute; stands in for operands where only the launches matter."""

    def __getattr__(self, name: str) -> None:
        return None


class HostStream:
    """Stands in for a CUDA stream where everything runs in host order."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, stream: HostStream) -> None:
        """Nothing to wait for: what was launched earlier has already run."""
