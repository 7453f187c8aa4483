"""An op of a generated layer: its declaration, and the callable that prepare() makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Observer = Callable[[str, str], None]  # op name, stage

CLUSTER_FLAGS = ("splits", "parts")
"""Tile parameters that say how many CTAs a cluster has."""


@dataclass(frozen=True)
class Op:
    """One op as the generated code declares it.

    `reference` defines the result.  `kernel` is "module:Class" below the pipeline's kernels
    folder, empty where the kernel comes later; `source` names the library of a library op.
    `weights` and `constants` are bound once; everything else is an argument of the call.
    `tactics` are tile parameters of the kernel: (arch, most rows) -> fields, in order of rows.
    """

    name: str
    stage: str
    reference: Callable[..., None]
    weights: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    needs_shard: bool = False
    kernel: str = ""
    source: str = "kpipe"
    tactics: Mapping[tuple[str, int], Mapping[str, int]] = field(default_factory=dict)

    def tactic(self, arch: str, rows: int) -> Mapping[str, int]:
        """The tile parameters for that many rows; empty where the kernel's own are used."""
        for (target, most), tactic in self.tactics.items():
            if target == arch and rows <= most:
                return tactic
        return {}

    def tactic_within(self, arch: str, rows: int, widest_cluster: int) -> Mapping[str, int]:
        """As `tactic`, or that of the fewest more rows whose clusters are not wider than that.

        The one for `rows` where none is narrow enough.
        """
        sizes = (most for (target, most) in self.tactics if target == arch and most >= rows)
        for size in sorted({rows, *sizes}):
            tactic = self.tactic(arch, size)
            if max(tactic.get(name, 1) for name in CLUSTER_FLAGS) <= widest_cluster:
                return tactic
        return self.tactic(arch, rows)


@dataclass(frozen=True)
class Call:
    """One launch as a method of the layer writes it: the op, the step's rows, its keywords.

    `flags` are the boolean and word arguments by name, launch attributes included.
    """

    op: str
    rows: int
    flags: tuple[tuple[str, Any], ...]


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
