"""FlashMLA as a core: padding, empty rows, LSE, its schedule, and what is refused."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_flash_mla import Library, rows_of
from torch import Tensor

from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.runtime.formats import PagedCache, cache_format
from kpipe.runtime.library import flash_mla
from kpipe.runtime.library.flash_mla import FlashMlaSparse
from kpipe.runtime.library.site import Site
from kpipe.runtime.metadata import BufferSpec, LayerError
from kpipe.runtime.reference.sparse_core import sparse_decode

KV_LORA, PE, TOP_K, CAP = 256, 16, 24, 8
FORMAT = cache_format("fp8_ds_mla", kv_lora=KV_LORA, pe=PE)
SCALES = {"q_scale": torch.tensor([3.0]), "k_scale": torch.tensor([5.0])}  # not of this format
CONSTANTS = {**SCALES, "softmax_scale": 0.07, "kv_lora": KV_LORA}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "flash_mla", made.module())
    return made


def cache(blocks: int = 6, page: int = 64, block_rows: int = 64) -> PagedCache:
    """A cache of real rows whose blocks lie `block_rows` apart; NaN in between."""
    whole = torch.full((blocks, block_rows, FORMAT.row_bytes), 0xFF, dtype=torch.uint8)
    data = PagedCache(whole[:, :page], FORMAT, "latent_kv")
    count = blocks * page
    generator = torch.Generator().manual_seed(7)
    scale = torch.exp2(torch.randn(count, KV_LORA // 128, generator=generator) - 4)
    data.insert(
        torch.arange(count),
        latent=(torch.randn(count, KV_LORA, generator=generator) * 30).to(torch.float8_e4m3fn),
        scale=scale,
        pe=torch.randn(count, PE, generator=generator).bfloat16(),
    )
    return data


def site(latent_kv: PagedCache, heads: int = 3) -> tuple[Site, dict[str, Tensor]]:
    """A place with scratch that remembers what it was asked for."""
    buffers: dict[str, Tensor] = {}

    def buffer(name: str, spec: BufferSpec) -> Tensor:
        assert spec.zeroed and spec.dtype == "bf16"
        shape = [CAP if axis == "rows" else axis for axis in spec.shape]
        return buffers.setdefault(name, torch.zeros(shape, dtype=torch.bfloat16))

    return Site("some_layer", heads, TOP_K, latent_kv, buffer), buffers


def selection(latent_kv: PagedCache, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Lists of physical rows with -1 behind the last, and their lengths."""
    generator = torch.Generator().manual_seed(3)
    selected = torch.full((len(counts), TOP_K), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        tokens = torch.randperm(latent_kv.blocks * latent_kv.page, generator=generator)[:count]
        block, place = tokens // latent_kv.page, tokens % latent_kv.page
        selected[row, :count] = (block * latent_kv.block_rows + place).int()
    return selected, torch.tensor(counts, dtype=torch.int32)


def query(rows: int, heads: int) -> Tensor:
    return torch.randn(rows, heads, KV_LORA + PE, generator=torch.Generator().manual_seed(1)).to(
        torch.bfloat16
    )


def core(latent_kv: PagedCache, rows: int, heads: int = 3) -> FlashMlaSparse:
    made = FlashMlaSparse(site(latent_kv, heads)[0])
    made.ready(rows)
    return made


@pytest.mark.parametrize("block_rows", [64, 192])
@pytest.mark.parametrize("heads", [1, 3, 64])
def test_it_agrees_with_the_reference(library: Library, heads: int, block_rows: int) -> None:
    latent_kv = cache(block_rows=block_rows)
    selected, valid = selection(latent_kv, [TOP_K, 1, 0, 7])
    given, outs = query(4, heads), []
    for run in (core(latent_kv, 4, heads), sparse_decode):
        out = torch.full((4, heads, KV_LORA), torch.nan).bfloat16()
        run(latent_kv, selected, valid, query=given, latent=out, **CONSTANTS)
        outs.append(out)
    torch.testing.assert_close(outs[0], outs[1], rtol=2**-7, atol=1e-3)
    assert outs[0].isfinite().all() and outs[0].abs().amax((1, 2)).bool().tolist() == [1, 1, 0, 1]
    assert not outs[0][2].view(torch.int16).any(), "a row without keys is exactly zero"


def test_only_the_lists_and_the_bytes_count(library: Library) -> None:
    """By hand: two keys, one head, holes in the list."""
    latent_kv = cache()
    selected = torch.full((1, TOP_K), -1, dtype=torch.int32)
    selected[0, 3], selected[0, 11] = 70, 5
    given, out = query(1, 1), torch.full((1, 1, KV_LORA), torch.nan).bfloat16()
    valid = torch.tensor([2], dtype=torch.int32)
    core(latent_kv, 1, 1)(latent_kv, selected, valid, query=given, latent=out, **CONSTANTS)
    keys = rows_of(torch.stack([latent_kv.data[1, 6], latent_kv.data[0, 5]]), KV_LORA)
    logits = (given[0, 0].double() * keys).sum(1) * CONSTANTS["softmax_scale"]
    weight = 1 / (1 + torch.exp(logits[1] - logits[0]))
    expected = weight * keys[0] + (1 - weight) * keys[1]
    torch.testing.assert_close(out[0, 0].double(), expected[:KV_LORA], rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(("base", "factor"), [("e", 1.0), ("2", 1.4426950408889634)])
def test_gathered_heads_bring_an_lse(library: Library, base: str, factor: float) -> None:
    latent_kv = cache()
    selected, valid = selection(latent_kv, [9, 0])
    mail = SimpleNamespace(local=query(CAP, 70))
    results = []
    for run in (core(latent_kv, 2, 66), sparse_decode):
        partial = torch.full((2, 66, KV_LORA), torch.nan).bfloat16()
        lse = torch.full((2, 66), torch.nan)
        run(
            latent_kv,
            selected,
            valid,
            q_mail=mail,
            partial=partial,
            partial_lse=lse,
            dcp=True,
            lse_base=base,
            **CONSTANTS,
        )
        results.append((partial, lse))
    (partial, lse), (expected, expected_lse) = results
    torch.testing.assert_close(partial, expected, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    keys = rows_of(latent_kv.data.flatten(0, 1)[selected[0, :9].long()], KV_LORA)
    logits = mail.local[0, 0].double() @ keys.T * CONSTANTS["softmax_scale"]
    assert lse[0, 0].item() == pytest.approx(float(logits.logsumexp(0)) * factor, rel=1e-5)
    assert lse[1].isneginf().all() and not partial[1].view(torch.int16).any()


def test_padding_heads_stay_zero_and_are_shared(library: Library) -> None:
    latent_kv = cache()
    place, buffers = site(latent_kv)
    first, second = FlashMlaSparse(place), FlashMlaSparse(place)
    (padded,) = buffers.values()
    assert list(buffers) == ["flashmla_sparse.padded_query"] and padded.shape[1] == 64
    selected, valid = selection(latent_kv, [5] * CAP)
    for run in (first, second):
        run.ready(CAP)
        out = torch.empty(CAP, 3, KV_LORA).bfloat16()
        run(latent_kv, selected, valid, query=query(CAP, 3), latent=out, **CONSTANTS)
    assert padded[:, :3].equal(query(CAP, 3)) and not padded[:, 3:].any()
    (scratch,) = CONTRACTS["flashmla_sparse"].scratch
    assert scratch.zero_once and f"flashmla_sparse.{scratch.name}" in buffers


def test_a_schedule_is_made_once_for_a_number_of_rows(library: Library) -> None:
    latent_kv = cache()
    run = core(latent_kv, 2)
    run.ready(4)
    run.ready(2)
    assert [schedule.shapes[0][0] for schedule in library.schedules] == [2, 4]
    for rows in (2, 4, 2):
        selected, valid = selection(latent_kv, [1] * rows)
        out = torch.empty(rows, 3, KV_LORA).bfloat16()
        run(latent_kv, selected, valid, query=query(rows, 3), latent=out, **CONSTANTS)
    assert len(library.schedules) == 2, "a step makes no schedule"


def test_its_limits_are_those_of_the_contract() -> None:
    limits = CONTRACTS["flashmla_sparse"].limits
    assert limits.head_pad == flash_mla.HEAD_TILES and limits.pages == (flash_mla.PAGE,)
    assert limits.cache_formats == (flash_mla.FORMAT,)
    assert [flash_mla.padded_heads(heads, "x") for heads in (1, 64, 65, 128)] == [64, 64, 128, 128]


# -- refusals -----------------------------------------------------------------------------------


def refused(text: str, latent_kv: PagedCache | None = None, heads: int = 3) -> None:
    with pytest.raises(LayerError) as caught:
        FlashMlaSparse(site(latent_kv or cache(), heads)[0])
    assert str(caught.value) == f"some_layer: {text}"


def test_a_missing_package_is_refused_with_its_repair() -> None:
    reason = (
        "needs the package `flash_mla`, which is not installed: pip install sgl-flash-mla, or "
        "choose `core: sparse_decode`"
    )
    assert FlashMlaSparse.refusal() == reason
    refused(f"flashmla_sparse {reason}")


def test_a_package_that_does_not_load(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == "flash_mla":
                raise ImportError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(flash_mla, "find_spec", lambda name: object())
    monkeypatch.delitem(sys.modules, "flash_mla")
    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    refused(
        "flashmla_sparse cannot import `flash_mla`: libcuda.so.1: cannot open shared object file; "
        "pip install sgl-flash-mla, or choose `core: sparse_decode`"
    )


def changed(library: Library, **functions: Any) -> ModuleType:
    module = sys.modules["flash_mla"]
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def test_another_signature_is_refused(library: Library) -> None:
    changed(library, flash_mla_with_kvcache=lambda q, k_cache, block_table, cache_seqlens: None)
    refused(
        "flashmla_sparse cannot call the installed flash_mla.flash_mla_with_kvcache: it takes no "
        "head_dim_v, tile_scheduler_metadata, softmax_scale, is_fp8_kvcache, indices; "
        "pip install sgl-flash-mla, or choose `core: sparse_decode`"
    )

    def older(
        q: Any,
        k_cache: Any,
        block_table: Any,
        cache_seqlens: Any,
        head_dim_v: Any,
        tile_scheduler_metadata: Any,
        num_splits: Any,
        softmax_scale: Any = None,
        is_fp8_kvcache: bool = False,
        indices: Any = None,
    ) -> None:
        """Its schedule came in two parts."""

    changed(library, flash_mla_with_kvcache=older)
    refused(
        "flashmla_sparse cannot call the installed flash_mla.flash_mla_with_kvcache: it also wants "
        "num_splits; pip install sgl-flash-mla, or choose `core: sparse_decode`"
    )
    changed(library, flash_mla_with_kvcache=None)
    refused(
        "flashmla_sparse cannot call the installed flash_mla.flash_mla_with_kvcache: it is not "
        "there; pip install sgl-flash-mla, or choose `core: sparse_decode`"
    )


def test_a_schedule_that_needs_lengths_is_refused(library: Library) -> None:
    changed(library, get_mla_metadata=lambda cache_seqlens, heads=1: None)
    refused(
        "flashmla_sparse cannot call the installed flash_mla.get_mla_metadata: it also wants "
        "cache_seqlens; pip install sgl-flash-mla, or choose `core: sparse_decode`"
    )


def test_a_build_without_the_kernels_is_refused(library: Library) -> None:
    library.legacy = False
    refused(
        "the installed flash_mla was built without its legacy kernels, which flashmla_sparse "
        "needs: pip install sgl-flash-mla, or choose `core: sparse_decode`"
    )


def test_what_the_library_refuses_is_refused_when_preparing(library: Library) -> None:
    def strict(
        q: Any,
        k_cache: Any,
        block_table: Any,
        cache_seqlens: Any,
        head_dim_v: Any,
        tile_scheduler_metadata: Any,
        softmax_scale: Any = None,
        is_fp8_kvcache: Any = None,
        indices: Any = None,
    ) -> None:
        raise RuntimeError("only head_dim 512 is supported")

    changed(library, flash_mla_with_kvcache=strict)
    made = FlashMlaSparse(site(cache())[0])
    with pytest.raises(LayerError) as caught:
        made.ready(4)
    assert str(caught.value) == (
        "some_layer: flash_mla refuses flashmla_sparse at 4 rows: only head_dim 512 is supported; "
        "choose `core: sparse_decode`"
    )


def test_caches_that_it_cannot_address(library: Library) -> None:
    refused(
        "flashmla_sparse needs blocks that lie a multiple of 64 rows apart; those of latent_kv lie "
        "96 apart",
        cache(block_rows=96),
    )
    refused(
        "flashmla_sparse reads pages of 64 fp8_ds_mla rows; latent_kv has pages of 32 fp8_ds_mla "
        "rows",
        cache(page=32, block_rows=32),
    )
    tensor = cache_format("fp8_tensor", kv_lora=KV_LORA, pe=PE)
    other = PagedCache(torch.zeros(2, 64, tensor.row_bytes, dtype=torch.uint8), tensor, "latent_kv")
    refused(
        "flashmla_sparse reads pages of 64 fp8_ds_mla rows; latent_kv has pages of 64 fp8_tensor "
        "rows",
        other,
    )
    refused(
        "flashmla_sparse takes at most 128 heads, not 129; choose `core: sparse_decode`",
        heads=129,
    )
