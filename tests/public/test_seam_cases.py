"""Public reports on metadata, as an engine's object brings them to the seam: one test per input.

D17, D20, D24, D25, D31 and D33 as they look where a serving engine hands over a step; the cases'
maths is tested in test_num_cases.
"""

from __future__ import annotations

import engine_recorded as recorded
import pytest
import torch
from layer_factory import LayerFactory
from layer_inputs import Inputs, engine_inputs

from kpipe.runtime.engine.sglang import from_sglang
from kpipe.runtime.engine.step_buffers import StepBuffers
from kpipe.runtime.engine.vllm import from_vllm
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError, Step, given


def caches_of(inputs: Inputs, other: Inputs) -> None:
    """The cached tokens of another step, in the caches that are bound."""
    for name in ("latent_kv", "index_kv"):
        getattr(inputs.caches, name).copy_(getattr(other.caches, name))


def written_over(metadata: object, other: object) -> None:
    """What an engine does ahead of a replay: new values in the tensors that it captured."""
    for name, tensor in vars(metadata).items():
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(getattr(other, name))
        elif hasattr(tensor, "__dataclass_fields__"):
            written_over(tensor, getattr(other, name))


def two_steps(layers: LayerFactory) -> tuple[type[Layer], Inputs, Inputs]:
    layer_class = layers.tp(4)
    return layer_class, *(
        engine_inputs(layer_class, contexts) for contexts in ((250, 259, 300), (259, 250, 300))
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_d17_a_replay_sees_what_the_engine_wrote(layers: LayerFactory, engine: str) -> None:
    """The step is made once, as under capture; values change, the record does not."""
    layer_class, warm, then = two_steps(layers)
    layer = warm.prepared(layer_class)
    made = []
    for inputs in (warm, then):
        step = inputs.step
        if engine == "vllm":
            index = recorded.indexer(step)
            made.append((recorded.vllm(step), {"index_metadata": index}))
        else:
            batch = recorded.sglang(step)
            made.append((batch, {"metadata": recorded.dsa(step, batch)}))
    (first, named), (second, other) = made
    adapter = from_vllm if engine == "vllm" else from_sglang
    captured = adapter(first, layer, warm.step.hidden, warm.step.out, **named)
    if engine == "sglang":  # the oracle numbers the blocks of both caches apart
        captured.index_table, captured.index_slots = warm.step.index_table, warm.step.index_slots
        warm.step.index_table.copy_(then.step.index_table)
        warm.step.index_slots.copy_(then.step.index_slots)
    written_over(first, second)
    for name in named:
        written_over(named[name], other[name])
    warm.step.hidden.copy_(then.step.hidden)
    caches_of(warm, then)
    layer.run(captured)
    then.prepared(layer_class).run(then.step)
    assert warm.step.out.equal(then.step.out)


def test_d20_rows_of_the_captured_size_are_zero(layers: LayerFactory) -> None:
    """Eight captured rows, five requests: the others' output is zero whatever lay there."""
    layer_class = layers.tp(4)
    inputs = engine_inputs(layer_class, (70, 1, 64, 129, 33))
    layer, step = inputs.prepared(layer_class), inputs.step
    layer.run(step)
    hidden = torch.full((8, step.hidden.shape[1]), torch.nan, dtype=torch.bfloat16)
    hidden[:5] = step.hidden
    out = torch.full_like(hidden, torch.nan)
    buffers = StepBuffers.for_layer(layer, 2048, "cpu")
    index = recorded.indexer(step)
    layer.run(
        from_vllm(recorded.vllm(step), layer, hidden, out, index_metadata=index, buffers=buffers)
    )
    assert out[:5].equal(step.out) and bool((out[5:] == 0).all())


@pytest.mark.parametrize("name", ["seq_lens", "block_table"])
def test_d24_entries_for_each_row_are_no_entries_for_each_request(
    layers: LayerFactory, name: str
) -> None:
    """Two requests of four rows, and a tensor that repeats a request for each of its rows."""
    layer_class = layers.tp(4)
    inputs = engine_inputs(layer_class, (70, 131), q=4)
    layer, step = inputs.prepared(layer_class), inputs.step
    metadata = recorded.vllm(step)
    setattr(metadata, name, getattr(metadata, name).repeat_interleave(4, 0))
    shape = "[8] i32" if name == "seq_lens" else "[8, 16] i32"
    with pytest.raises(LayerError) as caught:
        from_vllm(metadata, layer, step.hidden, step.out)
    assert str(caught.value) == (
        f"tp_4 from vLLM: {name} is {shape} with num_reqs 2; hand in the tensor that has one entry "
        "to a request"
    )


def test_d25_drafts_of_uneven_length_are_refused(layers: LayerFactory) -> None:
    """Rows 2, 4 and 1, which a uniform kernel would mask from the wrong end."""
    layer_class = layers.tp(4)
    inputs = engine_inputs(layer_class, (100, 50, 7), q=4)
    layer, step = inputs.prepared(layer_class), inputs.step
    metadata = recorded.vllm(step, num_actual_tokens=7)
    starts = torch.tensor([0, 2, 6, 7])
    text = "every request needs as many rows as the others"
    for handed in (metadata, recorded.common(metadata, query_start_loc_cpu=starts)):
        with pytest.raises(LayerError, match=text):
            from_vllm(handed, layer, step.hidden, step.out, block_size=64)


def test_d31_the_pools_page_is_not_the_kernels(layers: LayerFactory) -> None:
    """A manager page of 2048 tokens: blocks 5 and 9 are 160 to 191 and 288 to 319."""
    layer_class = layers.tp(4)
    inputs = engine_inputs(layer_class, (70,))
    layer, step = inputs.prepared(layer_class), inputs.step
    table = torch.tensor([[5, 9]], dtype=torch.int32)
    metadata = recorded.vllm(step, block_table=table, block_size=2048)
    buffers = StepBuffers.for_layer(layer, 4096, "cpu")
    found = from_vllm(metadata, layer, step.hidden, step.out, buffers=buffers)
    assert found.block_table.tolist() == [[*range(160, 192), *range(288, 320)]]
    metadata.block_size = 2100
    with pytest.raises(LayerError, match=r"block_size is 2100; latent_kv has pages of 64 tokens"):
        from_vllm(metadata, layer, step.hidden, step.out, buffers=buffers)
    nameless = recorded.common(metadata)
    with pytest.raises(LayerError, match=r"block_size is missing; pass block_size="):
        from_vllm(nameless, layer, step.hidden, step.out, buffers=buffers)


@pytest.mark.parametrize("contexts", [(10, 7, 12, 0), (0,) * 8, (1, 0)])
def test_d33_requests_without_keys(layers: LayerFactory, contexts: tuple[int, ...]) -> None:
    """A padded slot of length 0, a batch of nothing, a request shorter than its rows."""
    layer_class = layers.tp(4)
    inputs = engine_inputs(layer_class, contexts, q=4)
    layer, step = inputs.prepared(layer_class), inputs.step
    layer.run(step)
    wanted = step.out.clone()
    made: Step = from_vllm(
        recorded.vllm(step), layer, step.hidden, step.out, index_metadata=recorded.indexer(step)
    )
    step.out.fill_(torch.nan)
    layer.run(made)
    assert step.out.equal(wanted)
    assert {name for name in given(made)} == {name for name in given(step)}
    for request, length in enumerate(contexts):
        first = request * 4
        assert bool((step.out[first : first + 4 - min(length, 4)] == 0).all())
