"""Cache layouts byte by byte, and what a cache refuses."""

from __future__ import annotations

import re
import struct

import pytest
import torch

from kpipe.runtime.formats import CacheFormat, PagedCache, cache_format

TENSOR = cache_format("fp8_tensor", kv_lora=512, pe=64)
DS_MLA = cache_format("fp8_ds_mla", kv_lora=512, pe=64)
INDEX = cache_format("index_fp8", index_dim=128)
E4M3_ONE, E4M3_NAN = 0x38, 0x7F


def nan_cache(layout: CacheFormat, blocks: int, page: int, gap: int = 0) -> PagedCache:
    """A cache in which every byte reads as NaN, `gap` rows of other bytes between blocks."""
    storage = torch.full((blocks, page + gap, layout.row_bytes), 0xFF, dtype=torch.uint8)
    return PagedCache(storage[:, :page], layout, "latent_kv")


@pytest.mark.parametrize(("layout", "size"), [(TENSOR, 576), (DS_MLA, 656), (INDEX, 132)])
def test_row_bytes(layout: CacheFormat, size: int) -> None:
    assert layout.row_bytes == size
    assert layout.page_bytes(64) == 64 * size


def test_row_bytes_follow_the_dimensions() -> None:
    assert cache_format("fp8_tensor", kv_lora=32, pe=8).row_bytes == 40
    assert cache_format("fp8_ds_mla", kv_lora=128, pe=8).row_bytes == 128 + 4 + 16
    assert cache_format("index_fp8", index_dim=32).row_bytes == 36


def test_field_offsets() -> None:
    assert [DS_MLA.field_offset(name, 2, 64) for name in ("latent", "scale", "pe")] == [
        1312,
        1312 + 512,
        1312 + 528,
    ]
    assert TENSOR.field_offset("pe", 1, 64) == 576 + 512
    assert [INDEX.field_offset("key", token, 64) for token in (0, 1)] == [0, 128]
    assert [INDEX.field_offset("scale", token, 64) for token in (0, 1)] == [8192, 8196]


def test_layouts_with_other_names_differ() -> None:
    assert cache_format("fp8_tensor", kv_lora=512, pe=64) == TENSOR
    assert CacheFormat("other", TENSOR.fields) != TENSOR


@pytest.mark.parametrize(
    ("name", "dims", "text"),
    [
        ("fp8", {"kv_lora": 512, "pe": 64}, "unknown cache format fp8; known are fp8_tensor"),
        ("fp8_tensor", {"kv_lora": 512}, "cache format fp8_tensor needs pe, got 0"),
        ("fp8_ds_mla", {"kv_lora": 192, "pe": 64}, "kv_lora 192 is not a multiple of 128"),
        ("index_fp8", {}, "cache format index_fp8 needs index_dim, got 0"),
    ],
)
def test_formats_refuse(name: str, dims: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        cache_format(name, **dims)


def test_packed_scales_are_read_as_stored() -> None:
    scales = [0.3, 0.7, 1.1, 3.0]
    latent = torch.arange(512).remainder(120).to(torch.uint8)
    pe = torch.linspace(-3, 3, 64).bfloat16()
    cache = nan_cache(DS_MLA, 2, 4, gap=3)
    row = cache.data[1, 2]
    row[:512] = latent
    row[512:528] = torch.tensor(list(struct.pack("<4f", *scales)), dtype=torch.uint8)
    row[528:] = pe.view(torch.uint8)
    found = cache.dequantise(torch.tensor([1 * 7 + 2]), k_scale=0.5)[0].double()
    values = latent.view(torch.float8_e4m3fn).double()
    expected = values * torch.tensor(scales, dtype=torch.float64).repeat_interleave(128)
    assert torch.allclose(found[:512], expected, rtol=1e-6, atol=0)
    assert torch.equal(found[512:], pe.double())  # no tensor scale on a packed row


def test_index_block_is_planar() -> None:
    cache = nan_cache(INDEX, 2, 64)
    page = cache.data[1].view(-1)
    page[: 64 * 128] = 0
    page[128:256] = E4M3_ONE  # token 1 is the hot one
    scales = [1 + token / 64 for token in range(64)]
    page[8192:] = torch.tensor(list(struct.pack("<64f", *scales)), dtype=torch.uint8)
    found = cache.dequantise(64 + torch.arange(64))
    assert found.sum(1).tolist() == [0.0, 128 * scales[1], *[0.0] * 62]


def test_index_insert_writes_the_planar_places() -> None:
    cache = nan_cache(INDEX, 2, 64, gap=5)
    keys = torch.ones((3, 128)).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.25], [0.5], [2.0]])
    cache.insert(torch.tensor([64 + 1, -1, 63]), key=keys, scale=scale)
    for block, token, value in [(1, 1, 0.25), (0, 63, 2.0)]:
        page = cache.data[block].reshape(-1)
        assert page[128 * token : 128 * token + 128].tolist() == [E4M3_ONE] * 128
        start = 8192 + 4 * token
        assert struct.unpack("<f", bytes(page[start : start + 4].tolist()))[0] == value
    assert int((cache.data != 0xFF).sum()) == 2 * (128 + 4)
    expected = torch.full((1, 128), 0.25)
    assert torch.equal(cache.dequantise(torch.tensor([69 + 1])), expected)


