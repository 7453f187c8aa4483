"""Stand-ins for the decode metadata of vLLM and SGLang: recorded attributes, no engine needed.

Names, shapes and dtypes as they stand in the files that the adapters' docstrings name.  Tensors
are slices of larger ones, as an engine keeps them; what lies behind the slices is rubbish.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.metadata import Step

ROOM = 80  # entries of an engine's persistent buffers
RUBBISH = 0x7FFF0000


def persistent(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values as the first entries of a larger tensor."""
    whole = torch.full((ROOM, *values.shape[1:]), RUBBISH, dtype=dtype)
    whole[: values.shape[0]] = values
    return whole[: values.shape[0]]


@dataclass
class SparseMla:
    """vLLM: what a sparse MLA backend builds for a layer."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: Tensor  # [num_reqs + 1] int32
    slot_mapping: Tensor  # [num_actual_tokens] int64
    block_table: Tensor  # [num_reqs, blocks of the longest context] int32
    req_id_per_token: Tensor  # [num_actual_tokens] int32
    seq_lens: Tensor  # [num_reqs] int32
    block_size: int = 64
    topk_tokens: int = 2048
    num_decodes: int = 0
    num_prefills: int = 0
    num_decode_tokens: int = 0
    prefill: Any = None
    cp_kv_cache_interleave_size: int = 1


@dataclass
class Common:
    """vLLM: what the backends' builders are given."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool = True
    dcp_local_seq_lens: Tensor | None = None

    @property
    def seq_lens_cpu(self) -> Tensor:
        """Waits for the GPU in vLLM; an adapter that touches it fails here."""
        raise AssertionError("seq_lens_cpu was read")


@dataclass
class IndexerDecode:
    """vLLM: the decode part of the indexer's metadata; lengths are this rank's."""

    block_table: Tensor
    seq_lens: Tensor
    decode_lens: Tensor
    requires_padding: bool = False
    schedule_metadata: Any = None
    global_seq_lens: Tensor | None = None


@dataclass
class Indexer:
    """vLLM: what the indexer's backend builds for a layer."""

    seq_lens: Tensor
    max_seq_len: int
    slot_mapping: Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    decode: IndexerDecode | None = None
    prefill: Any = None


