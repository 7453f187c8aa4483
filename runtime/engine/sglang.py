"""A step of SGLang as a layer takes it, read by attribute; SGLang need not be installed.

Read in sgl-project/sglang, main of 2026 (commits of the stored files):

    python/sglang/srt/model_executor/forward_batch_info.py at 003bbaf9, ForwardBatch, ForwardMode
    python/sglang/srt/layers/attention/dsa_backend.py at 0034a380, DSAMetadata
    python/sglang/srt/layers/attention/dsa/dcp_utils.py at 24569621, ids under context parallelism

What these say: `seq_lens` counts the new token in a decode and leaves the drafts out in a verify;
DSAMetadata's `cache_seqlens_int32` counts them in both.  `req_to_token` names the place of every
token of a request; `real_page_table` its pages, in a verify once for each row.  A padded request
has length 1 and place 0, which is nobody's.  Under context parallelism places count the tokens of
all ranks: rank `id % ranks` holds `id // ranks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.engine.extent import ELSEWHERE, Extent, check_longest, extent_of
from kpipe.runtime.engine.handed import Handed, Source, describe
from kpipe.runtime.engine.step_buffers import Copies, StepBuffers
from kpipe.runtime.engine.views import Views
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import Step

MODES = ("DECODE", "TARGET_VERIFY")
BATCH = "hand in a ForwardBatch"
BACKEND = "hand in the backend's forward_metadata of this batch"
POOL = "pass req_to_token=model_runner.req_to_token_pool.req_to_token"
COPIED = "copy through buffers=StepBuffers.for_layer(...)"


def from_sglang(
    batch: Any,
    layer: Layer,
    hidden: Tensor,
    out: Tensor,
    *,
    metadata: Any = None,
    req_to_token: Tensor | None = None,
    buffers: StepBuffers | None = None,
) -> Step:
    """The step that a ForwardBatch describes, for a layer that is prepared.

    `metadata` is the attention backend's DSAMetadata of this batch; `req_to_token` the pool's
    table, taken from batch.req_to_token_pool where that exists.  hidden and out are
    [tokens, hidden] BF16 and may have more rows than the batch counts.

    Without `buffers` the step consists of views of `out_cache_loc`, `cache_seqlens_int32` and
    `real_page_table`; SGLang's padded requests then attend to the place 0 that they insert to.
    With `buffers` lengths, slots and tables are copied there on the current stream, from metadata
    or from the pool's table; padding gets length 0 and slot -1, and so do place 0 and, under
    context parallelism, the places of other ranks.  The step covers all rows of hidden.
    Everything stays on the device: host integers, shapes and the mode's name are all that is read,
    no tensor is copied to the host, no call waits for the GPU.

    Raises LayerError naming attribute, value and repair for modes that are no decode, trees and
    ragged layouts of drafts, rows or q that the layer does not declare, and for dtypes, pages,
    layouts and interleaves that are not the layer's.
    """
    source = Source("SGLang", layer.NAME, batch)
    verify = _verifies(source)
    requests, q = _requests(source)
    extent = extent_of(source, layer, requests, q, hidden, buffers is not None)
    own = Source("SGLang's DSAMetadata", layer.NAME, metadata)
    if metadata is not None:
        check_longest(own, layer, "max_seq_len_k", own.bound("max_seq_len_k"))
    _check_pages(layer, own)
    if buffers is None:
        step = _views(source, own, layer, hidden, out, extent)
    else:
        take = buffers.taking(source, hidden)
        step = _copies(source, own, layer, take, extent, out, req_to_token, verify)
    if "index_table" in layer.MEMORY.step:
        step.index_table, step.index_slots = step.block_table, step.slots
    return step


def _verifies(source: Source) -> bool:
    """Whether the batch verifies drafts; LayerError for a mode that is neither that nor decode."""
    mode = source.optional("forward_mode")
    name = getattr(mode, "name", mode)
    if name == "IDLE":
        raise source.refusal("forward_mode", name, "an idle batch has no rows: leave the layer out")
    if name not in MODES:
        raise source.refusal("forward_mode", describe(name), f"decode only: {ELSEWHERE}")
    if name == "TARGET_VERIFY":
        topk = source.bound("spec_info.topk")
        if topk not in (None, 1):
            raise source.refusal(
                "spec_info.topk", topk, "drafts must form a chain: use --speculative-eagle-topk 1"
            )
        if source.optional("spec_info.ragged_verify_layout") is not None:
            raise source.refusal(
                "spec_info.ragged_verify_layout", "set", f"rows must be even: {ELSEWHERE}"
            )
    return name == "TARGET_VERIFY"


def _requests(source: Source) -> tuple[int, int]:
    """Requests of the batch and rows of each, from host integers and shapes."""
    requests = source.count("batch_size", BATCH)
    slots = source.tensor("out_cache_loc", repair=BATCH).tensor
    if requests < 1:
        raise source.refusal("batch_size", requests, "leave the layer out")
    q, rest = divmod(slots.shape[0] if slots.dim() else 0, requests)
    drafts = source.bound("spec_info.draft_token_num")
    verifies = source.optional("forward_mode.name") == "TARGET_VERIFY"
    wanted = (drafts or q) if verifies else 1
    if rest or q != wanted:
        raise source.refusal(
            "out_cache_loc",
            f"{describe(slots)} with batch_size {requests}",
            f"needs {wanted} rows a request, evenly: {ELSEWHERE}",
        )
    return requests, q


def _check_pages(layer: Layer, own: Source) -> None:
    """Raises LayerError where SGLang's pages, one size for all of a pool, are not the caches'."""
    pages = {spec.page for spec in layer.MEMORY.caches.values()}
    found = own.bound("page_size")
    page = min(pages)
    if len(pages) > 1 or found not in (None, page):
        sizes = ", ".join(f"{n} {s.page}" for n, s in sorted(layer.MEMORY.caches.items()))
        raise own.refusal(
            "page_size",
            describe(found),
            f"the caches have pages of {sizes} tokens: start the server with --page-size {page}, "
            "or change `page` in the spec and generate",
        )


def _views(
    source: Source, own: Source, layer: Layer, hidden: Tensor, out: Tensor, extent: Extent
) -> Step:
    """The step in the engine's memory."""
    if layer.CONTEXT_PARALLEL and layer.RANKS > 1:
        raise source.refusal("out_cache_loc", "a place of all ranks", COPIED)
    if own.given is None:
        raise source.refusal("metadata", "missing", f"{BACKEND}, or {COPIED}")
    take = Views(own, hidden)
    table = own.tensor("real_page_table", repair=BACKEND)
    lengths = own.tensor("cache_seqlens_int32", repair=BACKEND)
    own.check_counted(lengths, extent.requests, "batch_size")
    return Step(
        hidden=hidden[: extent.rows],
        out=out[: extent.rows],
        lengths=take.lengths(lengths, extent),
        slots=Views(source, hidden).slots(source.tensor("out_cache_loc", repair=BACKEND), extent),
        block_table=take.table(table, extent, _rows_a_request(own, table, extent)),
        q=extent.q,
    )