@pytest.mark.parametrize("layout", [TENSOR, DS_MLA])
def test_insert_then_gather_and_nothing_else_changes(layout: CacheFormat) -> None:
    torch.manual_seed(0)
    cache = nan_cache(layout, 3, 4, gap=2)
    values = {part.name: torch.randn(3, part.count).to(part.dtype) for part in layout.fields}
    cache.insert(torch.tensor([9, -5, 2]), **values)
    found = cache.gather(torch.tensor([2 * 6 + 1, 2]))
    for name, value in values.items():
        assert torch.equal(found[name].float(), value[[0, 2]].float())
    untouched = torch.ones(3, 4, dtype=torch.bool)
    untouched[2, 1] = untouched[0, 2] = False
    assert bool((cache.data[untouched] == 0xFF).all())


def test_two_layers_in_one_storage_keep_their_own_scales() -> None:
    storage = torch.zeros((2, 2, 4, 656), dtype=torch.uint8)  # block, layer, token
    layers = [PagedCache(storage[:, layer], DS_MLA) for layer in range(2)]
    ones = torch.ones((1, 512)).to(torch.float8_e4m3fn)
    for layer, cache in enumerate(layers):
        scale = torch.full((1, 4), 0.3 + layer)
        cache.insert(torch.tensor([5]), latent=ones, scale=scale, pe=torch.zeros(1, 64).bfloat16())
    assert [cache.block_rows for cache in layers] == [8, 8]
    for layer, cache in enumerate(layers):
        assert torch.allclose(
            cache.dequantise(torch.tensor([9]))[0, :512], torch.tensor(0.3 + layer)
        )


def test_tensor_scale_applies_to_latent_and_pe() -> None:
    cache = nan_cache(TENSOR, 1, 4)
    cache.data[0, 1] = E4M3_ONE
    assert torch.equal(cache.dequantise(torch.tensor([1]), 0.5), torch.full((1, 576), 0.5))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            torch.zeros(2, 4, 512, dtype=torch.uint8),
            "rows of 512 bytes, format fp8_ds_mla needs 656",
        ),
        (torch.zeros(2, 4, 656), "torch.float32 with 3 dimensions, needs torch.uint8 with 3"),
        (torch.zeros(2, 656, dtype=torch.uint8), "torch.uint8 with 2 dimensions"),
        (
            torch.zeros(2, 4, 700, dtype=torch.uint8)[:, :, :656],
            "strides (700, 1) inside a page, needs (656, 1)",
        ),
        (
            torch.zeros(10000, dtype=torch.uint8).as_strided((2, 4, 656), (2700, 656, 1)),
            "block stride 2700 is not a whole number of rows of 656 bytes",
        ),
        (
            torch.zeros(10000, dtype=torch.uint8).as_strided((2, 4, 656), (1312, 656, 1)),
            "block stride 1312 is less than the page of 4 rows = 2624 bytes",
        ),
    ],
)
def test_cache_refuses_another_layout(data: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        PagedCache(data, DS_MLA, "latent_kv")


def test_cache_refuses_rows_that_it_does_not_have() -> None:
    cache = nan_cache(TENSOR, 2, 4, gap=2)
    with pytest.raises(ValueError, match=r"block -1 is outside 0\.\.1"):
        cache.gather(torch.tensor([-1]))
    with pytest.raises(ValueError, match=r"block 2 is outside 0\.\.1"):
        cache.gather(torch.tensor([12]))
    with pytest.raises(ValueError, match=r"row 5 is row 5 of its block, a page has 4"):
        cache.gather(torch.tensor([0, 5]))
    table = torch.tensor([1, -1], dtype=torch.int32)
    assert cache.physical_rows(table, torch.tensor([3])).tolist() == [9]
    with pytest.raises(ValueError, match=r"block -1 is outside 0\.\.1"):
        cache.physical_rows(table, torch.tensor([4]))
    with pytest.raises(ValueError, match=r"position 8 needs 3 blocks of 4, the table has 2"):
        cache.physical_rows(table, torch.tensor([8]))


def test_insert_refuses_other_fields() -> None:
    cache = nan_cache(INDEX, 1, 64)
    key, scale = torch.ones(1, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)
    slot = torch.tensor([0])
    with pytest.raises(ValueError, match=r"insert of \['key'\], needs \['key', 'scale'\]"):
        cache.insert(slot, key=key)
    with pytest.raises(ValueError, match=r"field key is torch.float32 \(1, 128\), needs"):
        cache.insert(slot, key=key.float(), scale=scale)
    with pytest.raises(ValueError, match=r"block 1 is outside 0\.\.0"):
        cache.insert(torch.tensor([64]), key=key, scale=scale)


def test_physical_rows_do_not_wrap_at_32_bits() -> None:
    # Meta memory: a pool whose last row id needs 33 bits, without the bytes.
    row = cache_format("fp8_tensor", kv_lora=32, pe=8).row_bytes
    far = torch.empty_strided((3, 1, row), (row << 31, row, 1), dtype=torch.uint8, device="meta")
    cache = PagedCache(far, cache_format("fp8_tensor", kv_lora=32, pe=8))
    table = torch.tensor([2], dtype=torch.int32)
    assert cache.physical_rows(table, torch.tensor([0])).tolist() == [1 << 32]