def vllm(step: Step, *, longest: int = 512, **changed: Any) -> SparseMla:
    """vLLM's metadata of the step: every request as many rows, nothing padded."""
    requests, rows = step.lengths.shape[0], step.rows
    starts = torch.arange(0, rows + 1, step.q)
    metadata = SparseMla(
        num_reqs=requests,
        max_query_len=step.q,
        max_seq_len=longest,
        num_actual_tokens=rows,
        query_start_loc=persistent(starts, torch.int32),
        slot_mapping=persistent(step.slots, torch.int64),
        block_table=full_width(step.block_table, 16),
        req_id_per_token=persistent(torch.arange(rows) // step.q, torch.int32),
        seq_lens=persistent(step.lengths, torch.int32),
        num_decodes=requests,
        num_decode_tokens=rows,
    )
    for name, value in changed.items():
        setattr(metadata, name, value)
    return metadata


def common(metadata: SparseMla, **changed: Any) -> Common:
    """The object that the same step's builders are given."""
    given = Common(
        query_start_loc=metadata.query_start_loc,
        query_start_loc_cpu=metadata.query_start_loc.clone(),
        seq_lens=metadata.seq_lens,
        num_reqs=metadata.num_reqs,
        num_actual_tokens=metadata.num_actual_tokens,
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
        block_table_tensor=metadata.block_table,
        slot_mapping=metadata.slot_mapping,
    )
    for name, value in changed.items():
        setattr(given, name, value)
    return given


def indexer(step: Step, *, flat: bool = False, **changed: Any) -> Indexer:
    """The indexer's metadata; `flat` repeats a request's pages for each of its rows."""
    table = full_width(step.index_table, 16)
    every = step.q if flat else 1
    decode = IndexerDecode(
        block_table=persistent(table.repeat_interleave(every, 0), torch.int32),
        seq_lens=torch.full((step.rows if flat else step.lengths.shape[0],), RUBBISH),
        decode_lens=torch.full((step.lengths.shape[0],), step.q, dtype=torch.int32),
    )
    metadata = Indexer(
        seq_lens=persistent(step.lengths, torch.int32),
        max_seq_len=512,
        slot_mapping=persistent(step.index_slots, torch.int64),
        num_decodes=step.lengths.shape[0],
        num_decode_tokens=step.rows,
        decode=decode,
    )
    for name, value in changed.items():
        setattr(metadata, name, value)
    return metadata


def full_width(table: Tensor, width: int) -> Tensor:
    """The table with at least that many pages a request; entries behind are page 0."""
    wide = table.new_zeros((table.shape[0], max(width, table.shape[1])))
    wide[:, : table.shape[1]] = table
    return persistent(wide, torch.int32)


class ForwardMode(IntEnum):
    """SGLang: what a batch is."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()


@dataclass
class VerifyInput:
    """SGLang: how the drafts of a verify are laid out."""

    draft_token_num: int
    topk: int = 1
    ragged_verify_layout: Any = None


@dataclass
class Pool:
    """SGLang: the place of every token of every request."""

    req_to_token: Tensor


@dataclass
class ForwardBatch:
    """SGLang: a batch; the pool was an attribute until 2026 and is handed in apart since."""

    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: Tensor  # [batch_size] int64
    seq_lens: Tensor  # [batch_size] int64
    out_cache_loc: Tensor  # [rows] int64
    seq_lens_sum: int = 0
    spec_info: VerifyInput | None = None
    req_to_token_pool: Pool | None = None


@dataclass(frozen=True)
class DsaMetadata:
    """SGLang: what the sparse attention backend builds for a batch."""

    page_size: int
    cache_seqlens_int32: Tensor  # [batch_size] int32
    max_seq_len_q: int
    max_seq_len_k: int
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    page_table_1: Tensor | None
    real_page_table: Tensor  # [batch_size, pages] int32; in a verify [rows, pages]


def place(table: Tensor, request: int, token: int, period: int) -> int:
    """The place of a token: pages of `period` consecutive places."""
    return int(table[request, token // period]) * period + token % period


def sglang(step: Step, *, ranks: int = 1, page: int = 64, padding: int = 0) -> ForwardBatch:
    """SGLang's batch of the step and `padding` requests of length 1 at place 0.

    With several ranks places count the tokens of all of them, dealt one by one.
    """
    period, requests = page * ranks, step.lengths.shape[0]
    context = step.block_table.shape[1] * period
    tokens = [
        [place(step.block_table, r, t, period) for t in range(context)] for r in range(requests)
    ]
    pool = torch.full((2 * requests + 1, context + 4), RUBBISH, dtype=torch.int32)
    pool[0] = 0
    chosen = torch.arange(requests) * 2 + 1
    pool[chosen, :context] = torch.tensor(tokens, dtype=torch.int32)
    first = [int(length) - step.q for length in step.lengths]
    new = [tokens[r][first[r] + i] for r in range(requests) for i in range(step.q)]
    assert 0 not in new, "place 0 is nobody's: choose other lengths"
    verify = step.q > 1
    lengths = step.lengths - step.q if verify else step.lengths
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY if verify else ForwardMode.DECODE,
        batch_size=requests + padding,
        req_pool_indices=torch.cat([chosen, torch.zeros(padding, dtype=torch.int64)]),
        seq_lens=torch.cat([lengths.long(), torch.ones(padding, dtype=torch.int64)]),
        out_cache_loc=torch.tensor(new + [0] * (padding * step.q)),
        spec_info=VerifyInput(step.q) if verify else None,
        req_to_token_pool=Pool(pool),
    )


def dsa(step: Step, batch: ForwardBatch) -> DsaMetadata:
    """The backend's metadata of the batch."""
    requests = batch.batch_size
    lengths = batch.seq_lens + (step.q if step.q > 1 else 0)
    pages = torch.zeros((requests, step.block_table.shape[1]), dtype=torch.int32)
    pages[: step.lengths.shape[0]] = step.block_table
    return DsaMetadata(
        page_size=64,
        cache_seqlens_int32=persistent(lengths, torch.int32),
        max_seq_len_q=1,
        max_seq_len_k=512,
        cu_seqlens_q=torch.arange(requests + 1),
        cu_seqlens_k=torch.zeros(requests + 1),
        page_table_1=None,
        real_page_table=persistent(pages.repeat_interleave(step.q, 0), torch.int32),
    )
