"""Engine metadata drives whole layers on the reference backend; the oracle judges the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import engine_recorded as recorded
import pytest
import torch
from layer_checks import assert_within_bounds, compared
from layer_factory import REPOSITORY, LayerFactory

from kpipe.runtime.engine.sglang import from_sglang
from kpipe.runtime.engine.step_buffers import StepBuffers
from kpipe.runtime.engine.vllm import from_vllm
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import Step
from kpipe.runtime.trial import Case, run_case

Hand = Callable[[Layer, Step], Step]
CONTEXTS = (70, 5, 131, 33, 200)
WITH_EMPTY = (70, 0, 131, 2, 200)  # vLLM pads with requests of length 0


def driven(layer_class: type[Layer], hand: Hand) -> type[Layer]:
    """The layer, run on what an engine's metadata of each step gives."""

    class Driven(layer_class):
        def run(self, step: Step, **named: Any) -> str:
            given = hand(self, step)
            method = super().run(given, **named)
            step.out.copy_(given.out[: step.rows])
            assert bool((given.out[step.rows :] == 0).all())
            return method

    return Driven


def judged(layer_class: type[Layer], hand: Hand, contexts: tuple[int, ...], q: int = 1) -> None:
    (trial,) = run_case(driven(layer_class, hand), Case(contexts, q=q))
    stages = {what.split()[0] for what in compared(assert_within_bounds([trial]))}
    assert {"sparse_core", "out"} & stages and trial.complete


