"""What from_sglang refuses: attribute, value and repair in every text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import engine_recorded as recorded
import pytest
import torch
from engine_recorded import ForwardMode, VerifyInput
from layer_factory import LayerFactory
from layer_inputs import engine_inputs

from kpipe.runtime.engine.sglang import from_sglang
from kpipe.runtime.engine.step_buffers import StepBuffers
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError, Step

ELSEWHERE = "run this step through the engine's own attention"
BACKEND = "hand in the backend's forward_metadata of this batch"
COPIED = "copy through buffers=StepBuffers.for_layer(...)"


@pytest.fixture(scope="module")
def step(layers: LayerFactory) -> Step:
    """Two requests of four rows."""
    return engine_inputs(layers.tp(4), (70, 135), q=4).step


@pytest.fixture(scope="module")
def decode(layers: LayerFactory) -> Step:
    """Two requests of one row."""
    return engine_inputs(layers.tp(4), (70, 131)).step


def refused(layer: Layer, step: Step, batch: Any, text: str, **named: Any) -> None:
    with pytest.raises(LayerError) as caught:
        from_sglang(batch, layer, step.hidden, step.out, **named)
    assert str(caught.value) == text


@pytest.mark.parametrize("mode", ["EXTEND", "MIXED", "DRAFT_EXTEND_V2"])
def test_what_is_no_decode(tp: Layer, decode: Step, mode: str) -> None:
    batch = replace(recorded.sglang(decode), forward_mode=ForwardMode[mode])
    text = f"tp_4 from SGLang: forward_mode is '{mode}'; decode only: {ELSEWHERE}"
    refused(tp, decode, batch, text)


BATCHES = [
    (
        {"forward_mode": ForwardMode.IDLE},
        "tp_4 from SGLang: forward_mode is IDLE; an idle batch has no rows: leave the layer out",
    ),
    (
        {"forward_mode": None},
        f"tp_4 from SGLang: forward_mode is missing; decode only: {ELSEWHERE}",
    ),
    (
        {"spec_info": VerifyInput(4, topk=2)},
        "tp_4 from SGLang: spec_info.topk is 2; drafts must form a chain: use "
        "--speculative-eagle-topk 1",
    ),
    (
        {"spec_info": VerifyInput(4, ragged_verify_layout=object())},
        f"tp_4 from SGLang: spec_info.ragged_verify_layout is set; rows must be even: {ELSEWHERE}",
    ),
    (
        {"spec_info": VerifyInput(3)},
        "tp_4 from SGLang: out_cache_loc is [8] i64 with batch_size 2; needs 3 rows a request, "
        f"evenly: {ELSEWHERE}",
    ),
    (
        {"batch_size": 3},
        "tp_4 from SGLang: out_cache_loc is [8] i64 with batch_size 3; needs 4 rows a request, "
        f"evenly: {ELSEWHERE}",
    ),
    (
        {"forward_mode": ForwardMode.DECODE},
        "tp_4 from SGLang: out_cache_loc is [8] i64 with batch_size 2; needs 1 rows a request, "
        f"evenly: {ELSEWHERE}",
    ),
    ({"batch_size": 0}, "tp_4 from SGLang: batch_size is 0; leave the layer out"),
    (
        {"batch_size": torch.tensor(2)},
        "tp_4 from SGLang: batch_size is [] i64; it must be a number of the host's",
    ),
    (
        {"out_cache_loc": None},
        "tp_4 from SGLang: out_cache_loc is missing; hand in a ForwardBatch",
    ),
    (
        {"out_cache_loc": torch.zeros(8, dtype=torch.int32)},
        "tp_4 from SGLang: out_cache_loc is [8] i32; kernels read i64, or " + COPIED,
    ),
]


@pytest.mark.parametrize(("changed", "text"), BATCHES, ids=lambda value: str(value)[:40])
def test_batches_that_do_not_fit(tp: Layer, step: Step, changed: dict[str, Any], text: str) -> None:
    batch = recorded.sglang(step)
    metadata = recorded.dsa(step, batch)
    refused(tp, step, replace(batch, **changed), text, metadata=metadata)


METADATA = [
    (
        {"page_size": 1},
        "tp_4 from SGLang's DSAMetadata: page_size is 1; the caches have pages of index_kv 64, "
        "latent_kv 64 tokens: start the server with --page-size 64, or change `page` in the spec "
        "and generate",
    ),
    (
        {"max_seq_len_k": 513},
        "tp_4 from SGLang's DSAMetadata: max_seq_len_k is 513; the layer is generated for contexts "
        "of 512: lower the engine's longest context, or raise `context` in the geometry and "
        "generate",
    ),
    (
        {"cache_seqlens_int32": torch.zeros(2, dtype=torch.int64)},
        f"tp_4 from SGLang's DSAMetadata: cache_seqlens_int32 is [2] i64; kernels read i32, or "
        f"{COPIED}",
    ),
    (
        {"cache_seqlens_int32": torch.zeros(1, dtype=torch.int32)},
        "tp_4 from SGLang's DSAMetadata: cache_seqlens_int32 is [1] i32 with batch_size 2; hand "
        "in the tensor that has one entry to a request",
    ),
    (
        {"real_page_table": torch.zeros(5, 4, dtype=torch.int32)},
        "tp_4 from SGLang's DSAMetadata: real_page_table is [5, 4] i32; the batch has 2 requests "
        "and 8 rows: hand in the metadata of this batch",
    ),
    (
        {"real_page_table": None},
        f"tp_4 from SGLang's DSAMetadata: real_page_table is missing; {BACKEND}",
    ),
]


@pytest.mark.parametrize(("changed", "text"), METADATA, ids=lambda value: str(value)[:40])
def test_metadata_that_does_not_fit(
    tp: Layer, step: Step, changed: dict[str, Any], text: str
) -> None:
    batch = recorded.sglang(step)
    refused(tp, step, batch, text, metadata=replace(recorded.dsa(step, batch), **changed))


def test_what_views_cannot_show(tp: Layer, dcp: Layer, decode: Step) -> None:
    batch = recorded.sglang(decode)
    refused(tp, decode, batch, f"tp_4 from SGLang: metadata is missing; {BACKEND}, or {COPIED}")
    text = f"dcp_2_i1 from SGLang: out_cache_loc is a place of all ranks; {COPIED}"
    refused(dcp, decode, batch, text, metadata=recorded.dsa(decode, batch))


def test_what_cannot_be_copied(tp: Layer, layers: LayerFactory, decode: Step) -> None:
    batch = replace(recorded.sglang(decode), req_to_token_pool=None)
    buffers = StepBuffers.for_layer(tp, 2048, "cpu")
    text = (
        "tp_4 from SGLang: req_to_token is missing; pass "
        "req_to_token=model_runner.req_to_token_pool.req_to_token"
    )
    refused(tp, decode, batch, text, buffers=buffers)
    table = torch.zeros(3, 40, dtype=torch.float32)
    text = "tp_4 from SGLang: req_to_token is [3, 40] fp32; needs 2 axes of i32 or i64"
    refused(tp, decode, batch, text, buffers=buffers, req_to_token=table)


def test_runs_of_tokens_are_not_sglangs_deal(layers: LayerFactory, decode: Step) -> None:
    from kpipe.runtime.comm.virtual_ranks import VirtualRanks

    layer_class = layers.dcp(2, 64)
    layer = engine_inputs(layer_class, (3,)).prepared(layer_class, comm=VirtualRanks(2).rank(0))
    buffers = StepBuffers.for_layer(layer, 2048, "cpu")
    text = (
        "dcp_2_i64 from SGLang: out_cache_loc is dealt token by token; the layer deals runs of 64: "
        "use `parallel.interleave: 1`"
    )
    refused(layer, decode, recorded.sglang(decode, ranks=2), text, buffers=buffers)
