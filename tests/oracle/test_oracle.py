"""Self-checks of the oracle: invariances, layouts of the caches, and its own error bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from kpipe.runtime.oracle import dsa_layer
from kpipe.runtime.oracle.byte_formats import (
    LATENT_FORMATS,
    decode_index,
    decode_latent,
    encode_index,
    encode_latent,
    unused_row,
)
from kpipe.runtime.oracle.caches import (
    ContextShard,
    PagedBytes,
    build_index_cache,
    build_latent_cache,
    index_planes,
    with_inserted,
)
from kpipe.runtime.oracle.compare import relative_error, selection_violation
from kpipe.runtime.oracle.dsa_layer import oracle_layer
from kpipe.runtime.oracle.geometry import KIMI_K31, SMALL
from kpipe.runtime.oracle.inputs import Batch, Weights, make_batch, make_weights, rank_weights
from kpipe.runtime.oracle.number_formats import (
    decode_e4m3,
    round_bf16,
)
from kpipe.runtime.oracle.result import Result, Rounding

LENGTHS = (37, 0, 3, 16, 150)


@cache
def weights() -> Weights:
    """One set of weights for the file."""
    return make_weights(SMALL)


@cache
def batch(q: int) -> Batch:
    """A batch with a padded request, a context shorter than q, and short and long rows."""
    return make_batch(SMALL, LENGTHS, q)


def test_geometry_of_the_model() -> None:
    assert [KIMI_K31.pitch(ranks) for ranks in (8, 16)] == [3808, 3040]
    assert KIMI_K31.latent == 576 and KIMI_K31.softmax_scale == 192**-0.5
    with pytest.raises(ValueError, match="96 heads do not divide over 5 ranks"):
        KIMI_K31.pitch(5)


def test_rank_slices_compute_their_share_of_the_whole() -> None:
    hidden = batch(1).hidden[:1].double()
    for rank in range(4):
        part = rank_weights(SMALL, weights(), rank, 4)
        assert part.packed.shape == (SMALL.pitch(4), SMALL.hidden)
        gate = SMALL.columns(4)["gate"]
        mine = slice(rank * 4 * SMALL.v_dim, (rank + 1) * 4 * SMALL.v_dim)
        whole = hidden @ weights().gate.double().T
        assert relative_error(hidden @ part.packed[gate].double().T, whole[:, mine]) < 1e-12
        assert torch.equal(part.o_proj, weights().o_proj[:, mine])
        assert torch.equal(part.w_uk[1], weights().w_uk[rank * 4 + 1])
        assert torch.equal(
            part.q_b[: SMALL.qk_head], weights().q_b[rank * 4 * SMALL.qk_head :][:48]
        )
    with pytest.raises(ValueError, match="rank 4 is not one of 4"):
        rank_weights(SMALL, weights(), 4, 4)


def test_rows_follow_the_causal_rule() -> None:
    four = batch(4)
    assert [four.visible(row) for row in range(4)] == [34, 35, 36, 37]
    assert [four.visible(row) for row in range(4, 12)] == [0, 0, 0, 0, 0, 1, 2, 3]
    assert four.hidden[8].isnan().all() and four.hidden[9].isfinite().all()


def _shards(ranks: int, interleave: int) -> list[ContextShard]:
    return [ContextShard(rank, ranks, interleave) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (4, 4), (8, 16)])
def test_ownership_is_the_interleave_formula(ranks: int, interleave: int) -> None:
    for shard in _shards(ranks, interleave):
        for local, token in enumerate(shard.owned(333)):
            assert (token // interleave) % ranks == shard.rank
            span = ranks * interleave
            assert local == token // span * interleave + token % interleave
    assert sum(len(shard.owned(333)) for shard in _shards(ranks, interleave)) == 333


@pytest.mark.parametrize("name", [*LATENT_FORMATS, "index_fp8"])
@pytest.mark.parametrize(("ranks", "interleave", "q"), [(1, 1, 1), (4, 1, 4), (4, 16, 4)])
def test_every_cached_token_is_stored_exactly_once(
    name: str, ranks: int, interleave: int, q: int
) -> None:
    whole = batch(q)
    seen: dict[tuple[int, int], int] = {}
    new = torch.zeros(whole.rows, dtype=torch.int64)
    for shard in _shards(ranks, interleave):
        paged = _build(name, whole, shard, page=8, block_rows=11)
        assert paged.data.stride(0) == 11 * paged.data.shape[2]
        new += (paged.slots >= 0).long()
        for request, length in enumerate(whole.lengths):
            for local, token in enumerate(shard.owned(length)):
                row = torch.tensor([paged.physical_row(request, local)])
                assert [x.item() for x in paged.locate(row)] == [request, token]
                if token < length - q:
                    seen[request, token] = seen.get((request, token), 0) + 1
                    expected = _token(name, whole, request, token)
                else:
                    slot = int(paged.slots[request * q + token - length + q])
                    assert slot == (row.item() // 11) * 8 + row.item() % 11
                    expected = unused_row(SMALL, name)
                assert torch.equal(paged.token(request, local), expected)
    assert seen == {(r, t): 1 for r, n in enumerate(whole.lengths) for t in range(max(n - q, 0))}
    assert new.tolist() == [int(whole.visible(row) > 0) for row in range(whole.rows)]


def _build(name: str, whole: Batch, shard: ContextShard, **layout: int) -> PagedBytes:
    if name == "index_fp8":
        return build_index_cache(SMALL, whole, shard=shard, **layout)
    return build_latent_cache(SMALL, weights(), whole, name, shard=shard, **layout)


def _token(name: str, whole: Batch, request: int, token: int) -> torch.Tensor:
    """Bytes of one cached token, straight from its values."""
    if name == "index_fp8":
        return encode_index(whole.cached_index[request][token][None])[0]
    latent = whole.cached_latent[request][token][None].double()
    pe = whole.cached_pe[request][token][None].double()
    return encode_latent(SMALL, name, latent, pe, float(weights().k_scale_inv))[0]


def test_index_pages_hold_keys_first_then_scales() -> None:
    data = torch.arange(2 * 3 * 6, dtype=torch.uint8).view(2, 3, 6)
    keys, scales = index_planes(data)
    assert keys[1].tolist() == [[18, 19], [20, 21], [22, 23]]
    assert scales[1].tolist() == [[24, 25, 26, 27], [28, 29, 30, 31], [32, 33, 34, 35]]


def test_unused_bytes_are_nan_and_table_tails_name_an_unused_block() -> None:
    paged = build_latent_cache(SMALL, weights(), batch(1), "fp8_tensor", page=8)
    free = paged.position < 0
    assert free.any() and (paged.data[free] == 0x7F).all()
    assert (paged.position[paged.table[1].long()] == -1).all()  # the padded request
    with pytest.raises(ValueError, match="outside the cache pages"):
        paged.locate(torch.tensor([-1]))
    with pytest.raises(ValueError, match="block_rows >= page"):
        build_latent_cache(SMALL, weights(), batch(1), "fp8_tensor", page=8, block_rows=7)


def _gathered(paged: PagedBytes, length: int, request: int) -> torch.Tensor:
    return torch.stack([paged.token(request, position) for position in range(length)])


@pytest.mark.parametrize("name", LATENT_FORMATS)
def test_layer_from_bytes_equals_layer_and_ignores_the_block_order(name: str) -> None:
    whole = batch(4)
    result = oracle_layer(SMALL, weights(), whole, cache_format=name)
    row, request = 19, 4
    for seed in (5, 6):
        latent = build_latent_cache(SMALL, weights(), whole, name, page=16, seed=seed)
        index = build_index_cache(SMALL, whole, block_rows=70, seed=seed)
        latent = with_inserted(latent, result.latent_bytes)
        index = with_inserted(index, result.index_bytes)
        key, scale = decode_index(_gathered(index, 150, request))
        dots = (result.index_q8[row] @ key.T).clamp(min=0)
        assert relative_error((result.index_w[row] @ dots) * scale, result.scores[row]) < 1e-12
        rows = _gathered(latent, 150, request)[result.selection[row]]
        keys = decode_latent(SMALL, name, rows, float(weights().k_scale))
        q_scale = float(weights().q_scale) if name == "fp8_tensor" else 1.0
        logits = SMALL.softmax_scale * q_scale * result.query[row] @ keys.T
        out = round_bf16(logits.softmax(1) @ keys[:, : SMALL.kv_lora])
        assert relative_error(out, result.latent[row]) < 1e-12
    with pytest.raises(ValueError, match=r"tokens \[20, 5\] do not fit rows of"):
        with_inserted(latent, torch.zeros(20, 5, dtype=torch.uint8))


@pytest.mark.parametrize("name", LATENT_FORMATS)
def test_single_key_returns_its_value(name: str) -> None:
    one = make_batch(SMALL, [1], 1)
    result = oracle_layer(SMALL, weights(), one, cache_format=name)
    key = decode_latent(SMALL, name, result.latent_bytes, float(weights().k_scale))
    value = round_bf16(key[:, None, : SMALL.kv_lora]).expand_as(result.latent)
    assert relative_error(result.latent, value) < 1e-12
    assert result.selection[0].tolist() == [0] and result.gap[0] == math.inf
    scaled = result.query * (float(weights().q_scale) if name == "fp8_tensor" else 1.0)
    lse = SMALL.softmax_scale * (scaled[0] @ key[0]) / math.log(2)
    torch.testing.assert_close(result.lse_base2[0], lse)


def test_rows_are_independent_of_their_batch_and_of_padding() -> None:
    whole = batch(4)
    result = oracle_layer(SMALL, weights(), whole, cache_format="fp8_tensor")
    assert not result.active[4:9].any() and result.active[9:].all()
    assert (result.out[~result.active] == 0).all() and (result.gated[~result.active] == 0).all()
    assert (result.lse_base2[~result.active] == -math.inf).all()
    alone = Batch(
        q=4,
        lengths=whole.lengths[4:],
        hidden=whole.hidden[16:],
        cached_latent=whole.cached_latent[4:],
        cached_pe=whole.cached_pe[4:],
        cached_index=whole.cached_index[4:],
    )
    single = oracle_layer(SMALL, weights(), alone, cache_format="fp8_tensor")
    assert relative_error(single.out, result.out[16:]) < 1e-12


def test_verify_rows_equal_plain_steps_over_the_same_tokens() -> None:
    """The last of 4 verify rows sees what a plain step sees after the other 3 were inserted."""
    whole = make_batch(SMALL, [20], 4)
    result = oracle_layer(SMALL, weights(), whole, cache_format="fp8_ds_mla")
    assert [scores.numel() for scores in result.scores] == [17, 18, 19, 20]
    shorter = make_batch(SMALL, [17], 1)
    first = replace(
        shorter,
        hidden=whole.hidden[:1],
        cached_latent=whole.cached_latent,
        cached_pe=whole.cached_pe,
        cached_index=whole.cached_index,
    )
    step = oracle_layer(SMALL, weights(), first, cache_format="fp8_ds_mla")
    assert relative_error(step.out[0], result.out[0]) < 1e-12
    assert relative_error(step.scores[0], result.scores[3][:17]) > 0.1  # other row, other query


def test_a_context_shorter_than_q_is_the_same_context_with_fewer_rows() -> None:
    whole = make_batch(SMALL, [3], 4)
    result = oracle_layer(SMALL, weights(), whole, cache_format="fp8_tensor")
    fewer = replace(make_batch(SMALL, [3], 3), hidden=whole.hidden[1:])
    expected = oracle_layer(SMALL, weights(), fewer, cache_format="fp8_tensor")
    assert relative_error(result.out[1:], expected.out) < 1e-12 and not result.out[0].any()
    assert relative_error(torch.cat(result.scores), torch.cat(expected.scores)) < 1e-12


def _layer(**options: object) -> Result:
    return oracle_layer(SMALL, weights(), batch(4), cache_format="fp8_tensor", **options)


def test_sharded_contexts_differ_by_the_rank_rounding_only() -> None:
    plain, sharded = _layer(tp=4), _layer(tp=4, interleave=4)
    assert plain.partials is None and sharded.partials.shape[0] == 4
    assert [s.tolist() for s in plain.selection] == [s.tolist() for s in sharded.selection]
    torch.testing.assert_close(plain.lse_base2, sharded.lse_base2)
    assert 0 < relative_error(sharded.latent, plain.latent) < 2.0**-8
    empty = sharded.partial_lse == -math.inf
    assert empty[:, plain.active].any() and (sharded.partials[empty] == 0).all()
    assert torch.equal(_layer(tp=1, interleave=4).latent, plain.latent)


def test_values_may_be_merged_in_place_of_latents() -> None:
    exact = Rounding(merged=False, value=False)
    named = {"tp": 4, "interleave": 4}
    latents, values = (
        _layer(**named, rounding=exact, sends_values=sends) for sends in (False, True)
    )
    # W_UV is linear: only where it is rounded makes a difference.
    assert relative_error(values.values, latents.values) < 1e-12
    rounded = _layer(**named, sends_values=True)
    assert 0 < relative_error(rounded.values, values.values) < 2.0**-8
    assert torch.equal(rounded.values, round_bf16(rounded.values))
    assert not torch.equal(rounded.values, _layer(**named).values)
    once = _layer(tp=1, interleave=1, sends_values=True)
    assert torch.equal(once.values, _layer(tp=1).values)
    with pytest.raises(ValueError, match="without `interleave` there is none"):
        _layer(tp=4, sends_values=True)


def test_output_over_ranks() -> None:
    one, four = _layer(tp=1), _layer(tp=4)
    assert four.out_partials.shape[0] == 4 and relative_error(four.out, one.out) < 1e-12
    assert torch.equal(round_bf16(four.out_partials.sum(0)), four.out_reduced)
    assert 0 < relative_error(four.out_reduced, four.out) < 2.0**-8
    assert torch.equal(one.out_reduced, round_bf16(one.out))


def test_selection_is_a_sorted_top_k_with_its_gap() -> None:
    result = _layer()
    for row, scores in enumerate(result.scores):
        chosen = result.selection[row]
        assert chosen.numel() == min(SMALL.top_k, scores.numel())
        if scores.numel() > SMALL.top_k:
            ordered = scores.sort(descending=True).values
            assert result.kth[row] == ordered[SMALL.top_k - 1] == scores[chosen].min()
            assert result.gap[row] == result.kth[row] - ordered[SMALL.top_k]
        assert selection_violation(result, row, chosen) == 0.0


def test_ties_go_to_the_lower_id_and_any_tied_list_is_exact() -> None:
    tied = dsa_layer._exact_selection(torch.tensor([1.0, 2.0, 1.0, 1.0]), 2)
    assert tied[0].tolist() == [0, 1] and tied[1:] == (1.0, 0.0)
    many = dsa_layer._exact_selection(torch.ones(5000), 7)
    assert many[0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    scores = [torch.tensor([1.0, 2.0, 1.0, 1.0])]
    result = replace(_layer(), top_k=2, scores=scores, kth=torch.tensor([1.0]))
    assert selection_violation(result, 0, [1, 3]) == 0.0
    assert selection_violation(result, 0, [0, 2]) == 0.5  # leaves out the best key


def test_selection_violation_sees_every_fault() -> None:
    result = _layer()
    row = 16
    order = result.scores[row].argsort(descending=True).tolist()
    best, rest = order[: SMALL.top_k], order[SMALL.top_k :]
    scale = float(result.scores[row].abs().max())
    expected = (float(result.kth[row]) - float(result.scores[row][rest[-1]])) / scale
    swapped = selection_violation(result, row, [*best[:-1], rest[-1]])
    assert swapped == pytest.approx(expected)
    dropped = selection_violation(result, row, [*best[1:], rest[0]])
    assert dropped >= (float(result.scores[row].max()) - float(result.kth[row])) / scale > 0
    for wrong in (best[:-1], [*best[:-1], best[0]], [*best[:-1], 10**6], [*best[:-1], -1]):
        assert selection_violation(result, row, wrong) == math.inf


def test_the_oracle_continues_from_a_given_selection() -> None:
    own = _layer()
    again = _layer(selection=[positions.flip(0) for positions in own.selection])
    assert torch.equal(again.out, own.out)
    single = [[row.numel() - 1] if row.numel() else [] for row in own.scores]
    forced = _layer(selection=single)
    assert forced.selection[19].tolist() == [149] and torch.equal(forced.kth, own.kth)
    key = decode_e4m3(forced.latent_bytes[19]) * float(weights().k_scale)
    value = round_bf16(key[: SMALL.kv_lora]).expand(SMALL.heads_total, -1)
    assert relative_error(forced.latent[19], value) < 1e-12
    with pytest.raises(ValueError, match="selection has 1 rows, the batch has 20"):
        _layer(selection=[[0]])
    with pytest.raises(ValueError, match=r"position outside \[0, 34\)"):
        _layer(selection=[[34], *single[1:]])
    with pytest.raises(ValueError, match="a position twice"):
        _layer(selection=[[1, 1], *single[1:]])


def test_relative_error_of_special_values() -> None:
    one, nan = torch.ones(2), torch.tensor([1.0, math.nan])
    assert relative_error(one, one) == 0.0 and relative_error(2 * one, one) == 1.0
    assert relative_error(nan, one) == relative_error(one, nan) == math.inf
    assert relative_error(0 * one, 0 * one) == 0.0 and relative_error(one, 0 * one) == math.inf
    with pytest.raises(ValueError, match=r"shapes differ: \[1\] and \[2\]"):
        relative_error(torch.ones(1), one)


def test_unknown_cache_format_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown latent cache format 'index_fp8'"):
        oracle_layer(SMALL, weights(), batch(1), cache_format="index_fp8")
