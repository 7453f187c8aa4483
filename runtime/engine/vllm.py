"""A step of vLLM as a layer takes it, read by attribute; vLLM need not be installed.

Read in vllm-project/vllm, main of 2026 (commits of the stored files):

    vllm/v1/attention/backend.py at 0014ca6b, CommonAttentionMetadata
    vllm/model_executor/layers/attention/sparse_mla_attention.py at 002ed43a, the sparse metadata
    vllm/v1/attention/backends/mla/flashmla_sparse.py at 008a0c31, and at 60191e18 (2025)
    vllm/v1/attention/backends/mla/indexer.py at 0023368d, and at 07492607 (2025)

What these say: `seq_lens` counts the new tokens and, under context parallelism, those of all ranks;
`slot_mapping` and the block table are this rank's, -1 where another rank inserts and behind the
real tokens; a padded request has length 0 and block 0.  The indexer's `decode.seq_lens` are
per row and this rank's, so they are not read.  `seq_lens_cpu` waits for the GPU where it has not
been computed, so it is not read either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kpipe.runtime.engine.extent import (
    ELSEWHERE,
    Extent,
    check_longest,
    check_reach,
    extent_of,
)
from kpipe.runtime.engine.handed import Handed, Source, describe
from kpipe.runtime.engine.step_buffers import Copies, StepBuffers
from kpipe.runtime.engine.views import Views
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import Step

WHOLE = "hand in the metadata of the layer's MLA backend or CommonAttentionMetadata"
EVEN = f"every request needs as many rows as the others: {ELSEWHERE}"


def from_vllm(
    metadata: Any,
    layer: Layer,
    hidden: Tensor,
    out: Tensor,
    *,
    index_metadata: Any = None,
    block_size: int | None = None,
    buffers: StepBuffers | None = None,
) -> Step:
    """The step that vLLM's decode metadata describes, for a layer that is prepared.

    `metadata` is what the MLA backend built for this layer (or CommonAttentionMetadata, with
    `block_size` tokens to an entry of its table), `index_metadata` what the indexer's built, needed
    where the index cache has its own table.  hidden and out [tokens, hidden] BF16 may be longer.

    Without `buffers` the step is made of views and covers the counted rows; rows of `out` behind
    them are left alone.  With `buffers` lengths, slots and tables are copied there on the current
    stream, and the step covers all rows of hidden, padding included.  Everything stays
    on the device: host integers, shapes and `query_start_loc_cpu` are all that is read, no tensor
    is copied to the host, no call waits for the GPU.

    Raises LayerError naming attribute, value and repair for a prefill or a mixed batch, requests
    of uneven rows, rows or q that the layer does not declare, and for dtypes, pages, layouts and
    context parallelism that are not the layer's.
    """
    source = _checked(Source("vLLM", layer.NAME, metadata))
    _refuse_prefills(source)
    requests, q = _requests(source)
    extent = extent_of(source, layer, requests, q, hidden, buffers is not None)
    _check_parallel(source, layer)
    check_longest(source, layer, "max_seq_len", source.bound("max_seq_len"))
    take = buffers.taking(source, hidden) if buffers else Views(source, hidden)
    lengths, table, slots = _tensors(source, index_metadata)
    for one in (lengths, table):
        source.check_counted(one, source.count("num_reqs", WHOLE), "num_reqs")
    split = _split(source, layer, "latent_kv", block_size)
    page = layer.MEMORY.caches["latent_kv"].page * split
    check_reach(source, layer, table, page, source.bound("max_seq_len"))
    step = Step(
        hidden=hidden[: extent.step_rows],
        out=out[: extent.step_rows],
        lengths=take.lengths(lengths, extent),
        slots=take.slots(slots, extent),
        block_table=take.table(table, extent, split=split),
        q=extent.q,
    )
    if "index_table" in layer.MEMORY.step:
        _add_index(step, source, layer, take, extent, index_metadata, block_size)
    return step


def _checked(source: Source) -> Source:
    """The source, unless it is what vLLM hands a model instead of one layer's metadata."""
    if source.given is None:
        raise source.refusal("metadata", "missing", "a profiling run has none: leave the layer out")
    if isinstance(source.given, Mapping):
        raise source.refusal("metadata", "a mapping", "hand in metadata[layer_name]")
    return source


def _refuse_prefills(source: Source) -> None:
    prefills = source.bound("num_prefills")
    if prefills:
        decodes = source.bound("num_decodes") or 0
        what = f"mixed with {decodes} decodes" if decodes else "alone"
        raise source.refusal("num_prefills", f"{prefills}, {what}", f"decode only: {ELSEWHERE}")
    if source.optional("causal") is False:
        raise source.refusal("causal", False, f"the layer masks causally: {ELSEWHERE}")


def _requests(source: Source) -> tuple[int, int]:
    """Requests with rows, and rows of each; LayerError where they differ."""
    counted = source.count("num_reqs", WHOLE)
    tokens = source.count("num_actual_tokens", WHOLE)
    q = source.count("max_query_len", WHOLE)
    if source.optional("decode.requires_padding"):
        raise source.refusal("decode.requires_padding", True, EVEN)
    starts = source.optional("query_start_loc_cpu")
    if starts is not None:
        counted, q = _segments(source, starts, counted)
    if q < 1 or tokens < counted * q:
        seen = f"{tokens} with num_reqs {counted} and max_query_len {q}"
        raise source.refusal("num_actual_tokens", seen, EVEN)
    return counted, q


