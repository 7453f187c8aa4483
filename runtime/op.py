"""An op of a generated layer: its declaration, and the callable that prepare() makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Observer = Callable[[str, str], None]  # op name, stage


@dataclass(frozen=True)
class Op:
    """One op as the generated code declares it.

    `reference` defines the result.  `kernel` is "module:Class" below the pipeline's kernels
    folder, empty where the kernel comes later; `source` names the library of a library op.
    `weights` and `constants` are bound once; everything else is an argument of the call.
    """

    name: str
    stage: str
    reference: Callable[..., None]
    weights: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    needs_shard: bool = False
    kernel: str = ""
    source: str = "kpipe"


class ReferenceOp:
    """Runs an op's reference function on the layer's buffers.

    Launch attributes (`pdl`, `release`) have no meaning on the CPU and are dropped.
    """

    def __init__(self, op: Op, bound: Mapping[str, Any], enter: Callable[[Op], None]) -> None:
        self.op = op
        self._bound = dict(bound)
        self._enter = enter

    def __call__(
        self, *operands: Any, pdl: bool = True, release: bool = True, **named: Any
    ) -> None:
        self._enter(self.op)
        self.op.reference(*operands, **self._bound, **named)