def _copies(
    source: Source,
    own: Source,
    layer: Layer,
    take: Copies,
    extent: Extent,
    out: Tensor,
    req_to_token: Tensor | None,
    verify: bool,
) -> Step:
    """The step in buffers of its own, with padding and other ranks' rows marked."""
    slots = source.tensor("out_cache_loc", repair=BATCH)
    if own.given is None:
        plus = extent.q if verify else 0
        found = source.tensor("seq_lens", repair=BATCH)
        source.check_counted(found, extent.requests, "batch_size")
        lengths = take.lengths(found, extent, plus)
    else:
        found = own.tensor("cache_seqlens_int32", repair=BACKEND)
        own.check_counted(found, extent.requests, "batch_size")
        lengths = take.lengths(found, extent)
    step = Step(
        hidden=take.like[: extent.step_rows],
        out=out[: extent.step_rows],
        lengths=lengths,
        slots=take.slots(slots, extent),
        block_table=_table(source, own, layer, take, extent, req_to_token),
        q=extent.q,
    )
    _mark_padding(step, extent)
    if layer.CONTEXT_PARALLEL:
        _localise(step.slots, layer, source)
    return step


def _table(
    source: Source,
    own: Source,
    layer: Layer,
    take: Copies,
    extent: Extent,
    req_to_token: Tensor | None,
) -> Tensor:
    """Pages of this rank: of the metadata, or every page's first token in the pool's table."""
    sharded = layer.CONTEXT_PARALLEL and layer.RANKS > 1
    if own.given is not None and not sharded:
        table = own.tensor("real_page_table", repair=BACKEND)
        return take.table(table, extent, _rows_a_request(own, table, extent))
    if req_to_token is None:
        req_to_token = source.optional("req_to_token_pool.req_to_token")
    if req_to_token is None:
        raise source.refusal("req_to_token", "missing", POOL)
    period = layer.MEMORY.caches["latent_kv"].page * (layer.RANKS if sharded else 1)
    pool = source.tensor("req_pool_indices", repair=BATCH)
    source.check_counted(pool, extent.requests, "batch_size")
    return take.token_table(Handed("req_to_token", req_to_token), pool, extent, period)


def _rows_a_request(own: Source, table: Handed, extent: Extent) -> int:
    """Rows of the page table to a request: a verify has one for each of its rows."""
    rows = table.tensor.shape[0] if table.tensor.dim() else 0
    if rows not in (extent.requests, extent.rows):
        raise own.refusal(
            table.attribute,
            describe(table.tensor),
            f"the batch has {extent.requests} requests and {extent.rows} rows: hand in the "
            "metadata of this batch",
        )
    return extent.q if rows == extent.rows else 1


def _mark_padding(step: Step, extent: Extent) -> None:
    """Place 0 is nobody's: its rows insert nothing, and a request that begins there has no keys."""
    empty = step.slots == 0
    step.lengths.masked_fill_(empty[:: extent.q], 0)
    step.slots.masked_fill_(empty, -1)


def _localise(slots: Tensor, layer: Layer, source: Source) -> None:
    """Places of all ranks become this rank's, -1 those of others, in place."""
    shard = layer.shard
    if shard.interleave != 1:
        raise source.refusal(
            "out_cache_loc",
            "dealt token by token",
            f"the layer deals runs of {shard.interleave}: use `parallel.interleave: 1`",
        )
    foreign = (slots < 0) | (torch.remainder(slots, shard.ranks) != shard.rank)
    slots.div_(shard.ranks, rounding_mode="floor")
    slots.masked_fill_(foreign, -1)
