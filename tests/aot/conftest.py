"""A layer of three small kernels, built once, and copies of it to spoil."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from idle_device import IdleStream
from layer_factory import LayerFactory
from small_build import ARCH, Project, shrunk

from kpipe.runtime import build
from kpipe.runtime import layer as layer_module
from kpipe.runtime.host import kernel_file, launch
from kpipe.runtime.recording import HostStream


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
    monkeypatch.setattr(layer_module, "_refuse_host", lambda name, device: None)
    return asked
