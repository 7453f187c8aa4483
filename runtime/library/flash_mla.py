"""FlashMLA's sparse decode as a core of a layer: padded heads, empty rows, the schedule's memory.

The library takes a BF16 query of 64 or 128 heads, pages of 64 `fp8_ds_mla` rows and a list of
cache rows in which -1 is skipped; it returns BF16 rows and a natural LSE, and leaves rows without
keys undefined.  The package is optional and imported where a layer that needs it is prepared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial
from importlib.util import find_spec
from math import log2
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.comm.mailbox import Mailbox
from kpipe.runtime.formats import PagedCache
from kpipe.runtime.library.site import Site
from kpipe.runtime.metadata import BufferSpec, LayerError

HEAD_TILES = (64, 128)
"""Head counts that the library has kernels for; fewer heads are padded with zeros."""
PAGE = 64
FORMAT = "fp8_ds_mla"
REPAIR = "pip install sgl-flash-mla, or choose `core: sparse_decode`"

_CALL, _METADATA = "flash_mla_with_kvcache", "get_mla_metadata"
_GIVEN = (
    *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata"),
    *("softmax_scale", "is_fp8_kvcache", "indices"),
)
_LOG2_E = log2(torch.e)


class FlashMlaSparse:
    """The op `flashmla_sparse` of one layer: padding, call, selection.

    A launch is a copy of the query's heads into the padded scratch (none where the heads are a
    tile already), the library's kernels, and a selection of the rows that have keys.
    """

    def __init__(self, site: Site) -> None:
        """Check the library and the cache, and take the scratch.

        Raises LayerError for another signature than the one written for, a library without
        kernels for these rows, a cache of other pages or another format, or too many heads.
        """
        self._site = site
        self._attend, self._schedule = library_calls(site.layer)
        self._pages = pages_of(site.latent_kv, site.layer)
        self._heads = padded_heads(site.heads, site.layer)
        self._kv_lora = site.latent_kv.format.field("latent").count
        shape = ("rows", self._heads, site.latent_kv.format.latent_dims)
        # Heads behind those of the layer are zero and stay so: nothing ever writes them.
        spec = BufferSpec(shape, "bf16", zeroed=True)
        self._query = site.buffer("flashmla_sparse.padded_query", spec)
        self._zero = self._query.new_zeros(())
        self._schedules: dict[int, Any] = {}

    @staticmethod
    def refusal() -> str:
        """Why no layer can use it on this machine; empty where the package is installed."""
        if find_spec("flash_mla") is None:
            return f"needs the package `flash_mla`, which is not installed: {REPAIR}"
        return ""

    def ready(self, rows: int) -> None:
        """Have the library make its schedule for that many rows, and load its kernels.

        The schedule depends on shapes only, so every later step uses this one; made while a graph
        is captured it would lie in the graph's memory.  Raises LayerError where the library
        refuses the call.
        """
        if rows in self._schedules:
            return
        self._schedules[rows] = self._schedule()
        nothing = torch.full(
            (rows, self._site.top_k), -1, dtype=torch.int32, device=self._query.device
        )
        try:
            self._call(self._query[:rows], nothing, 1.0)
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:
            raise LayerError(
                f"{self._site.layer}: flash_mla refuses flashmla_sparse at {rows} rows: {error}; "
                "choose `core: sparse_decode`"
            ) from error

    def __call__(
        self,
        latent_kv: PagedCache,
        selected: Tensor,
        valid: Tensor,
        *,
        query: Tensor | None = None,
        q_mail: Mailbox | None = None,
        latent: Tensor | None = None,
        partial: Tensor | None = None,
        partial_lse: Tensor | None = None,
        q_scale: Tensor,
        k_scale: Tensor,
        softmax_scale: float,
        kv_lora: int,
        lse_base: str = "e",
        dcp: bool = False,
    ) -> None:
        """Operands as of the reference function `sparse_core.sparse_decode`.

        The rows carry their own scales, so q_scale and k_scale are not used.  Entries of
        `selected` [rows, top_k] i32 that are -1 are skipped; a row whose `valid` is 0 gives
        exactly 0, and -inf as its LSE.
        """
        rows = selected.shape[0]
        target = partial if dcp else latent
        heads = target.shape[1]
        given = q_mail.local[:rows, :heads] if dcp else query
        out, lse = self._call(self._padded(given), selected, softmax_scale)
        filled = (valid > 0).view(rows, 1, 1)
        torch.where(filled, out[:, 0, :heads], self._zero, out=target)
        if dcp:
            natural = torch.where(filled[:, 0], lse[:, :heads, 0], -torch.inf)
            partial_lse.copy_(natural * _LOG2_E if lse_base == "2" else natural)

    def _padded(self, query: Tensor) -> Tensor:
        """The query with as many heads as the library's tile has."""
        rows, heads = query.shape[:2]
        if heads == self._heads:
            return query
        self._query[:rows, :heads].copy_(query)
        return self._query[:rows]

    def _call(self, query: Tensor, selected: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        """BF16 [rows, 1, padded heads, kv_lora] and the natural LSE [rows, padded heads, 1]."""
        return self._attend(
            q=query.unsqueeze(1),
            k_cache=self._pages,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=self._kv_lora,
            tile_scheduler_metadata=self._schedules[query.shape[0]],
            softmax_scale=softmax_scale,
            is_fp8_kvcache=True,
            indices=selected.unsqueeze(1),
        )


def padded_heads(heads: int, layer: str) -> int:
    """The least tile that holds so many heads; LayerError where none does."""
    tile = next((tile for tile in HEAD_TILES if tile >= heads), None)
    if tile is None:
        raise LayerError(
            f"{layer}: flashmla_sparse takes at most {HEAD_TILES[-1]} heads, not {heads}; "
            "choose `core: sparse_decode`"
        )
    return tile


def pages_of(cache: PagedCache, layer: str) -> Tensor:
    """The cache as the library addresses it: u8 [pages, 64, 1, row bytes], physical row by row.

    A block may lie among those of other layers, by whole pages; the pages in between are never
    touched, since no list names their rows.  Raises LayerError for another format or page, and
    for blocks that lie any other way.
    """
    if cache.format.name != FORMAT or cache.page != PAGE:
        raise LayerError(
            f"{layer}: flashmla_sparse reads pages of {PAGE} {FORMAT} rows; {cache.name} has pages "
            f"of {cache.page} {cache.format.name} rows"
        )
    if cache.block_rows % PAGE:
        raise LayerError(
            f"{layer}: flashmla_sparse needs blocks that lie a multiple of {PAGE} rows apart; "
            f"those of {cache.name} lie {cache.block_rows} apart"
        )
    row_bytes = cache.format.row_bytes
    pages = (cache.blocks - 1) * (cache.block_rows // PAGE) + 1
    strides = (PAGE * row_bytes, row_bytes, row_bytes, 1)
    return cache.data.as_strided((pages, PAGE, 1, row_bytes), strides)


def library_calls(layer: str) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[[], Any]]:
    """The library's decode call, and a function that makes an empty schedule.

    Raises LayerError where the package is missing, does not load, or takes other arguments.
    """
    library = _imported(layer)
    for name, given in ((_CALL, _GIVEN), (_METADATA, ())):
        if reason := misfit(getattr(library, name, None), given):
            raise LayerError(
                f"{layer}: flashmla_sparse cannot call the installed flash_mla.{name}: it "
                f"{reason}; {REPAIR}"
            )
    attend = getattr(library, _CALL)
    # Some builds keep the kernels for these rows in a second extension, behind a flag.
    if "use_legacy" in inspect.signature(attend).parameters:
        if not getattr(library, "has_legacy", lambda: True)():
            raise LayerError(
                f"{layer}: the installed flash_mla was built without its legacy kernels, which "
                f"flashmla_sparse needs: {REPAIR}"
            )
        attend = partial(attend, use_legacy=True)
    return attend, lambda: library.get_mla_metadata()[0]


def _imported(layer: str) -> Any:
    """The module of the library, or LayerError."""
    if reason := FlashMlaSparse.refusal():
        raise LayerError(f"{layer}: flashmla_sparse {reason}")
    try:
        import flash_mla
    except (ImportError, OSError) as error:
        raise LayerError(
            f"{layer}: flashmla_sparse cannot import `flash_mla`: {error}; {REPAIR}"
        ) from error
    return flash_mla


def misfit(function: Any, given: Collection[str]) -> str:
    """Why a function cannot be called with these names and nothing else; empty where it can."""
    if not callable(function):
        return "is not there"
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        missing = []
    else:
        missing = [name for name in given if name not in {p.name for p in parameters}]
    if missing:
        return f"takes no {', '.join(missing)}"
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in starred and p.name not in given
    ]
    return f"also wants {', '.join(wanted)}" if wanted else ""
