"""The engine's cache tensors as a layer binds them: the same bytes under another shape."""

from __future__ import annotations

from torch import Tensor, uint8

from kpipe.runtime.engine.handed import describe
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import Caches, LayerError


def engine_caches(layer: Layer | type[Layer], **tensors: Tensor) -> Caches:
    """Caches for `prepare`, by name (latent_kv, index_kv); views, nothing is copied.

    Takes the shapes that engines hold, with R bytes to a token: [blocks, block, R] where a block is
    one or several pages (vLLM), [places, 1, R] or [places, R] (SGLang's latents) and
    [pages, page * R] (SGLang's index keys and scales), of any dtype of R bytes a token but BF16
    and FP32 values.  Blocks may lie further apart than they are long.  The names of SGLang's
    buffers are kv_buffer and index_k_with_scale_buffer (memory pool of the commits in `sglang`).

    Raises LayerError for a name that the layer has no cache for, and for bytes that do not divide
    into its pages.
    """
    views = {}
    for name, tensor in tensors.items():
        if name not in layer.MEMORY.caches:
            known = ", ".join(layer.MEMORY.caches)
            raise LayerError(f"{layer.NAME} caches: no cache {name}; known: {known}")
        views[name] = _pages(layer, name, tensor)
    return Caches(**views)


def _pages(layer: Layer | type[Layer], name: str, tensor: Tensor) -> Tensor:
    page, row = layer.MEMORY.caches[name].page, layer.MEMORY.cache_format(name).row_bytes
    form = layer.MEMORY.caches[name].format
    if tensor.element_size() != 1:
        raise LayerError(
            f"{layer.NAME} caches: {name} is {describe(tensor)}, the layer reads {form}: start the "
            "engine with an FP8 cache of that layout"
        )
    data = tensor.view(uint8)
    shape, strides = tuple(data.shape), data.stride()
    if len(shape) == 2 and shape[1] == page * row and strides[1] == 1:
        return data.as_strided((shape[0], page, row), (strides[0], row, 1))
    if shape[-1] == row and strides[-1] == 1:
        places = data.squeeze(1) if len(shape) == 3 and shape[1] == 1 else data
        if places.dim() == 2 and places.stride(0) == row:
            pages = places.shape[0] // page
            return places[: pages * page].unflatten(0, (pages, page))
        if places.dim() == 3 and shape[1] % page == 0 and strides[1] == row:
            split = shape[1] // page
            if split == 1:
                return places
            if strides[0] == shape[1] * row:
                return places.reshape(-1, row).unflatten(0, (-1, page))
    raise LayerError(
        f"{layer.NAME} caches: {name} is {describe(tensor)} with strides {tuple(strides)}; {form} "
        f"needs pages of {page} tokens of {row} bytes, each side by side"
    )
