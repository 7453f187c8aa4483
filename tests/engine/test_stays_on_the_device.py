"""The adapters read shapes and host integers only, and write the same memory in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import engine_recorded as recorded
import pytest
import torch
from layer_factory import LayerFactory
from layer_inputs import engine_inputs
from torch.utils._python_dispatch import TorchDispatchMode

from kpipe.runtime.engine.sglang import from_sglang
from kpipe.runtime.engine.step_buffers import StepBuffers
from kpipe.runtime.engine.vllm import from_vllm
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import Step, given

CONTEXTS = (70, 5, 131)


def on_meta(value: Any) -> Any:
    """The same object with tensors that have no values: reading one raises."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if hasattr(value, "__dataclass_fields__"):
        found = {f.name: on_meta(getattr(value, f.name)) for f in fields(value)}
        return SimpleNamespace(**found)
    return value


def handed(name: str, step: Step) -> dict[str, Any]:
    """Arguments of the adapter of that engine."""
    if name == "vllm":
        return {"metadata": recorded.vllm(step), "index_metadata": recorded.indexer(step)}
    batch = recorded.sglang(step)
    found = {"batch": batch}
    return found if name == "tokens" else {**found, "metadata": recorded.dsa(step, batch)}


def adapter(name: str) -> Callable[..., Step]:
    return from_vllm if name == "vllm" else from_sglang


@pytest.mark.parametrize("q", [1, 4])
@pytest.mark.parametrize(
    ("name", "copies"),
    [("vllm", False), ("vllm", True), ("sglang", False), ("sglang", True), ("tokens", True)],
)
def test_no_value_is_read(tp: Layer, layers: LayerFactory, name: str, copies: bool, q: int) -> None:
    step = engine_inputs(layers.tp(4), CONTEXTS, q=q).step
    arguments = {key: on_meta(value) for key, value in handed(name, step).items()}
    buffers = StepBuffers.for_layer(tp, 2048, "meta") if copies else None
    hidden, out = step.hidden.to("meta"), step.out.to("meta")
    found = adapter(name)(layer=tp, hidden=hidden, out=out, buffers=buffers, **arguments)
    assert {tensor.device.type for tensor in given(found).values()} == {"meta"}


def test_ranks_read_no_value_either(dcp: Layer, layers: LayerFactory) -> None:
    step = engine_inputs(layers.dcp(2), CONTEXTS, rank=1).step
    batch = on_meta(recorded.sglang(step, ranks=2))
    buffers = StepBuffers.for_layer(dcp, 2048, "meta")
    hidden, out = step.hidden.to("meta"), step.out.to("meta")
    assert from_sglang(batch, dcp, hidden, out, buffers=buffers).rows == 3


class Launches(TorchDispatchMode):
    """Collects what is launched; views launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_views_launch_nothing(tp: Layer, layers: LayerFactory, name: str) -> None:
    step = engine_inputs(layers.tp(4), CONTEXTS).step
    arguments = handed(name, step)
    with Launches() as seen:
        adapter(name)(layer=tp, hidden=step.hidden, out=step.out, **arguments)
    assert seen.names == []


@pytest.mark.parametrize("name", ["vllm", "sglang", "tokens"])
def test_buffers_keep_their_addresses(tp: Layer, layers: LayerFactory, name: str) -> None:
    """A second step, with more requests and other values, lands where the first did."""
    buffers = StepBuffers.for_layer(tp, 2048, "cpu")
    found = []
    for contexts in (CONTEXTS, (200, 3, 66, 90)):
        step = engine_inputs(layers.tp(4), contexts).step
        hidden = torch.zeros(8, step.hidden.shape[1], dtype=torch.bfloat16)
        arguments = handed(name, step)
        given_step = adapter(name)(
            layer=tp, hidden=hidden, out=hidden.clone(), buffers=buffers, **arguments
        )
        found.append(given_step)
        assert given_step.lengths.tolist() == [*contexts, *[0] * (8 - len(contexts))]
        assert given_step.slots[: step.rows].equal(step.slots)
        assert given_step.slots[step.rows :].tolist() == [-1] * (8 - len(contexts))
        width = step.block_table.shape[1]
        assert given_step.block_table[: step.rows, :width].equal(step.block_table)
        assert not given_step.block_table[step.rows :].any()
    first, second = (
        {k: t for k, t in given(one).items() if k not in ("hidden", "out")} for one in found
    )
    assert {k: t.data_ptr() for k, t in first.items()} == {
        k: t.data_ptr() for k, t in second.items()
    }
    assert {k: t.shape for k, t in first.items()} == {k: t.shape for k, t in second.items()}


def test_pages_of_a_pool_become_kernel_pages(tp: Layer, layers: LayerFactory) -> None:
    """The pool's pages of 128 tokens are two of the kernel's each (D31, in small)."""
    step = engine_inputs(layers.tp(4), CONTEXTS).step
    buffers = StepBuffers.for_layer(tp, 512, "cpu")
    table = torch.tensor([[5, 9, 0, 0], [1, -1, 0, 0], [7, 2, 0, 0]], dtype=torch.int32)
    metadata = recorded.vllm(step, block_table=table, block_size=128)
    found = from_vllm(metadata, tp, step.hidden, step.out, buffers=buffers)
    expected = [[10, 11, 18, 19], [2, 3, -1, -1], [14, 15, 4, 5]]
    assert found.block_table[:, :4].tolist() == expected
    assert found.index_table[:, :4].tolist() == expected


def test_one_group_of_blocks_serves_both_caches(tp: Layer, layers: LayerFactory) -> None:
    step = engine_inputs(layers.tp(4), CONTEXTS).step
    found = from_vllm(recorded.vllm(step), tp, step.hidden, step.out)
    assert found.index_table is found.block_table and found.index_slots is found.slots


def test_a_latent_page_of_another_size_needs_two_tables(tp: Layer, layers: LayerFactory) -> None:
    """Latents in pages of 128, index keys in pages of 64: one table names pages of 128."""
    from kpipe.runtime.metadata import CacheSpec, LayerError

    step = engine_inputs(layers.tp(4), CONTEXTS).step

    class Wide(type(tp)):
        MEMORY = replace(
            tp.MEMORY, caches={**tp.MEMORY.caches, "latent_kv": CacheSpec("fp8_tensor", 128)}
        )

    wide = Wide()
    wide.arch, wide.shard = tp.arch, tp.shard
    metadata = recorded.vllm(step, block_size=128)
    with pytest.raises(LayerError) as caught:
        from_vllm(metadata, wide, step.hidden, step.out)
    assert str(caught.value) == (
        "tp_4 from vLLM: index_metadata is missing; index_kv has pages of 64 tokens, latent_kv of "
        "128: hand in the indexer's metadata, or copy through buffers=StepBuffers.for_layer(...)"
    )
    buffers = StepBuffers.for_layer(wide, 2048, "cpu")
    found = from_vllm(metadata, wide, step.hidden, step.out, buffers=buffers)
    assert found.block_table[:, :2].equal(step.block_table[:, :2])
    for column in range(4):
        want = step.block_table[:, column // 2] * 2 + column % 2
        assert found.index_table[:, column].equal(want)
    assert found.index_slots is found.slots
