"""A layer of three small kernels, built once, and copies of it to spoil."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from layer_factory import LayerFactory
from layer_inputs import engine_inputs

from kpipe.runtime import build
from kpipe.runtime import layer as layer_module
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.host import kernel_file, launch
from kpipe.runtime.layer import Layer
from kpipe.runtime.recording import HostStream

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


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated folder that is never built."""
    layers = LayerFactory(tmp_path_factory.mktemp("project"))
    return layers.folder(
        "small", "extends: dsa_tp.yaml\nname: small\ngeometry: small\nparallel: {tp: 4}\n"
    )


@pytest.fixture(scope="session")
def built(generated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder, with a build."""
    folder = tmp_path_factory.mktemp("built") / "small"
    shutil.copytree(generated, folder)
    shrunk(folder)
    assert build.main([str(folder), "--arch", ARCH, "--jobs", "1"]) == 0
    return folder


@pytest.fixture
def project(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Project:
    """A copy of the built folder."""
    shutil.copytree(built, tmp_path / "small")
    return Project(tmp_path / "small", capsys.readouterr)


class IdleStream(HostStream):
    """A stream on which nothing is ever left to do."""

    def synchronize(self) -> None:
        return


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cuda backend without a device; the compiler only lists what it was asked for."""
    asked: list[str] = []

    def compiled(kernel: Any, specs: Any, arch: str) -> Callable[..., None]:
        asked.append(type(kernel).__name__)
        return lambda *operands: None

    monkeypatch.setattr(kernel_file, "compile_kernel", compiled)
    monkeypatch.setattr(launch, "side_stream", lambda device, name, *rest: HostStream(name))
    monkeypatch.setattr(layer_module.torch.cuda, "current_stream", lambda *_: IdleStream("main"))
    monkeypatch.setattr(layer_module.torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(layer_module, "_refuse_host", lambda name, device: None)
    return asked
