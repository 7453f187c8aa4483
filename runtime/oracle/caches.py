"""Paged caches at byte level: shuffled physical blocks, rank-local tables and slots, NaN traps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .byte_formats import encode_index, encode_latent, unused_row
from .geometry import Geometry
from .inputs import Batch, Weights

INDEX_PAGE = 64


@dataclass(frozen=True)
class ContextShard:
    """Which tokens a rank owns: chunks of `interleave` positions go round the ranks."""

    rank: int = 0
    ranks: int = 1
    interleave: int = 1

    def owned(self, length: int) -> list[int]:
        """Global positions below `length` that this rank owns, in local order."""
        first = self.rank * self.interleave
        stride = self.ranks * self.interleave
        chunks = range(first, length, stride)
        return [t for c in chunks for t in range(c, min(c + self.interleave, length))]


@dataclass(frozen=True)
class PagedBytes:
    """One rank's paged cache before this step's insert, with the metadata that addresses it.

    data uint8 [blocks, page, row_bytes], block stride `block_rows` rows (>= page);
    table int32 [requests, width], rank-local, unused entries name a block full of NaN;
    slots int64 [rows] = block * page + offset of each new token, -1 where not owned or inactive;
    request and position int64 [blocks, page]: who owns a place once this step has been inserted,
    -1 where nobody does. index_fp8 pages hold all keys first, then all FP32 scales.
    """

    cache_format: str
    page: int
    block_rows: int
    data: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    request: torch.Tensor
    position: torch.Tensor

    def locate(self, physical_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Request and global position of physical rows (block * block_rows + offset), int64.

        Raises ValueError for a row outside the blocks or in the gap behind a page.
        """
        rows = physical_rows.long()
        block, offset = rows // self.block_rows, rows % self.block_rows
        if ((rows < 0) | (block >= self.data.shape[0]) | (offset >= self.page)).any():
            raise ValueError(f"physical row outside the cache pages: {rows.tolist()}")
        return self.request[block, offset], self.position[block, offset]

    def physical_row(self, request: int, local_position: int) -> int:
        """block * block_rows + offset of a request's rank-local position, through the table."""
        block = int(self.table[request, local_position // self.page])
        return block * self.block_rows + local_position % self.page

    def token(self, request: int, local_position: int) -> torch.Tensor:
        """Bytes of one token, uint8 [row_bytes]; index tokens as key bytes, then scale bytes."""
        row = self.physical_row(request, local_position)
        block, offset = row // self.block_rows, row % self.block_rows
        if self.cache_format != "index_fp8":
            return self.data[block, offset]
        keys, scales = index_planes(self.data)
        return torch.cat([keys[block, offset], scales[block, offset]])


def index_planes(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of index pages: keys [blocks, page, index_dim] and scale bytes [blocks, page, 4]."""
    blocks, page, width = data.shape
    stride, start = data.stride(0), data.storage_offset()
    keys = data.as_strided((blocks, page, width - 4), (stride, width - 4, 1), start)
    scales = data.as_strided((blocks, page, 4), (stride, 4, 1), start + page * (width - 4))
    return keys, scales


def _write(
    cache_format: str, data: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Stores token bytes [n, row_bytes] at slots [n], all of them non-negative, in place."""
    page = data.shape[1]
    block, offset = slots // page, slots % page
    if cache_format == "index_fp8":
        keys, scales = index_planes(data)
        keys[block, offset] = tokens[:, :-4]
        scales[block, offset] = tokens[:, -4:]
    else:
        data[block, offset] = tokens


def _empty_pages(
    geometry: Geometry, cache_format: str, blocks: int, page: int, block_rows: int
) -> torch.Tensor:
    """Pages in which every field and every gap byte reads as NaN."""
    row = unused_row(geometry, cache_format)
    storage = row.repeat(blocks * block_rows)
    stride = block_rows * row.numel()
    data = storage.as_strided((blocks, page, row.numel()), (stride, row.numel(), 1))
    if cache_format == "index_fp8":
        keys, scales = index_planes(data)
        keys.fill_(int(row[0]))
        scales.fill_(int(row[-1]))
    return data


def _paged(
    geometry: Geometry,
    batch: Batch,
    cache_format: str,
    tokens: tuple[torch.Tensor, ...],
    *,
    page: int,
    shard: ContextShard,
    block_rows: int | None,
    spare_blocks: int,
    seed: int,
) -> PagedBytes:
    """Places every request's cached tokens (rows of row_bytes) into shuffled blocks."""
    block_rows = page if block_rows is None else block_rows
    if block_rows < page or spare_blocks < 1:
        raise ValueError(f"need block_rows >= page and a spare block, got {block_rows}, {page}")
    owned = [shard.owned(length) for length in batch.lengths]
    pages = [-(-len(positions) // page) for positions in owned]
    blocks = sum(pages) + spare_blocks
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
    table = order[-1:].repeat(batch.requests, max(pages, default=0) + 1)
    data = _empty_pages(geometry, cache_format, blocks, page, block_rows)
    request_of = torch.full((blocks, page), -1)
    position_of = torch.full((blocks, page), -1)
    slots = torch.full((batch.rows,), -1)
    for request, used in enumerate(order[: sum(pages)].split(pages)):
        table[request, : len(used)] = used
        position = torch.tensor(owned[request], dtype=torch.int64)
        local = torch.arange(len(position))
        slot = used[local // page] * page + local % page
        request_of.view(-1)[slot] = request
        position_of.view(-1)[slot] = position
        cached = max(batch.lengths[request] - batch.q, 0)
        old = position < cached
        _write(cache_format, data, slot[old], tokens[request][position[old]])
        first_row = (request + 1) * batch.q - batch.lengths[request]
        slots[position[~old] + first_row] = slot[~old]
    return PagedBytes(
        cache_format, page, block_rows, data, table.int(), slots, request_of, position_of
    )


# Every rank of a group caches its share of the same contexts: tensors are told apart by identity.
@lru_cache(maxsize=4)
def _latent_tokens(
    geometry: Geometry,
    cache_format: str,
    latents: tuple[torch.Tensor, ...],
    pes: tuple[torch.Tensor, ...],
    k_scale_inv: float,
) -> tuple[torch.Tensor, ...]:
    return tuple(
        encode_latent(geometry, cache_format, latent, pe, k_scale_inv)
        for latent, pe in zip(latents, pes, strict=True)
    )


@lru_cache(maxsize=4)
def _index_tokens(keys: tuple[torch.Tensor, ...], index_quant: str) -> tuple[torch.Tensor, ...]:
    return tuple(encode_index(of_request, index_quant) for of_request in keys)


def build_latent_cache(
    geometry: Geometry,
    weights: Weights,
    batch: Batch,
    cache_format: str,
    *,
    page: int = 64,
    shard: ContextShard = ContextShard(),
    block_rows: int | None = None,
    spare_blocks: int = 3,
    seed: int = 2,
) -> PagedBytes:
    """The rank's latent cache holding the cached tokens; new tokens have a slot and NaN bytes.

    Raises ValueError for an unknown format or a block stride below the page.
    """
    contexts = (batch.cached_latent, batch.cached_pe)
    tokens = _latent_tokens(geometry, cache_format, *contexts, float(weights.k_scale_inv))
    return _paged(
        geometry,
        batch,
        cache_format,
        tokens,
        page=page,
        shard=shard,
        block_rows=block_rows,
        spare_blocks=spare_blocks,
        seed=seed,
    )


def build_index_cache(
    geometry: Geometry,
    batch: Batch,
    *,
    page: int = INDEX_PAGE,
    shard: ContextShard = ContextShard(),
    block_rows: int | None = None,
    spare_blocks: int = 3,
    seed: int = 3,
    index_quant: str = "ue8m0",
) -> PagedBytes:
    """The rank's index cache (index_fp8) holding the cached keys; as `build_latent_cache`."""
    return _paged(
        geometry,
        batch,
        "index_fp8",
        _index_tokens(batch.cached_index, index_quant),
        page=page,
        shard=shard,
        block_rows=block_rows,
        spare_blocks=spare_blocks,
        seed=seed,
    )


def with_inserted(cache: PagedBytes, tokens: torch.Tensor) -> PagedBytes:
    """A copy of the cache after this step's insert: tokens uint8 [rows, row_bytes] at its slots.

    `Result.latent_bytes` and `Result.index_bytes` are such tokens. The block stride is kept.
    """
    width = cache.data.shape[2]
    if tokens.shape != (cache.slots.numel(), width):
        raise ValueError(f"tokens {list(tokens.shape)} do not fit rows of {width} bytes")
    stride = cache.data.stride(0)
    storage = cache.data.as_strided((cache.data.shape[0] * stride,), (1,)).clone()
    data = storage.as_strided(cache.data.shape, cache.data.stride())
    kept = cache.slots >= 0
    _write(cache.cache_format, data, cache.slots[kept], tokens[kept])
    return replace(cache, data=data)
