"""Layers that are generated once for all tests of this folder, and two that are prepared."""

from __future__ import annotations

import pytest
from layer_factory import LayerFactory
from layer_inputs import engine_inputs

from kpipe.runtime.comm.virtual_ranks import VirtualRanks
from kpipe.runtime.layer import Layer


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> LayerFactory:
    """Renders small variants of the shipped pipelines on demand, each once per session."""
    return LayerFactory(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def tp(layers: LayerFactory) -> Layer:
    """A layer that holds whole contexts; latent and index pages of 64."""
    layer_class = layers.tp(4)
    return engine_inputs(layer_class, (3,)).prepared(layer_class)


@pytest.fixture(scope="session")
def dcp(layers: LayerFactory) -> Layer:
    """Rank 1 of two that share every context."""
    layer_class = layers.dcp(2)
    inputs = engine_inputs(layer_class, (3,), rank=1)
    return inputs.prepared(layer_class, comm=VirtualRanks(2).rank(1))
