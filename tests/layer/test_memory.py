"""What prepare() binds: who shares a buffer, and that no two names share bytes."""

from __future__ import annotations

import pytest
import torch
from layer_factory import LayerFactory
from layer_inputs import engine_inputs

from kpipe.runtime.memory import Scratch
from kpipe.runtime.metadata import BufferSpec, LayerError

# -- scratch ------------------------------------------------------------------------------------


def test_layers_of_one_kind_share_their_scratch(layers: LayerFactory) -> None:
    layer_class = layers.tp(4)
    ready, scratch = engine_inputs(layer_class, (3,)), Scratch()
    one, two = (ready.prepared(layer_class, scratch=scratch, layer=n) for n in (0, 1))
    alone = ready.prepared(layer_class)
    for name in layer_class.MEMORY.buffers:
        assert one.buffers[name].data_ptr() == two.buffers[name].data_ptr(), name
        assert one.buffers[name].data_ptr() != alone.buffers[name].data_ptr(), name


def test_kinds_of_layers_share_nothing_by_their_scratch(layers: LayerFactory) -> None:
    """Two pipelines on one scratch: equal names, and each its own memory."""
    scratch = Scratch()
    one = engine_inputs(layers.tp(4), (3,)).prepared(layers.tp(4), scratch=scratch)
    two = engine_inputs(layers.tp(2), (3,)).prepared(layers.tp(2), scratch=scratch)
    assert set(one.buffers) == set(two.buffers)
    mine, theirs = ({t.data_ptr() for t in x.buffers.values()} for x in (one, two))
    assert not mine & theirs


def test_two_declarations_of_one_buffer_clash() -> None:
    scratch = Scratch()
    shared = BufferSpec(("rows", 4), "fp32", scope="model")
    scratch.buffer("prefix", shared, 64, kind="dense", model="k3")
    with pytest.raises(LayerError) as caught:
        scratch.buffer("prefix", shared, 32, kind="sparse", model="k3")
    assert str(caught.value) == (
        "buffer prefix: shared as (64, 4) torch.float32, this layer declares (32, 4) fp32"
    )
    narrow = BufferSpec(("rows", 4), "bf16", scope="model")
    with pytest.raises(
        LayerError, match=r"^buffer prefix: shared as \(64, 4\) torch.float32, this"
    ):
        scratch.buffer("prefix", narrow, 64, kind="sparse", model="k3")
    scratch.buffer("prefix", shared, 32, kind="sparse", model="another")  # not the same model


@pytest.mark.parametrize(
    ("scope", "same"),
    [
        ("layer", (False, False, False)),
        ("kind", (True, False, False)),
        ("model", (True, True, False)),
        ("device", (True, True, True)),
    ],
)
def test_scope_decides_who_gets_the_same_buffer(scope: str, same: tuple[bool, ...]) -> None:
    """Another layer of the kind, another kind of the model, another model on the device."""
    scratch = Scratch()
    spec = BufferSpec(("rows", 4), "fp32", scope=scope, zeroed=True)
    first = scratch.buffer("b", spec, 8, 0, kind="dense", model="k3")
    assert not first.any()
    others = [
        scratch.buffer("b", spec, 8, layer, kind=kind, model=model)
        for layer, kind, model in ((1, "dense", "k3"), (0, "sparse", "k3"), (0, "draft", "small"))
    ]
    assert tuple(other.data_ptr() == first.data_ptr() for other in others) == same
    again = scratch.buffer("b", spec, 8, 0, kind="dense", model="k3")
    assert again.data_ptr() == first.data_ptr()


# -- storage ------------------------------------------------------------------------------------


def refused(name: str, what: str) -> str:
    return (
        f"{name}: {what} share storage; the schedule is proved for memory that does not overlap "
        "(KP601): give each its own"
    )


def test_an_output_in_place_of_the_input_is_refused(layers: LayerFactory) -> None:
    layer_class = layers.tp(4)
    ready = engine_inputs(layer_class, (70, 1))
    layer = ready.prepared(layer_class)
    ready.step.out = ready.step.hidden
    with pytest.raises(LayerError) as caught:
        layer.run(ready.step)
    assert str(caught.value) == refused("tp_4", "step hidden and step out")
    ready.step.out = torch.empty_like(ready.step.hidden)
    layer.run(ready.step)
    # Rows of one tensor may lie side by side, and must not run into each other.
    both = torch.empty(3, ready.step.hidden.shape[1], dtype=torch.bfloat16)
    both[:2] = ready.step.hidden
    ready.step.hidden, ready.step.out = both[:2], both[1:]
    with pytest.raises(LayerError, match="step hidden and step out share storage"):
        layer.run(ready.step)


def test_a_step_tensor_inside_a_buffer_is_refused(layers: LayerFactory) -> None:
    layer_class = layers.tp(4)
    ready = engine_inputs(layer_class, (70, 1))
    layer = ready.prepared(layer_class)
    ready.step.lengths = layer.buffers["valid"][:2].copy_(ready.step.lengths)
    with pytest.raises(LayerError) as caught:
        layer.run(ready.step)
    assert str(caught.value) == refused("tp_4", "buffer valid and step lengths")


def test_caches_of_one_storage_are_refused(layers: LayerFactory) -> None:
    layer_class = layers.tp(4)
    ready = engine_inputs(layer_class, (70, 1))
    index = ready.caches.index_kv
    latent = ready.caches.latent_kv
    pool = torch.zeros(latent.numel(), dtype=torch.uint8)
    ready.caches.latent_kv = pool.view(latent.shape)
    ready.caches.index_kv = pool[: index.numel()].view(index.shape)
    with pytest.raises(LayerError) as caught:
        ready.prepared(layer_class)
    text = str(caught.value)
    assert text.startswith("tp_4: cache ") and text.endswith("(KP601): give each its own")
    assert "cache index_kv" in text and "cache latent_kv" in text
