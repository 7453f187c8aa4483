"""Numerical cases known from public bug reports, with the values that have to come out.

Each test carries the number of its case; the descriptions say what used to go wrong.
"""

from __future__ import annotations

import math
import re
import struct

import pytest
import torch
from layer_checks import assert_within_bounds
from layer_factory import LayerFactory
from layer_inputs import engine_inputs, with_empty_requests
from torch import Tensor

from kpipe.runtime.comm.mailbox import MailboxSpec
from kpipe.runtime.comm.virtual_ranks import RankComm, VirtualRanks
from kpipe.runtime.formats import CacheFormat, PagedCache, cache_format
from kpipe.runtime.oracle.compare import declared_bounds, relative_error
from kpipe.runtime.prepared import poison
from kpipe.runtime.reference import indexer, query, select, sparse_core, value
from kpipe.runtime.reference.rows import local_counts
from kpipe.runtime.rows import (
    block_count,
    check_row_lengths,
    check_rows,
    check_segments,
    padded_lengths,
    row_lengths,
)
from kpipe.runtime.scales import check_latent_scales, check_rank_scales, check_scale
from kpipe.runtime.sharding import Shard
from kpipe.runtime.tables import expand_table
from kpipe.runtime.trial import Case, run_case

KV_LORA, PE = 128, 16
TENSOR = cache_format("fp8_tensor", kv_lora=KV_LORA, pe=PE)
DS_MLA = cache_format("fp8_ds_mla", kv_lora=KV_LORA, pe=PE)
E4M3 = torch.float8_e4m3fn
ONE, HALF = torch.ones(1), torch.tensor([0.5])


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Reproducible BF16 normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _zero(rows: Tensor) -> bool:
    """Whether every element is exactly 0."""
    return bool((rows == 0).all())


def merged(outs: list[float], lses: list[float], base: str) -> tuple[float, float]:
    """One head's merged row and LSE of ranks with one-element rows."""
    rows = torch.tensor(outs).reshape(-1, 1, 1, 1).bfloat16()
    row, lse = value.merge_ranks(rows, torch.tensor(lses).reshape(-1, 1, 1), base)
    return float(row), float(lse)


def test_d18_log_sum_exp_of_either_base() -> None:
    """Base 2 taken for base e: every weight is off by a power."""
    cases = [([1.0, 0.0], (1, 3), 0.25), ([1.0, 2.0, 4.0], (1, 2, 5), 3.125)]
    for outs, sums, expected in cases:
        for base, log in (("e", math.log), ("2", math.log2)):
            row, lse = merged(outs, [log(part) for part in sums], base)
            assert row == pytest.approx(expected, rel=1e-6)
            assert lse == pytest.approx(log(sum(sums)), rel=1e-6)
    # The wrong answers that a mix-up gives, so that a test on balanced ranks cannot pass for one.
    base2 = [0.0, math.log2(3)]
    assert merged([1.0, 0.0], base2, "e")[0] == pytest.approx(0.170094, abs=1e-6)
    assert merged([1.0, 0.0], [0.0, math.log(3)], "2")[0] == pytest.approx(0.318321, abs=1e-6)
    three = [0.0, math.log2(2), math.log2(5)]
    assert merged([1.0, 2.0, 4.0], three, "e")[0] == pytest.approx(3.393646, abs=1e-6)
    assert merged([1.0, 0.0], [0.0, 0.0], "2")[0] == merged([1.0, 0.0], [0.0, 0.0], "e")[0] == 0.5


def test_d19_rank_without_keys(layers: LayerFactory) -> None:
    """A rank that holds nothing for a row left garbage that the merge gave weight."""
    for base in ("2", "e"):
        log = math.log2 if base == "2" else math.log
        assert merged([1.0, math.nan], [log(8), -math.inf], base) == pytest.approx((1.0, log(8)))
        assert merged([math.nan, math.nan], [-math.inf, -math.inf], base) == (0.0, -math.inf)
    # Row B: the LSE of the empty rank was left at 0; the push replaces it by what the count says.
    assert _pushed_and_merged(valid=[1, 0], outs=[1.0, 0.0], lses=[0.0, 0.0]) == [1.0, 1.0]
    # Row D: per query row, not per request.
    for rank, counts in enumerate(([1, 1], [0, 1])):
        assert local_counts(torch.tensor([2]), 2, Shard(rank, 2, 1)).tolist() == counts
    bound = declared_bounds()["out"]
    contexts = tuple(range(1, 10))
    (eight,) = run_case(layers.dcp(8), Case(contexts))
    (alone,) = run_case(layers.dcp(1), Case(contexts))
    assert_within_bounds([eight, alone])
    assert relative_error(eight.ranks[0].out, alone.ranks[0].out) <= bound


