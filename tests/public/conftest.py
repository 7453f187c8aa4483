"""Layers that are generated once for all tests of this folder."""

from __future__ import annotations

import pytest
from layer_factory import LayerFactory


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> LayerFactory:
    """Renders small variants of the shipped pipelines on demand, each once per session."""
    return LayerFactory(tmp_path_factory.mktemp("project"))
