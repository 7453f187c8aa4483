"""Layers that are generated once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from layer_factory import LayerFactory


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> LayerFactory:
    """Renders small variants of the shipped pipelines on demand, each once per session."""
    return LayerFactory(tmp_path_factory.mktemp("project"))


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Small tensors: more threads than one only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