def _pushed_and_merged(valid: list[int], outs: list[float], lses: list[float]) -> list[float]:
    """Two ranks with one row of one head each push what they hold; the merged row on each rank."""

    def body(comm: RankComm) -> float:
        mail = comm.mailbox(
            MailboxSpec("partial_mail", (2, 1, 1, 2), torch.bfloat16, 0x80000000), 0
        )
        lse_mail = comm.mailbox(MailboxSpec("lse_mail", (2, 1, 1), torch.float32, 0xFFFFFFFF), 0)
        rows = torch.full((1, 2, 2), outs[comm.rank]).bfloat16()
        lse = torch.full((1, 2), lses[comm.rank])
        value.push_partials(rows, lse, torch.tensor([valid[comm.rank]]), mail, lse_mail)
        places = [(source, slice(0, 1)) for source in range(2)]
        received = torch.stack([mail.poll(place).clone() for place in places])
        weights = torch.stack([lse_mail.poll(place).clone() for place in places])
        return float(value.merge_ranks(received, weights, "2")[0][0, 0, 0])

    return VirtualRanks(2).run(body)


@pytest.mark.parametrize(
    ("real", "empty"), [((70, 1, 64, 129, 33), 3), ((70,), 63), ((33, 5) * 25, 14)]
)
def test_d20_padded_rows_do_not_leak(
    layers: LayerFactory, real: tuple[int, ...], empty: int
) -> None:
    """Rows of length 0 held NaN that a scale or a projection over all rows picked up."""
    layer_class = layers.tp(2, mode="late")
    given = engine_inputs(layer_class, real)
    layer = given.prepared(layer_class)
    poison(layer)
    padded = with_empty_requests(given.step, empty)
    layer.run(padded)
    wide = {name: buffer.clone() for name, buffer in layer.buffers.items()}
    poison(layer)
    layer.run(given.step)
    rows = len(real)
    assert padded.out[:rows].equal(given.step.out) and bool(given.step.out.isfinite().all())
    assert _zero(padded.out[rows:]) and _zero(wide["gated"][rows : rows + empty])
    for name in ("index_q8", "index_w", "query"):  # quantised values and scales
        narrow = layer.buffers[name][:rows]
        assert wide[name][:rows].view(torch.uint8).equal(narrow.view(torch.uint8)), name


def test_d20_empty_rows_have_no_log_sum(layers: LayerFactory) -> None:
    (trial,) = run_case(layers.dcp(2), Case((70, 1, 64, 129, 33, 0, 0, 0)))
    for run in trial.ranks:
        assert bool((run.views.partial_lse[5:] == -math.inf).all())
        assert bool((run.out[5:] == 0).all()) and bool(run.out.isfinite().all())


