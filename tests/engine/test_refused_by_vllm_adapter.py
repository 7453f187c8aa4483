"""What from_vllm refuses: attribute, value and repair in every text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import engine_recorded as recorded
import pytest
import torch
from layer_factory import LayerFactory
from layer_inputs import engine_inputs

from kpipe.runtime.engine.step_buffers import StepBuffers
from kpipe.runtime.engine.vllm import from_vllm
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError, Step

ELSEWHERE = "run this step through the engine's own attention"
EVEN = f"every request needs as many rows as the others: {ELSEWHERE}"
WHOLE = "hand in the metadata of the layer's MLA backend or CommonAttentionMetadata"
COPY = "or copy through buffers=StepBuffers.for_layer(...)"


@pytest.fixture(scope="module")
def step(layers: LayerFactory) -> Step:
    """Two requests of four rows."""
    return engine_inputs(layers.tp(4), (70, 131), q=4).step


def refused(layer: Layer, step: Step, metadata: Any, text: str, **named: Any) -> None:
    with pytest.raises(LayerError) as caught:
        from_vllm(metadata, layer, step.hidden, step.out, **named)
    assert str(caught.value) == text


CHANGED = [
    (
        {"num_prefills": 1, "num_decodes": 0},
        f"tp_4 from vLLM: num_prefills is 1, alone; decode only: {ELSEWHERE}",
    ),
    (
        {"num_prefills": 1, "num_decodes": 3},
        f"tp_4 from vLLM: num_prefills is 1, mixed with 3 decodes; decode only: {ELSEWHERE}",
    ),
    (
        {"num_actual_tokens": 6},
        f"tp_4 from vLLM: num_actual_tokens is 6 with num_reqs 2 and max_query_len 4; {EVEN}",
    ),
    ({"num_reqs": None}, f"tp_4 from vLLM: num_reqs is missing; {WHOLE}"),
    (
        {"max_query_len": torch.tensor(4)},
        "tp_4 from vLLM: max_query_len is [] i64; it must be a number of the host's",
    ),
    ({"num_reqs": "two"}, "tp_4 from vLLM: num_reqs is 'two'; it must be an integer"),
    ({"num_reqs": 0}, "tp_4 from vLLM: the batch is of 0 requests; leave the layer out"),
    (
        {"max_query_len": 3, "num_actual_tokens": 6},
        "tp_4 from vLLM: the step is of 6 rows, 3 a request; q 3 is not declared; declared: 1, 4: "
        f"{ELSEWHERE}, or declare it under rows and generate",
    ),
    (
        {"num_reqs": 3, "num_actual_tokens": 12},
        "tp_4 from vLLM: hidden is [8, 256] bf16; the metadata counts 12 rows: hand in both of one "
        "step",
    ),
    (
        {"max_seq_len": 513},
        "tp_4 from vLLM: max_seq_len is 513; the layer is generated for contexts of 512: lower the "
        "engine's longest context, or raise `context` in the geometry and generate",
    ),
    (
        {"block_table": torch.zeros(2, 3, dtype=torch.int32)},
        "tp_4 from vLLM: block_table is [2, 3] i32; 3 pages of 64 tokens do not hold a context of "
        "512: hand in the table of this rank at its full width",
    ),
    (
        {"block_table": torch.zeros(1, 16, dtype=torch.int32)},
        "tp_4 from vLLM: block_table is [1, 16] i32 with num_reqs 2; hand in the tensor that "
        "has one entry to a request",
    ),
    (
        {"block_table": torch.zeros(2, 16)},
        "tp_4 from vLLM: block_table is [2, 16] fp32; needs 2 axes of i32 or i64",
    ),
    (
        {"block_table": torch.zeros(2, 16, dtype=torch.int64)},
        f"tp_4 from vLLM: block_table is [2, 16] i64; kernels read i32, {COPY}",
    ),
    (
        {"block_table": torch.zeros(16, 2, dtype=torch.int32).T},
        "tp_4 from vLLM: block_table is with strides (1, 2); kernels read the pages of a request "
        f"side by side: make it contiguous, {COPY}",
    ),
    (
        {"block_table": None},
        f"tp_4 from vLLM: block_table or block_table_tensor is missing; {WHOLE}",
    ),
    (
        {"seq_lens": torch.zeros(2, dtype=torch.int64)},
        f"tp_4 from vLLM: seq_lens is [2] i64; kernels read i32, {COPY}",
    ),
    (
        {"seq_lens": torch.zeros(4, dtype=torch.int32)[::2]},
        "tp_4 from vLLM: seq_lens is with stride 2; kernels read it side by side: make it "
        f"contiguous, {COPY}",
    ),
    (
        {"seq_lens": None},
        f"tp_4 from vLLM: seq_lens is missing; {WHOLE}, or index_metadata",
    ),
    (
        {"seq_lens": torch.zeros(2, dtype=torch.int32, device="meta")},
        "tp_4 from vLLM: seq_lens is on meta; the hidden states are on cpu: hand in the engine's "
        "device copy",
    ),
    (
        {"slot_mapping": torch.zeros(8, dtype=torch.int32)},
        f"tp_4 from vLLM: slot_mapping is [8] i32; kernels read i64, {COPY}",
    ),
    (
        {"slot_mapping": torch.zeros(7, dtype=torch.int64)},
        "tp_4 from vLLM: slot_mapping is [7] i64; the step has 8 rows: hand in metadata and hidden "
        "states of one step",
    ),
    (
        {"block_size": 16},
        "tp_4 from vLLM: block_size is 16; latent_kv has pages of 64 tokens: start the engine with "
        "--block-size 64, or change `page` in the spec and generate",
    ),
    (
        {"block_size": 128},
        "tp_4 from vLLM: block_table is a table of pages of 2 kernel pages; hand in the table that "
        f"the engine's kernels use, {COPY}",
    ),
]


@pytest.mark.parametrize(("changed", "text"), CHANGED, ids=lambda value: str(value)[:40])
def test_metadata_that_does_not_fit(
    tp: Layer, step: Step, changed: dict[str, Any], text: str
) -> None:
    refused(tp, step, recorded.vllm(step, **changed), text)


def test_what_is_no_metadata_of_a_layer(tp: Layer, step: Step) -> None:
    metadata = recorded.vllm(step)
    refused(
        tp,
        step,
        None,
        "tp_4 from vLLM: metadata is missing; a profiling run has none: leave the layer out",
    )
    refused(
        tp,
        step,
        {"model.layers.0.attn": metadata},
        "tp_4 from vLLM: metadata is a mapping; hand in metadata[layer_name]",
    )
    refused(
        tp,
        step,
        recorded.common(metadata),
        "tp_4 from vLLM: block_size is missing; pass block_size=, the tokens to an entry of the "
        "block table",
    )
    refused(
        tp,
        step,
        recorded.common(metadata, causal=False),
        f"tp_4 from vLLM: causal is False; the layer masks causally: {ELSEWHERE}",
        block_size=64,
    )


@pytest.mark.parametrize(
    ("starts", "rows"),
    [([0, 4, 6], [4, 2]), ([0, 0, 4], [0, 4]), ([0, 0, 0], [0, 0]), ([0, 4, 3], [4, -1])],
)
def test_uneven_rows_are_seen_on_the_host(
    tp: Layer, step: Step, starts: list[int], rows: list[int]
) -> None:
    given = recorded.common(recorded.vllm(step), query_start_loc_cpu=torch.tensor(starts))
    text = f"tp_4 from vLLM: query_start_loc_cpu is {starts}, rows {rows}; {EVEN}"
    refused(tp, step, given, text, block_size=64)


def test_requests_without_rows_behind_are_padding(tp: Layer, step: Step) -> None:
    """Three requests and their rows are counted, the last of them has none."""
    metadata = recorded.vllm(step, num_reqs=3, num_actual_tokens=12)
    metadata.seq_lens = torch.tensor([70, 131, 0], dtype=torch.int32)
    metadata.block_table = torch.cat([metadata.block_table, metadata.block_table[:1]])
    bounds = torch.tensor([0, 4, 8, 8])
    given = recorded.common(metadata, query_start_loc_cpu=bounds)
    found = from_vllm(given, tp, step.hidden, step.out, block_size=64)
    assert (found.rows, found.q, found.lengths.tolist()) == (8, 4, [70, 131])


def test_the_indexers_metadata(tp: Layer, step: Step) -> None:
    metadata = recorded.vllm(step)
    cases = [
        (
            {"num_prefills": 2},
            f"tp_4 from vLLM's indexer: num_prefills is 2, mixed with 2 decodes; decode only: "
            f"{ELSEWHERE}",
        ),
        (
            {"num_decodes": 5, "num_decode_tokens": 20},
            "tp_4 from vLLM's indexer: decode.block_table is [2, 16] i32; needs num_decodes 5 or "
            "num_decode_tokens 20 rows: hand in metadata of one step",
        ),
        (
            {"decode": None},
            "tp_4 from vLLM's indexer: block_table or block_table_tensor or decode.block_table is "
            f"missing; {WHOLE}",
        ),
    ]
    for changed, text in cases:
        index = recorded.indexer(step, **changed)
        refused(tp, step, metadata, text, index_metadata=index)
    uneven = recorded.indexer(step)
    uneven.decode.requires_padding = True
    text = f"tp_4 from vLLM's indexer: decode.requires_padding is True; {EVEN}"
    refused(tp, step, metadata, text, index_metadata=uneven)


def test_older_metadata_has_its_lengths_in_the_indexers(tp: Layer, step: Step) -> None:
    index = recorded.indexer(step)
    found = from_vllm(
        recorded.vllm(step, seq_lens=None), tp, step.hidden, step.out, index_metadata=index
    )
    assert found.lengths.data_ptr() == index.seq_lens.data_ptr()


def test_one_side_shards_contexts(tp: Layer, dcp: Layer, step: Step) -> None:
    metadata = recorded.vllm(step)
    local = torch.zeros(2, dtype=torch.int32)
    refused(
        tp,
        step,
        recorded.common(metadata, dcp_local_seq_lens=local),
        "tp_4 from vLLM: dcp_local_seq_lens is [2] i32; the layer holds whole contexts: use a "
        "pipeline with dcp, or decode_context_parallel_size 1",
        block_size=64,
    )
    refused(
        dcp,
        step,
        recorded.common(metadata),
        "dcp_2_i1 from vLLM: dcp_local_seq_lens is missing; the layer shards contexts over 2 "
        "ranks: set decode_context_parallel_size 2",
        block_size=64,
    )
    refused(
        dcp,
        step,
        recorded.vllm(step, cp_kv_cache_interleave_size=64),
        "dcp_2_i1 from vLLM: cp_kv_cache_interleave_size is 64; the layer deals runs of 1: set the "
        "engine's to that, or `parallel.interleave` and generate",
    )


def test_rows_beyond_the_largest_declared(tp: Layer, step: Step) -> None:
    many = replace(
        step,
        hidden=torch.zeros(68, 256, dtype=torch.bfloat16),
        lengths=torch.ones(17, dtype=torch.int32),
        slots=torch.zeros(68, dtype=torch.int64),
        block_table=torch.zeros(17, 2, dtype=torch.int32),
    )
    text = (
        "tp_4 from vLLM: the step is of 68 rows, 4 a request; 68 rows; declared for q 4 are 1 to "
        f"64: {ELSEWHERE}, or declare it under rows and generate"
    )
    refused(tp, many, recorded.vllm(many), text)


def test_buffers_for_shorter_contexts(tp: Layer, step: Step) -> None:
    buffers = StepBuffers.for_layer(tp, 512, "cpu")
    text = (
        "tp_4 from vLLM: block_table is [2, 16] i32; 16 pages, the buffers hold 8: make them for "
        "the engine's longest context"
    )
    refused(tp, step, recorded.vllm(step), text, buffers=buffers)
    ragged = replace(step, hidden=torch.zeros(10, 256, dtype=torch.bfloat16))
    text = "tp_4 from vLLM: hidden is [10, 256] bf16; pad to a multiple of 4 rows a request"
    refused(tp, ragged, recorded.vllm(step), text, buffers=buffers)


def test_ranks_agree_on_what_is_too_long(dcp: Layer, step: Step) -> None:
    """Rank 0 of two holds 513 of 1025 tokens, this rank 512, which would fit."""
    refused(
        dcp,
        step,
        recorded.vllm(step, longest=1025),
        "dcp_2_i1 from vLLM: max_seq_len is 1025; the layer is generated for contexts of 512: "
        "lower the engine's longest context, or raise `context` in the geometry and generate",
    )
    short = recorded.vllm(step, longest=129)
    short.block_table = short.block_table[:, :1]
    refused(
        dcp,
        step,
        short,
        "dcp_2_i1 from vLLM: block_table is [2, 1] i32; 1 pages of 64 tokens do not hold a context "
        "of 65: hand in the table of this rank at its full width",
    )
    from_vllm(recorded.vllm(step, longest=1024), dcp, step.hidden, step.out)