def _segments(source: Source, starts: Any, requests: int) -> tuple[int, int]:
    """Leading requests of equal rows, with none behind them; `starts` lies on the host."""
    if isinstance(starts, Tensor) and starts.device.type != "cpu":
        raise source.refusal("query_start_loc_cpu", f"on {starts.device}", "it must be the host's")
    bounds = [int(bound) for bound in starts[: requests + 1]]
    rows = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
    real = [count for count in rows if count]
    if not real or any(count != real[0] for count in real) or rows[: len(real)] != real:
        raise source.refusal("query_start_loc_cpu", f"{bounds}, rows {rows}", EVEN)
    return len(real), real[0]


def _check_parallel(source: Source, layer: Layer) -> None:
    """Raises LayerError where one of engine and layer shards contexts and the other does not."""
    sharded = source.optional("dcp_local_seq_lens") is not None
    knows = hasattr(source.given, "dcp_local_seq_lens")
    if sharded and not layer.CONTEXT_PARALLEL:
        raise source.refusal(
            "dcp_local_seq_lens",
            describe(source.optional("dcp_local_seq_lens")),
            "the layer holds whole contexts: use a pipeline with dcp, or "
            "decode_context_parallel_size 1",
        )
    if knows and not sharded and layer.CONTEXT_PARALLEL and layer.RANKS > 1:
        raise source.refusal(
            "dcp_local_seq_lens",
            "missing",
            f"the layer shards contexts over {layer.RANKS} ranks: set "
            f"decode_context_parallel_size {layer.RANKS}",
        )
    interleave = source.bound("cp_kv_cache_interleave_size")
    if layer.CONTEXT_PARALLEL and interleave not in (None, layer.shard.interleave):
        raise source.refusal(
            "cp_kv_cache_interleave_size",
            interleave,
            f"the layer deals runs of {layer.shard.interleave}: set the engine's to that, or "
            "`parallel.interleave` and generate",
        )


def _tensors(source: Source, index_metadata: Any) -> tuple[Handed, Handed, Handed]:
    """Lengths, block table and slots; older MLA metadata has its lengths in the indexer's."""
    table = source.tensor("block_table", "block_table_tensor", repair=WHOLE)
    slots = source.tensor("slot_mapping", repair=WHOLE)
    lengths = source.optional("seq_lens")
    if not isinstance(lengths, Tensor) and isinstance(
        getattr(index_metadata, "seq_lens", None), Tensor
    ):
        return Handed("index_metadata.seq_lens", index_metadata.seq_lens), table, slots
    return source.tensor("seq_lens", repair=f"{WHOLE}, or index_metadata"), table, slots


def _split(source: Source, layer: Layer, cache: str, block_size: int | None) -> int:
    """Kernel pages to a page of the engine's table; LayerError where that is no whole number."""
    page = layer.MEMORY.caches[cache].page
    found = source.bound("block_size")
    found = block_size if found is None else found
    if found is None:
        raise source.refusal(
            "block_size", "missing", "pass block_size=, the tokens to an entry of the block table"
        )
    if found < page or found % page:
        raise source.refusal(
            "block_size",
            found,
            f"{cache} has pages of {page} tokens: start the engine with --block-size {page}, or "
            "change `page` in the spec and generate",
        )
    return found // page


def _add_index(
    step: Step,
    source: Source,
    layer: Layer,
    take: Views | Copies,
    extent: Extent,
    index_metadata: Any,
    block_size: int | None,
) -> None:
    """Slots and table of the index cache: the indexer's own, or those of the latent cache."""
    if index_metadata is None:
        _share_tables(step, source, layer, take, extent, block_size)
        return
    own = _checked(Source("vLLM's indexer", layer.NAME, index_metadata))
    _refuse_prefills(own)
    if own.optional("decode.requires_padding"):
        raise own.refusal("decode.requires_padding", True, EVEN)
    if isinstance(take, Copies):
        take = take.of_index()
    table = own.tensor("block_table", "block_table_tensor", "decode.block_table", repair=WHOLE)
    every = _rows_a_request(own, table, extent)
    page = layer.MEMORY.caches["index_kv"].page
    check_reach(own, layer, table, page, source.bound("max_seq_len"))
    step.index_table = take.table(table, extent, every)
    step.index_slots = take.slots(own.tensor("slot_mapping", repair=WHOLE), extent)


def _rows_a_request(own: Source, table: Handed, extent: Extent) -> int:
    """Rows of the indexer's table to a request: it repeats a request for each of its rows where
    the engine scores row by row, and counts its rows either way."""
    rows = table.tensor.shape[0]
    if not table.attribute.startswith("decode.") or rows == own.bound("num_decodes"):
        return 1
    if rows == own.bound("num_decode_tokens"):
        return extent.q
    raise own.refusal(
        table.attribute,
        describe(table.tensor),
        f"needs num_decodes {own.bound('num_decodes')} or num_decode_tokens "
        f"{own.bound('num_decode_tokens')} rows: hand in metadata of one step",
    )


def _share_tables(
    step: Step,
    source: Source,
    layer: Layer,
    take: Views | Copies,
    extent: Extent,
    block_size: int | None,
) -> None:
    """Both caches lie in one group of blocks: the same slots, and the same pages if equal."""
    latent, index = (layer.MEMORY.caches[name].page for name in ("latent_kv", "index_kv"))
    if latent == index:
        step.index_table, step.index_slots = step.block_table, step.slots
        return
    if not isinstance(take, Copies):
        raise source.refusal(
            "index_metadata",
            "missing",
            f"index_kv has pages of {index} tokens, latent_kv of {latent}: hand in the indexer's "
            "metadata, or copy through buffers=StepBuffers.for_layer(...)",
        )
    table = source.tensor("block_table", "block_table_tensor", repair=WHOLE)
    split = _split(source, layer, "index_kv", block_size)
    step.index_table = take.of_index().table(table, extent, split=split)
    step.index_slots = step.slots
