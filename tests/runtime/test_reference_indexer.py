"""Indexer operands, scores and top-k against formulas and plain sorting."""

from __future__ import annotations

import math
import re
import struct

import pytest
import torch
from torch import Tensor

from kpipe.runtime.formats import PagedCache, cache_format
from kpipe.runtime.reference import indexer, projection, query, select

HEADS, DIM, Q_LORA, EPS = 3, 32, 24, 1e-6
INDEX = cache_format("index_fp8", index_dim=DIM)
LATENT = cache_format("fp8_tensor", kv_lora=32, pe=8)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SIZES = {"index_heads": HEADS, "index_dim": DIM, "index_eps": EPS}


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Reproducible BF16 normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def index_cache(blocks: int) -> PagedCache:
    """An index cache in which every unwritten byte reads as NaN."""
    return PagedCache(torch.full((blocks, 64, INDEX.row_bytes), 0x7F, dtype=torch.uint8), INDEX)


def power_above(value: float) -> float:
    return 2.0 ** math.ceil(math.log2(value))


def key_operands(rows: int) -> dict[str, Tensor]:
    norm = {"index_k_norm": noise(DIM, seed=5).float(), "index_k_bias": noise(DIM, seed=6).float()}
    return {"wk": noise(8, DIM, seed=3)[:rows], "wv": noise(8, HEADS, seed=4)[:rows], **norm}


def run_index(rows: int, slots: Tensor, index_q: Tensor) -> tuple[Tensor, Tensor, PagedCache]:
    """dsa_index into fresh outputs: quantised query, head weights, cache."""
    cache = index_cache(2)
    values, weights = torch.zeros(rows, HEADS, DIM).to(E4M3), torch.full((rows, HEADS), math.nan)
    parts = key_operands(rows)
    wk, wv = parts.pop("wk"), parts.pop("wv")
    indexer.dsa_index(index_q, wk, wv, slots, cache, values, weights, **parts, **SIZES)
    return values, weights, cache


