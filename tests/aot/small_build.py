"""A layer of three small kernels, its generated folder, and the command that builds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layer_inputs import engine_inputs

from kpipe.runtime import build
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.layer import Layer

ARCH = "sm_90a"
LENGTHS = (5,)


def few(self: Any, step: Any, at: Any) -> None:
    """The launch list of the layer: one launch of each kernel."""
    self.query_norm(at.q_a, at.q_c, release=False)
    self.mla_gate(at.values, at.gate, step.lengths, at.gated, release=False)
    self.o_proj(at.gated, out=step.out)


KERNELS = {"rms_norm", "mla_gate", "o_proj"}


def shrunk(folder: Path) -> type[Layer]:
    """The layer of a folder with a table of one row count, which launches little."""
    layer = load_layer(folder)
    layer._few = few
    layer.TABLE = {(ARCH, 1): {1: "_few"}}
    return layer


@dataclass
class Project:
    """A generated folder of its own and its build."""

    folder: Path
    capture: Callable[[], Any]

    @property
    def layer(self) -> type[Layer]:
        return shrunk(self.folder)

    @property
    def out(self) -> Path:
        return self.folder / "build" / ARCH

    def build(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of the command on the folder, within this process."""
        shrunk(self.folder)
        self.capture()
        code = build.main([str(self.folder), "--arch", ARCH, "--jobs", "1", *words])
        out, err = self.capture()
        return code, out, err

    def prepared(self, **options: Any) -> Layer:
        return engine_inputs(self.layer, LENGTHS).prepared(self.layer, backend="cuda", **options)

    def objects(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.out.glob("*.so")}
