"""Whether the values of a step agree with each other: for bringing an engine up, not for serving.

Metadata of another rank, another page size or another group of blocks has the right shapes and
dtypes, and reads and writes other requests' tokens.  Slots and tables name the same places in two
ways, so that each shows a mistake in the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kpipe.runtime.formats import PagedCache
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError, Step


def check_step_values(step: Step, layer: Layer) -> None:
    """Compare lengths, slots and tables of a step for a prepared layer.

    Copies them to the host, and so waits for the GPU: never call it in a serving loop or a capture.
    Raises LayerError for the first negative length, the first block outside its cache that a
    context uses, and the first row whose slot is not where the table puts its token (or that
    inserts a token which another rank holds, or none).
    """
    lengths = step.lengths.cpu().long()
    for request, length in enumerate(lengths.tolist()):
        if length < 0:
            raise LayerError(f"{layer.NAME} step: lengths[{request}] is {length}, below 0")
    names = [("latent_kv", "slots", "block_table"), ("index_kv", "index_slots", "index_table")]
    for cache, slots, table in names:
        if cache in layer.MEMORY.caches:
            pages, rows = getattr(step, table).cpu().long(), getattr(step, slots).cpu().long()
            _check_table(layer, getattr(layer, cache), table, pages, lengths)
            _check_slots(layer, getattr(layer, cache), (slots, table), (rows, pages), lengths)


def _check_table(
    layer: Layer, cache: PagedCache, name: str, table: Tensor, lengths: Tensor
) -> None:
    used = -(-layer.shard.local_length(lengths) // cache.page)
    columns = torch.arange(table.shape[1])
    if int(used.max()) > table.shape[1]:
        request = int(used.argmax())
        raise LayerError(
            f"{layer.NAME} step: {name}[{request}] has {table.shape[1]} pages of {cache.page}, "
            f"length {int(lengths[request])} needs {int(used[request])}"
        )
    wrong = (columns < used.unsqueeze(1)) & ((table < 0) | (table >= cache.blocks))
    for request, column in wrong.nonzero()[:1].tolist():
        raise LayerError(
            f"{layer.NAME} step: {name}[{request}, {column}] is {int(table[request, column])}, "
            f"outside the {cache.blocks} blocks of {cache.name}"
        )


def _check_slots(
    layer: Layer,
    cache: PagedCache,
    names: tuple[str, str],
    values: tuple[Tensor, Tensor],
    lengths: Tensor,
) -> None:
    (slots, table), shard = values, layer.shard
    q = slots.shape[0] // lengths.shape[0]
    request = torch.arange(slots.shape[0]) // q
    token = lengths[request] - q + torch.arange(slots.shape[0]) % q
    at = token.clamp(min=0)
    local = shard.local(at)
    held = (token >= 0) & (shard.owner(at) == shard.rank)
    page = torch.where(held, local // cache.page, 0)
    expected = torch.where(held, table[request, page] * cache.page + local % cache.page, -1)
    for row in (slots.clamp(min=-1) != expected).nonzero().flatten()[:1].tolist():
        where = f"slot {int(expected[row])}" if held[row] else "no slot of this rank"
        owner = f"token {int(token[row])} of request {int(request[row])}"
        raise LayerError(
            f"{layer.NAME} step: {names[0]}[{row}] is {int(slots[row])}, and {names[1]} gives "
            f"{owner} {where}: are both of this rank and layer, and of pages of {cache.page} "
            "tokens?"
        )