def test_dsa_index_follows_the_formula() -> None:
    index_q, slots = noise(4, HEADS * DIM), torch.tensor([70, -1, 3, 0])
    values, weights, cache = run_index(4, slots, index_q)
    parts = {name: part.double() for name, part in key_operands(4).items()}
    centred = parts["wk"] - parts["wk"].mean(1, keepdim=True)
    key = centred / (centred.pow(2).mean(1, keepdim=True) + EPS).sqrt()
    key = key * parts["index_k_norm"] + parts["index_k_bias"]
    for row, slot in [(0, 70), (2, 3), (3, 0)]:
        page = cache.data[slot // 64].reshape(-1)
        start = 64 * DIM + 4 * (slot % 64)
        scale = struct.unpack("<f", bytes(page[start : start + 4].tolist()))[0]
        assert scale == power_above(float(key[row].abs().max().clamp(min=1e-4)) / 448)
        stored = page[DIM * (slot % 64) : DIM * (slot % 64 + 1)].view(E4M3).double() * scale
        assert bool(((stored - key[row]).abs() <= key[row].abs() / 16 + scale / 512).all())
    heads = index_q.double().reshape(4, HEADS, DIM)
    scales = (heads.abs().amax(2) / 448).apply_(power_above)
    assert torch.equal(values.float(), (heads / scales[..., None]).float().to(E4M3).float())
    expected = parts["wv"] * scales * DIM**-0.5 * HEADS**-0.5
    assert torch.allclose(weights.double(), expected, rtol=1e-6, atol=0)
    assert int((cache.data[1] != 0x7F).sum()) <= DIM + 4  # one owned slot in block 1


def test_index_front_is_the_chain_without_the_rounding() -> None:
    q_a, weight, q_norm = (
        noise(4, Q_LORA),
        noise(HEADS * DIM, Q_LORA, seed=1),
        noise(Q_LORA, seed=2),
    )
    slots = torch.tensor([1, 2, -1, 4])
    q_c, index_q = torch.empty(4, Q_LORA).to(BF16), torch.empty(4, HEADS * DIM).to(BF16)
    query.query_norm(q_a, q_c, q_norm=q_norm, rms_eps=EPS)
    projection.index_gemm(q_c, index_q, index_q_b=weight)
    chain = run_index(4, slots, index_q)
    results = []
    for source in ({"q_a": q_a}, {"q_c": q_c, "normalized": True}):
        cache = index_cache(2)
        values, weights = torch.zeros(4, HEADS, DIM).to(E4M3), torch.empty(4, HEADS)
        parts = key_operands(4)
        wk, wv = parts.pop("wk"), parts.pop("wv")
        outputs = (values, weights)
        named = {"q_norm": q_norm, "index_q_b": weight, "rms_eps": EPS, **parts, **SIZES, **source}
        indexer.index_front(wk, wv, slots, cache, *outputs, **named)
        results.append((values, weights, cache))
    for values, weights, cache in results:
        assert torch.equal(values.float(), results[0][0].float())
        assert torch.equal(weights, results[0][1])
        assert torch.equal(cache.data, chain[2].data)
    exact = (q_c.double() @ weight.double().t()).reshape(4, HEADS, DIM)
    scales = (exact.abs().amax(2, keepdim=True) / 448).apply_(power_above)
    direct = (exact / scales).float().to(E4M3).float()
    assert torch.equal(results[0][0].float(), direct)
    assert not torch.equal(chain[0].float(), direct)  # the BF16 rounding shows


def scored(lengths: list[int], queries: int, table: Tensor, cache: PagedCache) -> Tensor:
    """index_scores into a buffer of 7777."""
    rows = len(lengths) * queries
    scores = torch.full((rows, 160), 7777.0)
    values = noise(6, HEADS, DIM, seed=7).to(E4M3)[:rows]
    weights = noise(6, HEADS, seed=8).float()[:rows]
    indexer.index_scores(values, weights, cache, table, torch.tensor(lengths), scores)
    return scores


def test_scores_follow_the_formula_and_stop_at_the_visible_length() -> None:
    cache = index_cache(6)
    table = torch.tensor([[4, 1, -1], [2, 0, 5], [-1, -1, -1]], dtype=torch.int32)
    keys = noise(200, DIM, seed=9).to(E4M3)
    key_scales = torch.exp2(torch.arange(200) % 5 - 3.0)
    for request, length in enumerate([70, 130]):
        for token in range(length):
            block = int(table[request, token // 64])
            slot = torch.tensor([block * 64 + token % 64])
            cache.insert(slot, key=keys[token : token + 1], scale=key_scales[token].view(1, 1))
    scores = scored([70, 130, 0], 2, table, cache)
    values, weights = noise(6, HEADS, DIM, seed=7).to(E4M3), noise(6, HEADS, seed=8)
    dots = torch.einsum("rhd,kd->rhk", values.double(), keys.double()).relu()
    expected = torch.einsum("rh,rhk->rk", weights.double(), dots) * key_scales.double()
    for row, count in enumerate([69, 70, 129, 130, 0, 0]):
        limit = 1e-5 * float(expected.abs().max())
        assert bool(((scores[row, :count] - expected[row, :count]).abs() <= limit).all())
        assert bool((scores[row, count:] == 7777).all())
    alone = scored([70], 2, table[:1], cache)
    assert torch.equal(alone, scores[:2])
    with pytest.raises(ValueError, match="a row sees 161 keys, scores has 160 columns"):
        scored([161, 1, 0], 1, table, cache)


def test_one_hot_token_wins() -> None:
    cache = index_cache(1)
    cache.data[0].view(-1)[: 64 * DIM] = 0
    cache.data[0].view(-1)[DIM : 2 * DIM] = 0x38
    scales = [1 + token / 64 for token in range(64)]
    page_scales = torch.tensor(list(struct.pack("<64f", *scales)), dtype=torch.uint8)
    cache.data[0].view(-1)[64 * DIM :] = page_scales
    scores = torch.full((1, 64), math.nan)
    ones = torch.ones(1, HEADS, DIM).to(E4M3)
    table = torch.zeros((1, 1), dtype=torch.int32)
    indexer.index_scores(ones, torch.ones(1, HEADS), cache, table, torch.tensor([64]), scores)
    assert scores[0].nonzero().tolist() == [[1]]
    assert float(scores[0, 1]) == HEADS * DIM * (1 + 1 / 64)


def chosen(
    scores: Tensor, lengths: list[int], top_k: int, **named: object
) -> tuple[Tensor, Tensor]:
    """topk_select with pages of 64 that lie backwards in the pool, mapped back to positions."""
    requests, pages = len(lengths), -(-scores.shape[1] // 64)
    storage = torch.zeros((pages, 80, LATENT.row_bytes), dtype=torch.uint8)
    cache = PagedCache(storage[:, :64], LATENT)
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32).repeat(requests, 1)
    selected = torch.full((scores.shape[0], top_k), 7777, dtype=torch.int32)
    valid = torch.full((scores.shape[0],), 7777, dtype=torch.int32)
    given = (torch.tensor(lengths), table, cache, selected, valid)
    select.topk_select(scores, *given, top_k=top_k, **named)
    used = selected >= 0
    positions = (pages - 1 - selected // 80) * 64 + selected % 80
    assert bool((selected[used] % 80 < 64).all())
    return torch.where(used, positions, selected), valid


@pytest.mark.parametrize("length", [0, 1, 249, 2047, 2048, 2049])
def test_short_rows_take_everything_and_pad(length: int) -> None:
    scores = noise(1, 2304).float() + torch.arange(2304) / 1e4
    positions, valid = chosen(scores, [length], 2048)
    count = min(length, 2048)
    assert valid.tolist() == [count]
    assert positions.shape == (1, 2048)
    expected = sorted(range(length), key=lambda at: (-float(scores[0, at]), at))[:count]
    assert sorted(positions[0, :count].tolist()) == sorted(expected)
    assert positions[0, count:].tolist() == [-1] * (2048 - count)


def test_ties_follow_the_rule() -> None:
    equal = torch.ones(1, 5000)
    assert chosen(equal, [5000], 2048)[0][0].tolist() == list(range(2048))
    high = chosen(equal, [5000], 2048, tie="high_id")[0][0].tolist()
    assert high == list(range(4999, 4999 - 2048, -1))
    levels = equal.clone()
    levels[0, 100 : 100 + 2047] = 2.0
    assert sorted(chosen(levels, [5000], 2048)[0][0].tolist()) == [0, *range(100, 2147)]
    last = sorted(chosen(levels, [5000], 2048, tie="high_id")[0][0].tolist())
    assert last == [*range(100, 2147), 4999]
    with pytest.raises(ValueError, match="tie is 'any'; known are low_id, high_id"):
        chosen(equal, [5000], 2048, tie="any")


@pytest.mark.parametrize("tie", ["low_id", "high_id"])
def test_order_is_exact(tie: str) -> None:
    palette = torch.tensor([3.0, -3.0, 0.0, 1e-40, -1e-40, -math.inf, 2.5])
    picks = torch.randint(7, (1, 300), generator=torch.Generator().manual_seed(3))
    scores = palette[picks]
    positions, _ = chosen(scores, [300], 200, tie=tie)
    sign = 1 if tie == "low_id" else -1
    order = sorted(range(300), key=lambda at: (-float(scores[0, at]), sign * at))
    assert positions[0].tolist() == order[:200]


def test_nan_scores_come_last() -> None:
    scores = torch.tensor([[math.nan, 1.0, -math.nan, -5.0, 2.0]])
    assert chosen(scores, [5], 3)[0].tolist() == [[4, 1, 3]]


def test_rows_of_a_request_see_their_own_prefix() -> None:
    scores = torch.arange(128.0).repeat(6, 1)
    positions, valid = chosen(scores, [10, 2, 0], 4)
    assert valid.tolist() == [4, 4, 1, 2, 0, 0]
    assert positions.tolist() == [
        [8, 7, 6, 5],
        [9, 8, 7, 6],
        [0, -1, -1, -1],
        [0, 1, -1, -1],
        [-1] * 4,
        [-1] * 4,
    ]


def test_select_refuses_more_keys_than_scores() -> None:
    with pytest.raises(ValueError, match=re.escape("a row sees 129 keys, scores has 128")):
        chosen(torch.zeros(1, 128), [129], 4)


def test_physical_rows_must_fit_their_32_bits() -> None:
    row = LATENT.row_bytes
    far = torch.empty_strided((3, 1, row), (row << 30, row, 1), dtype=torch.uint8, device="meta")
    selected, valid = torch.zeros(1, 4).int(), torch.zeros(1).int()
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    given = (table, PagedCache(far, LATENT), selected, valid)
    select.topk_select(torch.zeros(1, 2), torch.tensor([1]), *given, top_k=4)
    assert selected.tolist() == [[1 << 30, -1, -1, -1]]
    with pytest.raises(ValueError, match="physical row 2147483648 does not fit 32 bits"):
        select.topk_select(torch.zeros(1, 2), torch.tensor([2]), *given, top_k=4)