def _filled(layout: CacheFormat, page: int, length: int) -> tuple[PagedCache, Tensor]:
    """A cache of NaN bytes that holds one request; and its physical rows."""
    blocks = -(-length // page) + 1
    data = torch.full((blocks, page, layout.row_bytes), 0x7F, dtype=torch.uint8)
    if layout is DS_MLA:
        data[:, :, KV_LORA:] = 0xFF  # FP32 and BF16 NaN
    cache = PagedCache(data, layout)
    table = torch.arange(blocks - 1, 0, -1)
    positions = torch.arange(length)
    slots = table[positions // page] * page + positions % page
    norm = torch.ones(KV_LORA).bfloat16()
    query.insert_latent(cache, slots, noise(length, KV_LORA + PE), norm, 1 / HALF, 1e-6)
    return cache, cache.physical_rows(table, positions)


@pytest.mark.parametrize("page", [4, 64, 2048])
@pytest.mark.parametrize("layout", [TENSOR, DS_MLA], ids=["fp8_tensor", "fp8_ds_mla"])
def test_d21_nan_behind_the_last_key(layout: CacheFormat, page: int) -> None:
    """Probability 0 times a NaN behind the length is NaN."""
    dtype = E4M3 if layout is TENSOR else torch.bfloat16
    heads = noise(1, 3, KV_LORA + PE, seed=1).to(dtype)
    for length in (1, page - 1, page, page + 1, 13):
        cache, rows = _filled(layout, page, length)
        chosen = torch.full((1, length + 5), -1)
        chosen[0, :length] = rows
        count = torch.tensor([length])
        out, lse = sparse_core.attend(cache, chosen, count, heads, HALF, HALF, 0.1, KV_LORA)
        keys = cache.dequantise(rows, 0.5).double()
        scale = 0.5 if layout is TENSOR else 1.0
        logits = 0.1 * scale * heads[0].double() @ keys.T
        expected = logits.softmax(1) @ keys[:, :KV_LORA]
        assert relative_error(out[0], expected) <= 2**-8
        base2 = logits.logsumexp(1) / math.log(2)
        assert torch.allclose(lse[0].double(), base2, atol=1e-5, rtol=1e-5)


D23 = [
    (2, 1, 6, 4, [[2, 2, 3, 3], [1, 2, 2, 3]]),
    (2, 1, 10, 3, [[4, 5, 5], [4, 4, 5]]),
    (2, 64, 130, 4, [[64, 64, 65, 66], [63, 64, 64, 64]]),
    (4, 1, 3, 1, [[1], [1], [1], [0]]),
    (2, 64, 64, 1, [[64], [0]]),
    (4, 64, 300, 1, [[108], [64], [64], [64]]),
    (3, 16, 100, 1, [[36], [32], [32]]),
]


@pytest.mark.parametrize(("ranks", "interleave", "length", "q", "expected"), D23)
def test_d23_visible_keys_per_rank(
    ranks: int, interleave: int, length: int, q: int, expected: list[list[int]]
) -> None:
    """The causal limit of a row was counted back from the rank's own length."""
    for rank, counts in enumerate(expected):
        shard = Shard(rank, ranks, interleave)
        assert local_counts(torch.tensor([length]), q, shard).tolist() == counts
        seen = [length - q + 1 + row for row in range(q)]
        owned = [sum(t // interleave % ranks == rank for t in range(limit)) for limit in seen]
        assert counts == owned
        for accepted in range(q + 1):  # what the next step starts from
            kept = length - q + accepted
            brute = sum(t // interleave % ranks == rank for t in range(kept))
            assert shard.local_length(kept) == brute


@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (2, 64), (4, 64), (8, 1)])
@pytest.mark.parametrize("q", [1, 4])
def test_d23_sharded_rows_end_to_end(
    layers: LayerFactory, ranks: int, interleave: int, q: int
) -> None:
    period = ranks * interleave
    contexts = (6, 10, 130, 64, 3, min(300, 3 * period + 2), 1, period)
    (trial,) = run_case(layers.dcp(ranks, interleave), Case(contexts, q=q))
    assert_within_bounds([trial])


def test_d24_tables_per_request_rows_per_token(layers: LayerFactory) -> None:
    """Three query rows of a request indexed three rows of a table that has one."""
    lengths = torch.tensor([10, 4, 2, 0])
    expected = [8, 9, 10, 2, 3, 4, 0, 1, 2, 0, 0, 0]
    assert row_lengths(lengths, 3).tolist() == expected
    text = (
        "KP-ROWS: q has 768 rows, seq_lens has 256, block_table has 256; "
        "stage core is declared single-row"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        check_rows(768, torch.zeros(256), torch.zeros(256, 8), 1, "core")
    check_rows(768, torch.zeros(256), torch.zeros(256, 8), 3, "core")
    (trial,) = run_case(layers.tp(2), Case((10, 4, 2, 0), q=4))
    assert_within_bounds([trial])
    assert trial.ranks[0].views.valid.tolist() == [7, 8, 9, 10, 1, 2, 3, 4, 0, 0, 1, 2, 0, 0, 0, 0]


def test_d25_padded_draft_rows_look_further() -> None:
    """Rows padded behind the real ones shift the causal limit of the real ones."""
    adjusted = padded_lengths(torch.tensor([100, 50, 7]), torch.tensor([2, 4, 1]), 4)
    assert adjusted.tolist() == [102, 50, 10]
    rows = row_lengths(adjusted, 4).reshape(3, 4)
    assert rows[0, :2].tolist() == [99, 100]
    assert rows[1].tolist() == [47, 48, 49, 50]
    assert rows[2, :1].tolist() == [7]
    assert row_lengths(torch.tensor([100]), 4)[:2].tolist() == [97, 98], "what it used to see"
    with pytest.raises(ValueError, match=r"^KP-QMAX: max_q_len=3 but segment 1 has 4 rows$"):
        check_segments([0, 2, 6, 7], 3)
    check_segments([0, 2, 6, 7], 5)
    uniform = padded_lengths(torch.tensor([9, 5]), torch.tensor([3, 3]), 3)
    assert uniform.tolist() == [9, 5]


def test_d27_one_scale_and_only_for_scaled_caches(layers: LayerFactory) -> None:
    """k_scale applied to a cache without one; K and V scales of a latent that is both."""
    results = []
    for scale in (1.0, 0.5):  # A: a format that carries its own scales
        layer_class = layers.tp(2, ds_mla=True)
        given = engine_inputs(layer_class, (70, 5))
        given.weights.k_scale = torch.tensor([scale])
        given.prepared(layer_class).run(given.step)
        results.append(given.step.out)
    assert results[0].equal(results[1])
    # B: written times 1/0.5, read times 0.5; keys and values alike.
    cache, rows = _filled(TENSOR, 64, 13)
    keys = cache.dequantise(rows, HALF)
    normed = noise(13, KV_LORA + PE).float()[:, :KV_LORA]
    normed = normed * (normed.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    assert relative_error(keys[:, :KV_LORA], normed) <= 2**-4
    heads = noise(1, 2, KV_LORA + PE, seed=1).to(E4M3)
    found, _ = sparse_core.attend(
        cache, rows.unsqueeze(0), torch.tensor([13]), heads, ONE, HALF, 0.1, KV_LORA
    )
    keys = keys.double()
    weights = (0.1 * heads[0].double() @ keys.T).softmax(1)
    assert relative_error(found[0], weights @ keys[:, :KV_LORA]) <= 2**-8
    text = "SP-MLA-SCALE: MLA latent has one scale; k_scale 0.5 != v_scale 0.25"
    with pytest.raises(ValueError, match=re.escape(text)):
        check_latent_scales(0.5, 0.25)
    for wrong in (0.0, math.nan, -1.0):
        with pytest.raises(ValueError, match=rf"^SP-SCALE-VALUE: k_scale is {wrong}; "):
            check_scale("k_scale", wrong)
    text = "SP-SCALE-RANK: k_scale is 0.5 on rank 0 and 0.25 on rank 1"
    with pytest.raises(ValueError, match=re.escape(text)):
        check_rank_scales("k_scale", [0.5, 0.25])


def test_d28_packed_rows_and_planar_pages() -> None:
    """Scales squeezed to powers of two, records read where planes were written."""
    layout = cache_format("fp8_ds_mla", kv_lora=512, pe=64)
    index = cache_format("index_fp8", index_dim=128)
    assert (layout.row_bytes, index.page_bytes(64)) == (656, 64 * 132)
    assert [index.field_offset(name, 1, 64) for name in ("key", "scale")] == [128, 8196]
    scales = [0.3, 0.7, 1.1, 3.0]
    storage = torch.zeros((2, 2, 4, 656), dtype=torch.uint8)  # block, layer, token
    for layer, factor in enumerate((1.0, 10.0)):
        packed = struct.pack("<4f", *(factor * scale for scale in scales))
        row = storage[1, layer, 2]
        row[:512] = torch.arange(512).remainder(120).to(torch.uint8)
        row[512:528] = torch.tensor(list(packed), dtype=torch.uint8)
    values = torch.arange(512).remainder(120).to(torch.uint8).view(E4M3).double()
    for layer, factor in enumerate((1.0, 10.0)):
        cache = PagedCache(storage[:, layer], layout)
        found = cache.dequantise(torch.tensor([1 * 8 + 2]))[0, :512].double()
        expected = factor * values * torch.tensor(scales).double().repeat_interleave(128)
        assert torch.allclose(found, expected, rtol=1e-6, atol=0)
    page = torch.zeros((1, 64, 132), dtype=torch.uint8)
    page.view(-1)[128:256] = 0x38  # token 1 holds ones
    packed = struct.pack("<64f", *(1 + token / 64 for token in range(64)))
    page.view(-1)[8192:] = torch.tensor(list(packed), dtype=torch.uint8)
    scores = torch.full((1, 64), math.nan)
    table, ones = torch.zeros((1, 1), dtype=torch.int32), torch.ones(1, 2, 128).to(E4M3)
    operands = ones, torch.ones(1, 2), PagedCache(page, index), table, torch.tensor([64])
    indexer.index_scores(*operands, scores)
    assert scores[0].argmax() == 1 and float(scores[0, 1]) == 2 * 128 * (1 + 1 / 64)
    with pytest.raises(ValueError, match="rows of 512 bytes, format fp8_ds_mla needs 656"):
        PagedCache(torch.zeros((1, 64, 512), dtype=torch.uint8), layout)


def _top_k(scores: Tensor, length: int, top_k: int = 2048) -> list[int]:
    """Selected positions of one row; the output buffer held 7777 before."""
    pages = -(-scores.shape[1] // 64)
    cache = PagedCache(torch.zeros((pages, 64, TENSOR.row_bytes), dtype=torch.uint8), TENSOR)
    table = torch.arange(pages, dtype=torch.int32).unsqueeze(0)
    selected = torch.full((1, top_k), 7777, dtype=torch.int32)
    valid = torch.full((1,), 7777, dtype=torch.int32)
    lengths = torch.tensor([length])
    select.topk_select(scores, lengths, table, cache, selected, valid, top_k=top_k)
    positions = selected[0].tolist()
    assert valid.tolist() == [min(length, top_k)]
    assert positions[valid[0] :] == [-1] * (top_k - int(valid[0]))
    return positions[: valid[0]]


def test_d30_top_k_contract() -> None:
    """k beyond the row, stale tails, ties that depend on the launch, holes instead of counts."""
    distinct = torch.linspace(1, 0, 5000)[torch.randperm(5000, generator=_seeded())].reshape(1, -1)
    for length in (0, 1, 249, 2047, 2048, 2049):
        positions = _top_k(distinct, length)
        best = distinct[0, :length].argsort(descending=True)[:2048].tolist()
        assert sorted(positions) == sorted(best)
    assert sorted(_top_k(distinct, 249)) == list(range(249))
    equal = torch.ones(1, 5000)
    assert all(sorted(_top_k(equal, 5000)) == list(range(2048)) for _ in range(3))
    levels = torch.ones(1, 5000)
    levels[0, 1000:3047] = 2.0
    assert sorted(_top_k(levels, 5000)) == [0, *range(1000, 3047)]
    shards = [Shard(rank, 2, 1) for rank in range(2)]
    chosen = torch.tensor([0, 1, 2, 5, 8])
    owned = [shard.local(chosen[shard.owner(chosen) == shard.rank]).tolist() for shard in shards]
    assert owned == [[0, 1, 4], [0, 2]]


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def test_d30_ranks_hold_compacted_lists_with_counts(layers: LayerFactory) -> None:
    (trial,) = run_case(layers.dcp(2), Case((9, 70, 512)))
    for run in trial.ranks:
        for row, count in enumerate(run.views.valid[:3].tolist()):
            assert bool((run.views.selected[row, :count] >= 0).all())
            assert bool((run.views.selected[row, count:] == -1).all())
    assert sum(run.views.valid[:3] for run in trial.ranks).tolist() == [9, 16, 16]


def test_d31_manager_pages_are_several_kernel_blocks() -> None:
    """The pool's page of 2048 tokens used where the kernel reads blocks of 64."""
    table = torch.tensor([[5, 9]], dtype=torch.int32)
    expanded = expand_table(table, 2048, 64)
    assert expanded.tolist() == [[*range(160, 192), *range(288, 320)]]
    needed = int(block_count(torch.tensor([2049]), 64))
    assert needed == 33 and int(expanded[0, needed - 1]) == 288
    for token in (0, 63, 64, 2047, 2048, 4095):
        block = int(table[0, token // 2048]) * 32 + token % 2048 // 64
        assert int(expanded[0, token // 64]) == block
    assert expand_table(table, 2112, 64).shape == (1, 66)
    assert expand_table(table, 64, 64).equal(table)
    with pytest.raises(ValueError, match=r"^SP-PAGE: page 2100 is not a multiple of kernel_block"):
        expand_table(table, 2100, 64)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_d33_rows_without_keys(layers: LayerFactory, arch: str) -> None:
    """A length of -1 read as four billion; a batch in which every length is 0."""
    assert row_lengths(torch.tensor([10, 7, 12, 0]), 2).tolist() == [9, 10, 6, 7, 11, 12, 0, 0]
    assert row_lengths(torch.tensor([1]), 2).tolist() == [0, 1]
    assert block_count(torch.tensor([0]), 64).tolist() == [0]
    text = "KP-NEG-LEN: request 1, row 0: length -1 is negative"
    with pytest.raises(ValueError, match=f"^{text}$"):
        check_row_lengths(torch.tensor([9, 10, -1, 0]), 2)
    for layer in (layers.tp(2), layers.dcp(2)):
        (trial,) = run_case(layer, Case((0,) * 32, arch=arch))
        for run in trial.ranks:
            assert bool((run.out == 0).all())
            assert bool((run.views.selected == -1).all()) and bool((run.views.valid == 0).all())
            if layer.CONTEXT_PARALLEL:
                assert bool((run.views.partial_lse == -math.inf).all())
