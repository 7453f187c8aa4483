"""Cache tensors as engines hold them, bound without a copy."""

from __future__ import annotations

import pytest
import torch
from layer_factory import LayerFactory
from layer_inputs import engine_inputs

from kpipe.runtime.engine.caches import engine_caches
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError


def test_the_shapes_of_both_engines(tp: Layer, layers: LayerFactory) -> None:
    """Every shape gives back the pages that the oracle filled, at their own addresses."""
    caches = engine_inputs(layers.tp(4), (70, 131)).caches
    latent, index = caches.latent_kv, caches.index_kv
    blocks, page, row = latent.shape
    assert blocks % 2 == 0
    shapes = [
        latent,
        latent.view(torch.float8_e4m3fn),
        latent.view(blocks // 2, 2 * page, row),
        latent.reshape(-1, 1, row),
        latent.reshape(-1, row).view(torch.float8_e4m3fn),
    ]
    for shape in shapes:
        found = engine_caches(tp, latent_kv=shape, index_kv=index.reshape(index.shape[0], -1))
        for one, wanted in ((found.latent_kv, latent), (found.index_kv, index)):
            assert one.data_ptr() == wanted.data_ptr() and one.equal(wanted)
            assert one.dtype == torch.uint8


def test_blocks_that_lie_apart_stay_apart(tp: Layer) -> None:
    pool = torch.zeros(5, 3, 64, 144, dtype=torch.uint8)  # three layers' pages side by side
    found = engine_caches(tp, latent_kv=pool[:, 1]).latent_kv
    assert found.shape == (5, 64, 144) and found.stride() == (3 * 64 * 144, 144, 1)
    assert found.data_ptr() == pool[:, 1].data_ptr()


def test_places_behind_the_last_whole_page_are_left_out(tp: Layer) -> None:
    assert (
        engine_caches(tp, latent_kv=torch.zeros(200, 1, 144, dtype=torch.uint8)).latent_kv.shape[0]
        == 3
    )


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (
            torch.zeros(5, 64, 144, dtype=torch.bfloat16),
            "tp_4 caches: latent_kv is [5, 64, 144] bf16, the layer reads fp8_tensor: start the "
            "engine with an FP8 cache of that layout",
        ),
        (
            torch.zeros(5, 48, 144, dtype=torch.uint8),
            "tp_4 caches: latent_kv is [5, 48, 144] u8 with strides (6912, 144, 1); fp8_tensor "
            "needs pages of 64 tokens of 144 bytes, each side by side",
        ),
        (
            torch.zeros(5, 64, 656, dtype=torch.uint8),
            "tp_4 caches: latent_kv is [5, 64, 656] u8 with strides (41984, 656, 1); fp8_tensor "
            "needs pages of 64 tokens of 144 bytes, each side by side",
        ),
        (
            torch.zeros(5, 2, 128, 144, dtype=torch.uint8)[:, 0],
            "tp_4 caches: latent_kv is [5, 128, 144] u8 with strides (36864, 144, 1); fp8_tensor "
            "needs pages of 64 tokens of 144 bytes, each side by side",
        ),
    ],
)
def test_bytes_that_are_no_pages(tp: Layer, tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(LayerError) as caught:
        engine_caches(tp, latent_kv=tensor)
    assert str(caught.value) == text


def test_a_cache_that_the_layer_does_not_have(tp: Layer) -> None:
    with pytest.raises(LayerError) as caught:
        engine_caches(tp, kv=torch.zeros(1))
    assert str(caught.value) == "tp_4 caches: no cache kv; known: latent_kv, index_kv"