def grown(step: Step, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and output of the engine's captured size; the rows behind hold NaN."""
    hidden = torch.full((rows, step.hidden.shape[1]), torch.nan, dtype=torch.bfloat16)
    hidden[: step.rows] = step.hidden
    return hidden, torch.full_like(hidden, torch.nan)


@pytest.mark.parametrize("q", [1, 4])
@pytest.mark.parametrize("flat", [False, True])
def test_vllm_drives_a_tensor_parallel_layer(layers: LayerFactory, q: int, flat: bool) -> None:
    def hand(layer: Layer, step: Step) -> Step:
        metadata = recorded.vllm(step)
        index = recorded.indexer(step, flat=flat)
        given = from_vllm(metadata, layer, step.hidden, step.out, index_metadata=index)
        for found, theirs in (
            (given.lengths, metadata.seq_lens),
            (given.slots, metadata.slot_mapping),
            (given.block_table, metadata.block_table),
            (given.index_table, index.decode.block_table),
            (given.hidden, step.hidden),
        ):
            assert found.data_ptr() == theirs.data_ptr(), "a view of the engine's tensor"
        return given

    judged(layers.tp(4), hand, WITH_EMPTY, q)


@pytest.mark.parametrize("interleave", [1, 64])
@pytest.mark.parametrize("q", [1, 4])
def test_vllm_drives_ranks_that_share_contexts(
    layers: LayerFactory, interleave: int, q: int
) -> None:
    def hand(layer: Layer, step: Step) -> Step:
        metadata = recorded.vllm(step, cp_kv_cache_interleave_size=interleave)
        local = layer.shard.local_length(metadata.seq_lens.long()).int()
        given = recorded.common(metadata, dcp_local_seq_lens=local)
        index = recorded.indexer(step)
        return from_vllm(given, layer, step.hidden, step.out, index_metadata=index, block_size=64)

    judged(layers.dcp(2, interleave), hand, WITH_EMPTY, q)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("q", [1, 4])
def test_vllm_with_rows_behind_its_requests(layers: LayerFactory, ranks: int, q: int) -> None:
    """Copied into buffers, the step has all rows of the hidden states; those behind are zero."""

    def hand(layer: Layer, step: Step) -> Step:
        buffers = StepBuffers.for_layer(layer, 2048, "cpu")
        for tensor in buffers.tensors.values():
            tensor.fill_(recorded.RUBBISH)
        hidden, out = grown(step, 32)
        metadata = recorded.vllm(step)
        metadata.seq_lens = metadata.seq_lens.long()
        metadata.slot_mapping = metadata.slot_mapping.int()
        index = recorded.indexer(step)
        return from_vllm(metadata, layer, hidden, out, index_metadata=index, buffers=buffers)

    judged(layers.tp(4) if ranks == 1 else layers.dcp(2), hand, CONTEXTS, q)


@pytest.mark.parametrize("q", [1, 4])
def test_sglang_drives_a_tensor_parallel_layer(layers: LayerFactory, q: int) -> None:
    def hand(layer: Layer, step: Step) -> Step:
        batch = recorded.sglang(step)
        metadata = recorded.dsa(step, batch)
        given = from_sglang(batch, layer, step.hidden, step.out, metadata=metadata)
        assert given.slots.data_ptr() == batch.out_cache_loc.data_ptr()
        assert given.block_table.data_ptr() == metadata.real_page_table.data_ptr()
        return own_index(given, step)

    judged(layers.tp(4), hand, CONTEXTS, q)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("q", [1, 4])
def test_sglang_from_the_place_of_every_token(layers: LayerFactory, ranks: int, q: int) -> None:
    """Places of tokens become pages, places of all ranks this rank's, place 0 nobody's."""

    def hand(layer: Layer, step: Step) -> Step:
        batch = recorded.sglang(step, ranks=ranks, padding=2)
        buffers = StepBuffers.for_layer(layer, 2048, "cpu")
        hidden, out = grown(step, 32)
        given = from_sglang(batch, layer, hidden, out, buffers=buffers)
        assert given.slots[: step.rows].equal(step.slots)
        assert bool((given.slots[step.rows :] == -1).all())
        assert given.lengths.tolist() == [*step.lengths.tolist(), *[0] * (32 // q - len(CONTEXTS))]
        return own_index(given, step, buffers)

    judged(layers.tp(4) if ranks == 1 else layers.dcp(2), hand, CONTEXTS, q)


def test_vllm_drives_the_committed_tensor_parallel_layer() -> None:
    """At the model's own dimensions, rank 3 of 8: verify rows around top_k."""

    def hand(layer: Layer, step: Step) -> Step:
        metadata = recorded.vllm(step, longest=2112)
        index = recorded.indexer(step, flat=True)
        return from_vllm(metadata, layer, step.hidden, step.out, index_metadata=index)

    layer_class = driven(load_layer(REPOSITORY / "generated" / "dsa_tp"), hand)
    (trial,) = run_case(layer_class, Case((2050, 2), q=4, arch="sm_90a", only_ranks=(3,)))
    assert_within_bounds([trial])
    assert trial.ranks[0].views.valid.tolist() == [2047, 2048, 2048, 2048, 0, 0, 1, 2]


def test_vllm_drives_the_committed_ranks_that_share_contexts() -> None:
    """At the model's own dimensions, both ranks; more keys than top_k, and a padded request."""

    def hand(layer: Layer, step: Step) -> Step:
        metadata = recorded.vllm(step, longest=2500)
        index = recorded.indexer(step)
        return from_vllm(metadata, layer, step.hidden, step.out, index_metadata=index)

    layer_class = driven(load_layer(REPOSITORY / "generated" / "dsa_dcp_d2"), hand)
    (trial,) = run_case(layer_class, Case((2500, 40, 0), arch="sm_90a"))
    assert_within_bounds([trial])
    counts = torch.stack([run.views.valid for run in trial.ranks])
    assert counts.sum(0).tolist() == [2048, 40, 0]


def own_index(given: Step, step: Step, buffers: StepBuffers | None = None) -> Step:
    """The oracle places index keys in other blocks than latents; an engine has one numbering."""
    assert given.index_table is given.block_table and given.index_slots is given.slots
    if buffers is None:
        return replace(given, index_table=step.index_table, index_slots=step.index_slots)
    table, slots = buffers.tensors["index_table"], buffers.tensors["index_slots"].fill_(-1)
    table.zero_()[: step.index_table.shape[0], : step.index_table.shape[1]] = step.index_table
    slots[: step.rows] = step.index_slots
    return replace(
        given, index_table=table[: given.lengths.shape[0]], index_slots=slots[: given.rows]
    )
