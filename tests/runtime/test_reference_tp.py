"""Reference operations without context parallelism, against float64 formulas written here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kpipe.runtime.formats import CacheFormat, PagedCache, cache_format
from kpipe.runtime.reference import projection, query, sparse_core, value
from kpipe.runtime.reference.numerics import Rounds

Q_LORA, KV_LORA, PE, NOPE, HEADS, V_DIM = 24, 128, 8, 12, 3, 10
TENSOR = cache_format("fp8_tensor", kv_lora=KV_LORA, pe=PE)
DS_MLA = cache_format("fp8_ds_mla", kv_lora=KV_LORA, pe=PE)
INDEX = cache_format("index_fp8", index_dim=32)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
HALF, ONE = torch.tensor([0.5]), torch.ones(1)
EPS = 1e-6
SMALLEST = 0.5 * 2.0**-6  # smallest normal E4M3 under the scale of these tests


def noise(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    """Reproducible BF16 normal values."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(BF16)


def unset(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """An output that holds NaN (or a marker) until it is written."""
    return (
        torch.full(shape, math.nan).to(dtype)
        if dtype.is_floating_point
        else torch.full(shape, 7777, dtype=dtype)
    )


def nan_cache(layout: CacheFormat, blocks: int, page: int) -> PagedCache:
    """A cache in which every unwritten byte reads as NaN; another layer's page lies between."""
    storage = torch.full((blocks, 2 * page, layout.row_bytes), 0x7F, dtype=torch.uint8)
    return PagedCache(storage[:, page:], layout)


def bf16(value: Tensor) -> Tensor:
    return value.to(BF16).double()


def close(found: Tensor, expected: Tensor, bits: float = 8, floor: float = 0.0) -> None:
    """Equal up to one rounding to `bits` significant bits; magnitudes below `floor` count as it.

    Below a thousandth of the largest value, cancellation decides and the error is absolute.
    """
    found, expected = found.double(), expected.double()
    scale = expected.abs().clamp(min=max(float(expected.abs().max()) * 1e-3, floor))
    assert bool(torch.isfinite(found).all())
    assert float(((found - expected).abs() / scale).max()) <= 2.0**-bits


def normed(value: Tensor, weight: Tensor) -> Tensor:
    value = value.double()
    return value / (value.pow(2).mean(1, keepdim=True) + EPS).sqrt() * weight.double()


def query_weights(heads: int = HEADS) -> dict[str, Tensor]:
    return {
        "q_norm": noise(Q_LORA, seed=1),
        "kv_norm": noise(KV_LORA, seed=2),
        "q_b": noise(heads * (NOPE + PE), Q_LORA, seed=3, size=0.3),
        "w_uk": noise(heads, NOPE, KV_LORA, seed=4, size=0.3),
        "q_scale_inv": 1 / HALF,
        "k_scale_inv": 1 / HALF,
    }


CONSTANTS = {"rms_eps": EPS, "nope": NOPE, "pe": PE}


def run_query(rows: int, layout: CacheFormat, **flags: object) -> tuple[Tensor, Tensor, PagedCache]:
    """mla_query on `rows` rows of one fixed packed row buffer (columns are strided views)."""
    packed = noise(8, Q_LORA + KV_LORA + PE + 5, seed=9)[:rows]
    out = unset(rows, HEADS, KV_LORA + PE, dtype=E4M3 if layout is TENSOR else BF16)
    q_c, cache = unset(rows, Q_LORA), nan_cache(layout, 4, 4)
    slots = torch.tensor([9, -1, 2, 15, 0, 5, 6, 7])[:rows]
    query.mla_query(
        packed[:, :Q_LORA],
        packed[:, Q_LORA : Q_LORA + KV_LORA + PE],
        slots,
        cache,
        query=out,
        q_c=q_c,
        writes_q_c=True,
        **query_weights(),
        **CONSTANTS,
        **flags,
    )
    return out, q_c, cache


def test_packed_gemm_and_o_proj() -> None:
    hidden, weight = noise(5, 96), noise(40, 96, seed=1)
    expected = hidden.double() @ weight.double().t()
    for call in ("packed", "index", "output"):
        out = unset(5, 50)[:, 3:43]
        if call == "packed":
            projection.packed_gemm(hidden, out, packed=weight)
        elif call == "index":
            projection.index_gemm(hidden, out, index_q_b=weight)
        else:
            projection.o_proj(hidden, out=out, o_proj=weight)
        close(out, expected)


def test_the_gate_apart_is_the_whole_product() -> None:
    hidden, weight = noise(5, 96), noise(40, 96, seed=1)
    whole, parts = unset(5, 40), unset(5, 40)
    projection.packed_gemm(hidden, whole, packed=weight)
    projection.packed_gemm(hidden, parts, packed=weight, gate_columns=(16, 28), without_gate=True)
    assert parts[:, 16:28].isnan().all() and not parts[:, :16].isnan().any()
    projection.gate_gemm(hidden, parts[:, 16:28], packed=weight, gate_columns=(16, 28))
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("layout", [TENSOR, DS_MLA])
def test_mla_query_follows_the_formula(layout: CacheFormat) -> None:
    weights = query_weights()
    packed = noise(8, Q_LORA + KV_LORA + PE + 5, seed=9)[:4]
    out, q_c, cache = run_query(4, layout)
    close(q_c, normed(packed[:, :Q_LORA], weights["q_norm"]))
    full = bf16(q_c.double() @ weights["q_b"].double().t()).reshape(4, HEADS, NOPE + PE)
    absorbed = bf16(torch.einsum("rhn,hnl->rhl", full[..., :NOPE], weights["w_uk"].double()))
    expected = torch.cat([absorbed, full[..., NOPE:]], dim=2)
    scale, bits = (0.5, 3.9) if layout is TENSOR else (1.0, 6)
    close(out.double() * scale, expected, bits=bits, floor=SMALLEST)
    kv = packed[:, Q_LORA : Q_LORA + KV_LORA + PE]
    latent = bf16(normed(kv[:, :KV_LORA], weights["kv_norm"]))
    inserted = cache.dequantise(torch.tensor([2 * 8 + 1, 2, 3 * 8 + 3]), HALF)
    expected = torch.cat([latent, kv[:, KV_LORA:].double()], dim=1)[[0, 2, 3]]
    close(inserted, expected, bits=3.9, floor=SMALLEST)
    untouched = torch.ones(4, 4, dtype=torch.bool)
    untouched[[2, 0, 3], [1, 2, 3]] = False
    assert bool((cache.data[untouched] == 0x7F).all())


def test_write_and_read_scale_cancel() -> None:
    # 0.5 * values representable in E4M3: the cache gives them back exactly.
    cache = nan_cache(TENSOR, 1, 4)
    kv_a = torch.ones(1, KV_LORA + PE).to(BF16)
    query.insert_latent(cache, torch.tensor([1]), kv_a, torch.ones(KV_LORA), 1 / HALF, 0.0)
    assert torch.equal(cache.dequantise(torch.tensor([1]), HALF), torch.ones(1, KV_LORA + PE))
    assert bool((cache.data[0, 1] == 0x40).all())  # 2.0: multiplied by 1 / 0.5


@pytest.mark.parametrize("layout", [TENSOR, DS_MLA])
def test_scales_touch_only_the_tensor_format(layout: CacheFormat) -> None:
    _, _, cache = run_query(4, layout)
    rows = torch.tensor([17, 2])
    other = cache.dequantise(rows, HALF)
    same = torch.equal(other, cache.dequantise(rows, ONE))
    assert same is (layout is DS_MLA)


@pytest.mark.parametrize("layout", [TENSOR, DS_MLA])
def test_query_variants_agree_bit_for_bit(layout: CacheFormat) -> None:
    whole, q_c, cache = run_query(6, layout)
    packed = noise(8, Q_LORA + KV_LORA + PE + 5, seed=9)[:6]
    again, split, other = unset(6, Q_LORA), torch.empty_like(whole), nan_cache(layout, 4, 4)
    query.query_norm(packed[:, :Q_LORA], again, q_norm=query_weights()["q_norm"], rms_eps=EPS)
    assert torch.equal(again, q_c)
    weights = query_weights()
    del weights["q_norm"]
    kv_a, slots = packed[:, Q_LORA : Q_LORA + KV_LORA + PE], torch.tensor([9, -1, 2, 15, 0, 5])
    query.mla_query_split(again, kv_a, slots, other, query=split, **weights, **CONSTANTS)
    assert torch.equal(split.view(torch.uint8), whole.view(torch.uint8))
    assert torch.equal(other.data, cache.data)
    fewer, _, _ = run_query(2, layout)
    assert torch.equal(fewer.view(torch.uint8), whole[:2].view(torch.uint8))


def test_rounding_points_move_the_result() -> None:
    base = run_query(8, DS_MLA)
    for point in ("query_b", "kv_norm"):
        other = run_query(8, DS_MLA, rounds=Rounds(**{point: "fp32"}))
        same_query = torch.equal(base[0], other[0])
        assert same_query is (point == "kv_norm")
        assert torch.equal(base[2].data, other[2].data) is (point == "query_b")


@pytest.mark.parametrize(("point", "expected"), [("bf16", 16.0), ("fp32", 18.0)])
def test_absorbed_query_is_rounded_before_it_is_quantised(point: str, expected: float) -> None:
    # 17 + 2^-10 lies above the middle of 16 and 18; BF16 makes it 17, the middle, which goes to 16.
    w_uk = torch.zeros(1, 2, KV_LORA).to(BF16)
    w_uk[0, :, 0] = torch.tensor([17.0, 2.0**-10])
    out, kv_a = unset(1, 1, KV_LORA + PE, dtype=E4M3), torch.ones(1, KV_LORA + PE).to(BF16)
    query.mla_query_split(
        torch.ones(1, 1).to(BF16),
        kv_a,
        torch.tensor([-1]),
        nan_cache(TENSOR, 1, 4),
        query=out,
        kv_norm=torch.ones(KV_LORA),
        q_b=torch.ones(2 + PE, 1).to(BF16),
        w_uk=w_uk,
        q_scale_inv=ONE,
        k_scale_inv=ONE,
        rms_eps=EPS,
        nope=2,
        pe=PE,
        rounds=Rounds(absorb=point),
    )
    assert float(out.float()[0, 0, 0]) == expected


def test_query_refuses_the_dtype_of_another_format() -> None:
    kv_a, q_c = noise(1, KV_LORA + PE), noise(1, Q_LORA)
    weights = query_weights()
    del weights["q_norm"]
    out = unset(1, HEADS, KV_LORA + PE)
    text = "the query is torch.bfloat16, a fp8_tensor cache needs torch.float8_e4m3fn"
    with pytest.raises(ValueError, match=text):
        query.mla_query_split(
            q_c, kv_a, torch.tensor([0]), nan_cache(TENSOR, 1, 4), query=out, **weights, **CONSTANTS
        )


def run_value(rows: int, lengths: Tensor, poison: int = 0) -> list[Tensor]:
    """mla_value, and value_bmm with mla_gate; the last `poison` rows hold NaN."""
    latent, gate = noise(8, HEADS, KV_LORA)[:rows], noise(8, HEADS * V_DIM + 3, seed=1)[:rows, 3:]
    latent[rows - poison :], gate[rows - poison :] = math.nan, math.nan
    weight = noise(HEADS, V_DIM, KV_LORA, seed=2, size=0.1)
    fused, split = unset(rows, HEADS * V_DIM), unset(rows, HEADS * V_DIM)
    values = unset(HEADS, rows, V_DIM)
    value.mla_value(latent, gate, lengths, fused, w_uv=weight)
    value.value_bmm(latent, values, w_uv=weight)
    value.mla_gate(values, gate, lengths, split)
    exact = bf16(torch.einsum("rhl,hvl->rhv", latent.double(), weight.double())).flatten(1)
    return [fused, split, exact / (1 + torch.exp(-gate.double()))]


def test_value_follows_the_formula_and_its_split() -> None:
    fused, split, expected = run_value(4, torch.tensor([5, 1, 9, 2]))
    close(fused, expected, bits=7)
    assert torch.equal(fused, split)


def test_padded_rows_are_zero_and_change_nothing() -> None:
    lengths = torch.tensor([70, 1, 64, 129, 33, 0, 0, 0])
    real = run_value(5, lengths[:5])
    padded = run_value(8, lengths, poison=3)
    for small, large in zip(real[:2], padded[:2], strict=True):
        assert torch.equal(large[:5], small)
        assert torch.equal(large[5:].view(torch.int16), torch.zeros(3, HEADS * V_DIM).short())


def test_a_verify_row_without_keys_is_zero() -> None:
    fused, split, _ = run_value(4, torch.tensor([1, 3]))  # two rows each: sees 0, 1, 2, 3 keys
    for out in (fused, split):
        assert (out == 0).all(1).tolist() == [True, False, False, False]


def run_core(
    layout: CacheFormat, page: int, lengths: list[int], q_scale: Tensor = HALF
) -> tuple[Tensor, Tensor, Tensor]:
    """sparse_decode over all keys of a cache whose other bytes are NaN: (out, lse, expected)."""
    cache = nan_cache(layout, 4 * len(lengths), page)
    width = max(*lengths, 1) + 3
    selected = torch.full((len(lengths), width), 1 << 30, dtype=torch.int32)
    expected = torch.zeros(len(lengths), HEADS, KV_LORA, dtype=torch.float64)
    queries = noise(len(lengths), HEADS, KV_LORA + PE, seed=5)
    queries = queries.to(E4M3) if layout is TENSOR else queries
    scales = q_scale if layout is TENSOR else ONE
    for row, length in enumerate(lengths):
        slots = 4 * row * page + torch.arange(length)
        kv_a = noise(length, KV_LORA + PE, seed=row)
        if length == 0:
            continue
        query.insert_latent(cache, slots, kv_a, torch.ones(KV_LORA), 1 / HALF, EPS)
        physical = slots // page * 2 * page + slots % page
        selected[row, :length] = physical.flip(0).int()
        keys = cache.dequantise(physical, HALF).double()
        logits = 0.2 * (queries[row].double() * scales.double()) @ keys.t()
        expected[row] = torch.softmax(logits, 1) @ keys[:, :KV_LORA]
    valid = torch.tensor(lengths, dtype=torch.int32)
    out = unset(len(lengths), HEADS, KV_LORA)
    arguments = (q_scale, HALF, 0.2, KV_LORA)
    sparse_core.sparse_decode(
        cache,
        selected,
        valid,
        query=queries,
        latent=out,
        q_scale=q_scale,
        k_scale=HALF,
        softmax_scale=0.2,
        kv_lora=KV_LORA,
    )
    _, lse = sparse_core.attend(cache, selected, valid, queries, *arguments)
    return out, lse, expected


@pytest.mark.parametrize("layout", [TENSOR, DS_MLA])
@pytest.mark.parametrize("page", [4, 64, 2048])
def test_core_reads_no_byte_past_the_length(layout: CacheFormat, page: int) -> None:
    lengths = [1, 13, 0, *([page - 1, page, page + 1] if page < 2048 else [])]
    out, lse, expected = run_core(layout, page, lengths)
    close(out, expected)
    assert torch.isneginf(lse).all(1).tolist() == [length == 0 for length in lengths]
    assert bool((out[2] == 0).all())


def test_core_rows_stand_alone() -> None:
    out, lse, _ = run_core(TENSOR, 4, [9, 13, 5])
    fewer, fewer_lse, _ = run_core(TENSOR, 4, [9, 13])
    assert torch.equal(out[:2], fewer)
    assert torch.equal(lse[:2], fewer_lse)


def test_core_lse_is_base_two() -> None:
    # One key: the log-sum-exp is the logit itself, in base 2.
    cache = nan_cache(TENSOR, 1, 4)
    cache.data[0, 1] = 0x38  # ones
    queries = torch.ones(1, 1, KV_LORA + PE).to(E4M3)
    row, count = torch.tensor([[1, -1]], dtype=torch.int32), torch.tensor([1])
    _, lse = sparse_core.attend(cache, row, count, queries, HALF, HALF, 0.1, KV_LORA)
    logit = 0.1 * 0.5 * 0.5 * (KV_LORA + PE)
    assert math.isclose(float(lse), logit / math.log(2), rel_tol=1e-6)


def test_q_scale_belongs_to_fp8_queries_only() -> None:
    for layout in (TENSOR, DS_MLA):
        first, second = (run_core(layout, 4, [9], scale)[0] for scale in (HALF, ONE))
        assert torch.equal(first, second) is (layout is DS_MLA)


def test_an_index_hole_among_the_valid_rows_is_refused() -> None:
    cache, queries = nan_cache(TENSOR, 1, 4), torch.ones(1, 1, KV_LORA + PE).to(E4M3)
    rows = torch.tensor([[1, -1]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block -1 is outside 0\.\.0"):
        sparse_core.attend(cache, rows, torch.tensor([2]), queries, ONE, ONE, 0.1, KV_LORA)
