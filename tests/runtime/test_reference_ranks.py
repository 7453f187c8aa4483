"""Reference operations under context parallelism: merge rules, and one layer over virtual ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kpipe.runtime.comm.mailbox import Mailbox, MailboxError, MailboxSpec
from kpipe.runtime.comm.sanitise import EMPTY_ID, EMPTY_LSE
from kpipe.runtime.comm.virtual_ranks import RankComm, SingleRank, VirtualRanks
from kpipe.runtime.formats import PagedCache, cache_format
from kpipe.runtime.reference import projection, query, reduce, select, sparse_core, value
from kpipe.runtime.reference.numerics import Rounds
from kpipe.runtime.sharding import Shard

KV_LORA, PE, V_DIM, HEADS, PAGE = 32, 8, 6, 2, 4
LATENT = cache_format("fp8_tensor", kv_lora=KV_LORA, pe=PE)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
ALL_ONES, NEG_ZERO_PAIR = 0xFFFFFFFF, 0x80000000
BASE = Rounds()
ONE, HALF = torch.ones(1), torch.tensor([0.5])


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Reproducible BF16 normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def merged(outs: list[float], lses: list[float], base: str) -> tuple[float, float]:
    partial = torch.tensor(outs).reshape(-1, 1, 1, 1).to(BF16)
    row, lse = value.merge_ranks(partial, torch.tensor(lses).reshape(-1, 1, 1), base)
    return float(row), float(lse)


@pytest.mark.parametrize(
    ("outs", "sums", "expected"),
    [([1.0, 0.0], [1, 3], 0.25), ([1.0, 2.0, 4.0], [1, 2, 5], 3.125), ([1.0, 0.0], [7, 7], 0.5)],
)
def test_merge_knows_its_base(outs: list[float], sums: list[int], expected: float) -> None:
    for base, log in [("e", math.log), ("2", math.log2)]:
        row, lse = merged(outs, [log(total) for total in sums], base)
        assert math.isclose(row, expected, rel_tol=1e-6)
        assert math.isclose(lse, log(sum(sums)), rel_tol=1e-6)


def test_the_wrong_base_is_visible() -> None:
    assert math.isclose(merged([1.0, 0.0], [0.0, math.log2(3)], "e")[0], 0.170094, abs_tol=1e-6)
    assert math.isclose(merged([1.0, 0.0], [0.0, math.log(3)], "2")[0], 0.318321, abs_tol=1e-6)
    with pytest.raises(ValueError, match="lse_base is '10'; known are 2, e"):
        merged([1.0], [0.0], "10")


@pytest.mark.parametrize("base", ["2", "e"])
@pytest.mark.parametrize("empty", [-math.inf, math.nan, math.inf, -3.0e38])
def test_empty_ranks_weigh_nothing(base: str, empty: float) -> None:
    assert merged([1.0, math.nan], [math.log(8), empty], base)[0] == 1.0
    row, lse = merged([math.nan, math.nan], [empty, empty], base)
    assert (row, lse) == (0.0, -math.inf)


def boxes(comm: RankComm, rows: int, parity: int = 0, width: int = KV_LORA) -> dict[str, Mailbox]:
    """One parity of every mailbox of the layer, one spare row in each; `width` of partial rows."""
    ranks, cap, hidden, top_k = comm.ranks, rows + 1, 8, 6
    shapes = {
        "q_mail": ((cap, ranks * HEADS, KV_LORA + PE), E4M3, ALL_ONES),
        "partial_mail": ((ranks, cap, HEADS, width), BF16, NEG_ZERO_PAIR),
        "lse_mail": ((ranks, cap, HEADS), torch.float32, ALL_ONES),
        "candidates": ((ranks, cap, top_k, 2), torch.int32, ALL_ONES),
        "o_mail": ((ranks, cap, hidden), BF16, NEG_ZERO_PAIR),
        "o_gather": ((cap, hidden), BF16, NEG_ZERO_PAIR),
    }
    return {
        name: comm.mailbox(MailboxSpec(name, shape, dtype, sentinel), parity)
        for name, (shape, dtype, sentinel) in shapes.items()
    }


def armed(box: Mailbox) -> bool:
    words = box.local.contiguous().view(torch.int32)
    return bool((words == box.spec.signed_sentinel).all())


def test_pushed_rows_are_sendable_and_empty_ones_are_zero() -> None:
    box = boxes(SingleRank(), 2)
    mails = box["partial_mail"], box["lse_mail"]
    rows, lse = torch.zeros(2, HEADS, KV_LORA).to(BF16), torch.zeros(2, HEADS)
    rows[0, :, 1::2] = -0.0  # the sentinel in every word
    rows[1], lse[0, 1], lse[1] = math.nan, math.nan, 0.0
    value.push_partials(rows, lse, torch.tensor([3, 0]), *mails)
    sent = [mail.poll((0, slice(0, 2))) for mail in mails]
    assert bool((sent[0].view(torch.int16) == 0).all())
    assert sent[1].tolist() == [[0.0, pytest.approx(EMPTY_LSE)], [pytest.approx(EMPTY_LSE)] * 2]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("two_shot", [False, True])
def test_output_partials_are_summed_alike_everywhere(ranks: int, two_shot: bool) -> None:
    gated = noise(3, ranks, 10)
    weights = noise(8, ranks, 10, seed=1)
    # Row 0 underflows to the pair (+0, -0) in every word: the sentinel, unless it is cleared.
    gated[0, :, :9], gated[0, :, 9] = 0.0, -1e-21
    weights[::2, :, 9], weights[1::2, :, 9] = -1e-20, 1e-20

    def step(comm: RankComm) -> Tensor:
        rank, out = comm.rank, torch.full((3, 8), math.nan).to(BF16)
        for layer in range(3):  # the third needs what the first has re-armed
            box = boxes(comm, 3, layer % 2)
            projection.o_proj(
                gated[:, rank],
                o_mail=box["o_mail"],
                o_proj=weights[:, rank],
                dcp=True,
                two_shot=two_shot,
            )
            reduce.o_reduce(box["o_mail"], out, o_gather=box["o_gather"], two_shot=two_shot)
            assert armed(box["o_mail"])
            assert armed(box["o_gather"])
        return out

    found = VirtualRanks(ranks).run(step)
    parts = torch.einsum("rsk,nsk->srn", gated.float(), weights.float()).to(BF16).float()
    assert torch.allclose(found[0].float(), parts.sum(0), rtol=2**-7, atol=2**-7)
    for out in found:
        assert torch.equal(out.view(torch.int16), found[0].view(torch.int16))


@pytest.mark.parametrize("two_shot", [False, True])
def test_the_sum_is_rounded_and_added_to_the_stream(two_shot: bool) -> None:
    """1 + 2^-8 is a tie of BF16: rounded ahead of the addition it is 1, and -1 + 1 is 0."""

    def step(comm: RankComm) -> Tensor:
        box = boxes(comm, 1)
        parts = torch.tensor([[1.0], [2.0**-8]]).to(BF16).expand(2, 8)
        own = reduce.owned_columns(8, comm.rank, 2)
        for peer in range(2):
            columns = reduce.owned_columns(8, peer, 2) if two_shot else slice(None)
            place = (comm.rank, slice(0, 1), columns)
            box["o_mail"].store(peer, place, parts[comm.rank : comm.rank + 1, columns])
        assert own.stop - own.start == 4
        out, prefix = torch.full((1, 8), math.nan).to(BF16), torch.full((1, 8), -1.0).to(BF16)
        reduce.o_reduce(
            box["o_mail"],
            out,
            o_gather=box["o_gather"],
            prefix=prefix,
            two_shot=two_shot,
            add_prefix=True,
        )
        return out

    for out in VirtualRanks(2).run(step):
        assert out.tolist() == [[0.0] * 8]


def test_two_shot_needs_equal_columns() -> None:
    def step(comm: RankComm) -> None:
        mail = boxes(comm, 3)["o_mail"]
        projection.o_proj(noise(3, 10), o_mail=mail, o_proj=noise(8, 10), dcp=True, two_shot=True)

    with pytest.raises(ValueError, match="8 columns do not divide by 3 ranks"):
        VirtualRanks(3).run(step)


def shared_cache(shard: Shard, context: int) -> tuple[PagedCache, Tensor, Tensor]:
    """This rank's shard of one request: cache (NaN elsewhere), reversed block table, keys."""
    blocks = -(-shard.local_max(context) // PAGE)
    data = torch.full((blocks, PAGE, LATENT.row_bytes), 0x7F, dtype=torch.uint8)
    cache = PagedCache(data, LATENT)
    table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32).unsqueeze(0)
    positions = shard.global_position(torch.arange(shard.local_length(context)))
    slots = torch.full((context,), -1)
    local = shard.local(positions)
    slots[positions] = table[0].long()[local // PAGE] * PAGE + local % PAGE
    keys = noise(context, KV_LORA + PE, seed=2)
    query.insert_latent(cache, slots, keys, torch.ones(KV_LORA), 1 / HALF, 1e-6)
    return cache, table, keys


def merged_ids(comm: RankComm, interleave: int, scores: Tensor, length: int, tie: str) -> Tensor:
    """topk_local and topk_merge of one request; this rank's ids after the merge."""
    shard, rows = Shard(comm.rank, comm.ranks, interleave), scores.shape[0]
    cache, table, _ = shared_cache(shard, scores.shape[1])
    mine = scores[:, shard.global_position(torch.arange(shard.local_length(scores.shape[1])))]
    mail = boxes(comm, rows)["candidates"]
    selected = torch.full((rows, 6), 7777, dtype=torch.int32)
    valid = torch.full((rows,), 7777, dtype=torch.int32)
    lengths = torch.tensor([length])
    select.topk_local(mine, lengths, mail, top_k=6, shard=shard, tie=tie)
    if comm.rank == 0:
        pairs = mail.poll((0, slice(0, rows)))
        count = min(6, shard.local_length(length))
        assert (pairs[-1, :, 1] != EMPTY_ID).tolist() == [True] * count + [False] * (6 - count)
        assert pairs[-1, count:, 0].view(torch.float32).tolist() == [-math.inf] * (6 - count)
    select.topk_merge(mail, lengths, table, cache, selected, valid, top_k=6, shard=shard, tie=tie)
    assert armed(mail)
    used = torch.arange(6) < valid.unsqueeze(1)
    assert bool((selected[~used] == -1).all())
    blocks = table.shape[1] - 1 - selected // PAGE
    return torch.where(used, shard.global_position(blocks * PAGE + selected % PAGE), -1)


@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (4, 1), (2, 16)])
@pytest.mark.parametrize("tie", ["low_id", "high_id"])
@pytest.mark.parametrize("length", [0, 2, 7, 37, 40])
def test_merged_top_k_is_the_global_one(ranks: int, interleave: int, tie: str, length: int) -> None:
    scores = torch.randint(4, (3, 40), generator=torch.Generator().manual_seed(1)).float()
    scores[1, ::3] = math.nan
    found = VirtualRanks(ranks).run(lambda comm: merged_ids(comm, interleave, scores, length, tie))
    sign = 1 if tie == "low_id" else -1
    for row in range(3):
        row_scores = torch.nan_to_num(scores[row], nan=-math.inf).tolist()
        visible = range(max(length - 3 + 1 + row, 0))
        best = sorted(visible, key=lambda at: (-row_scores[at], sign * at))[:6]
        for rank, ids in enumerate(found):
            owned = [token for token in best if token // interleave % ranks == rank]
            assert ids[row].tolist() == owned + [-1] * (6 - len(owned))


def test_owned_keys_are_compacted_with_their_count() -> None:
    scores = torch.zeros(1, 9)
    scores[0, [0, 1, 2, 5, 8, 3]] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.0])
    found = VirtualRanks(2).run(lambda comm: merged_ids(comm, 1, scores, 9, "low_id"))
    assert [ids[0].tolist() for ids in found] == [[0, 2, 8, -1, -1, -1], [1, 5, 3, -1, -1, -1]]


def attention(
    comm: RankComm, interleave: int, length: int, pushes: bool, rounds: Rounds = BASE
) -> Tensor:
    """Gather, core and value over this rank's shard of all visible keys; two rows."""
    shard, ranks = Shard(comm.rank, comm.ranks, interleave), comm.ranks
    cache, table, _ = shared_cache(shard, max(length, 1))
    box, lengths = boxes(comm, 2), torch.tensor([length])
    mine = slice(comm.rank * HEADS, (comm.rank + 1) * HEADS)
    heads = noise(2, 4 * HEADS, KV_LORA + PE, seed=3).to(E4M3)
    for peer in range(ranks):
        box["q_mail"].store(peer, (slice(0, 2), mine), heads[:, mine])
    query.query_wait(box["q_mail"], rows=2)
    width = shard.local_max(max(length, 1))
    selected = torch.full((2, width), -1, dtype=torch.int32)
    counts = [int(shard.local_length(max(length - 1 + row, 0))) for row in range(2)]
    for row, count in enumerate(counts):
        selected[row, :count] = cache.physical_rows(table[0], torch.arange(count)).int()
    valid = torch.tensor(counts, dtype=torch.int32)
    core = {"q_mail": box["q_mail"], "q_scale": ONE, "k_scale": HALF, "softmax_scale": 0.3}
    core |= {"kv_lora": KV_LORA, "dcp": True}
    rows, lse = torch.zeros(2, ranks * HEADS, KV_LORA).to(BF16), torch.zeros(2, ranks * HEADS)
    mails = (box["partial_mail"], box["lse_mail"])
    if pushes:
        sparse_core.sparse_decode(cache, selected, valid, partial=rows, partial_lse=lse, **core)
        rows[valid == 0] = math.nan  # what a core without an empty-row rule may leave behind
        lse[valid == 0] = 0.0
    else:
        sparse_core.sparse_push(cache, selected, valid, *mails, shard=shard, **core)
    gate, out = noise(2, 4 * HEADS * V_DIM, seed=4), torch.full((2, HEADS * V_DIM), math.nan)
    out, columns = out.to(BF16), slice(mine.start * V_DIM, mine.stop * V_DIM)
    gate[:, :] = math.nan if length == 0 else gate
    weight = noise(4 * HEADS, V_DIM, KV_LORA, seed=5)[mine]
    given = (valid, gate[:, columns], lengths, box["q_mail"], *mails, out)
    named = {"partial": rows, "partial_lse": lse} if pushes else {}
    value.dcp_value(*given, w_uv=weight, shard=shard, pushes=pushes, rounds=rounds, **named)
    assert all(armed(box[name]) for name in ("q_mail", "partial_mail", "lse_mail"))
    return out


@pytest.mark.parametrize("length", [0, 1, 2, 3, 9, 40])
@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (4, 1), (4, 16)])
def test_sharded_attention_equals_the_unsharded(ranks: int, interleave: int, length: int) -> None:
    pushed, fused = (
        VirtualRanks(ranks).run(lambda comm, p=pushes: attention(comm, interleave, length, p))
        for pushes in (True, False)
    )
    cache, table, _ = shared_cache(Shard(), max(length, 1))
    heads = noise(2, 4 * HEADS, KV_LORA + PE, seed=3)[:, : ranks * HEADS].to(E4M3).double()
    gate = noise(2, 4 * HEADS * V_DIM, seed=4)[:, : ranks * HEADS * V_DIM].double()
    weight = noise(4 * HEADS, V_DIM, KV_LORA, seed=5)[: ranks * HEADS].double()
    for row, count in enumerate([max(length - 1, 0), length]):
        keys = cache.dequantise(cache.physical_rows(table[0], torch.arange(count)), HALF).double()
        latent = torch.softmax(0.3 * heads[row] @ keys.t(), 1) @ keys[:, :KV_LORA]
        expected = torch.einsum("hl,hvl->hv", latent, weight).flatten() * torch.sigmoid(gate[row])
        found = torch.cat([out[row] for out in pushed]).double()
        assert torch.allclose(found, expected, rtol=0.03, atol=0.03)
        if count == 0:
            assert bool((found == 0).all())
    assert all(torch.equal(a, b) for a, b in zip(pushed, fused, strict=True))


@pytest.mark.parametrize("length", [0, 1, 2, 9, 40])
@pytest.mark.parametrize(("ranks", "lse_base"), [(1, "2"), (2, "2"), (4, "e")])
def test_values_sent_are_merged_as_they_are(ranks: int, lse_base: str, length: int) -> None:
    """W_UV of all heads ahead of the push, each value rounded; the merge weighs and rounds once."""
    noisy = noise(ranks, 2, 4 * HEADS, KV_LORA, seed=11)[:, :, : ranks * HEADS]
    lse = torch.randn(ranks, 2, ranks * HEADS, generator=torch.Generator().manual_seed(12))
    valid = torch.tensor([[(row + rank) % 3 for row in range(2)] for rank in range(ranks)])
    weights = noise(4 * HEADS, V_DIM, KV_LORA, seed=13)[: ranks * HEADS]
    gate = noise(2, ranks * HEADS * V_DIM, seed=14)

    def step(comm: RankComm) -> Tensor:
        box, rank = boxes(comm, 2, width=V_DIM), comm.rank
        mails = [box[name] for name in ("q_mail", "partial_mail", "lse_mail")]
        rows, counts = noisy[rank].clone(), valid[rank].int()
        rows[counts == 0] = math.nan
        columns = slice(rank * HEADS * V_DIM, (rank + 1) * HEADS * V_DIM)
        out = torch.full((2, HEADS * V_DIM), math.nan).to(BF16)
        given = (rows, lse[rank], counts, gate[:, columns], torch.tensor([length]), *mails, out)
        shard = Shard(rank, ranks, 1)
        value.dcp_value_projected(*given, w_uv_all=weights, shard=shard, lse_base=lse_base)
        assert all(armed(mail) for mail in mails)
        return out

    found = torch.cat(VirtualRanks(ranks).run(step), 1).double()
    sent = torch.einsum("srhl,hvl->srhv", noisy.double(), weights.double()).bfloat16().double()
    log = math.log(2.0) if lse_base == "2" else 1.0
    power = torch.where(valid[..., None] > 0, lse.double() * log, -math.inf)
    share = torch.softmax(power, 0).nan_to_num(0.0)[..., None]
    merged = (share * sent).sum(0).bfloat16().double().flatten(1)
    expected = merged * torch.sigmoid(gate.double())
    expected[: 2 - min(length, 2)] = 0.0
    assert torch.allclose(found, expected, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("point", ["merged", "value"])
def test_rounding_points_of_the_merge_are_optional(point: str) -> None:
    outs = [
        VirtualRanks(2).run(lambda comm, r=rounds: attention(comm, 1, 9, True, r))[0]
        for rounds in (BASE, Rounds(**{point: "fp32"}))
    ]
    assert torch.allclose(outs[0].float(), outs[1].float(), rtol=0.02, atol=0.02)
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("polls", [True, False])
def test_published_query_heads_are_those_of_one_rank(polls: bool) -> None:
    packed = noise(3, 12 + KV_LORA + PE, seed=6)
    q_b, w_uk = noise(4 * (PE + 4), 12, seed=7), noise(4, 4, KV_LORA, seed=8)
    shared = {"q_norm": torch.ones(12), "kv_norm": torch.ones(KV_LORA), "q_scale_inv": ONE}
    shared |= {"k_scale_inv": ONE, "rms_eps": 1e-6, "nope": 4, "pe": PE}
    slots = torch.tensor([-1, -1, -1])
    columns = (packed[:, :12], packed[:, 12:], slots)

    def step(comm: RankComm) -> Tensor:
        cache, _, _ = shared_cache(Shard(comm.rank, 2, 1), 4)
        mail, rank = boxes(comm, 3)["q_mail"], comm.rank
        mine = {"q_b": q_b.reshape(2, -1, 12)[rank], "w_uk": w_uk.reshape(2, 2, 4, -1)[rank]}
        named = {**shared, **mine, "q_mail": mail, "dcp": True, "polls": polls}
        query.mla_query(*columns, cache, **named)
        if not polls:
            query.query_wait(mail, rows=3)
        return mail.local[:3].view(torch.uint8).clone()

    found = VirtualRanks(2).run(step)
    cache, _, _ = shared_cache(Shard(), 4)
    whole = torch.zeros(3, 4, KV_LORA + PE).to(E4M3)
    query.mla_query(*columns, cache, query=whole, q_b=q_b, w_uk=w_uk, **shared)
    for gathered in found:
        assert torch.equal(gathered, whole.view(torch.uint8))


def test_the_shard_must_span_the_mailboxes() -> None:
    def step(comm: RankComm) -> None:
        mail = boxes(comm, 1)["candidates"]
        select.topk_local(torch.zeros(1, 4), torch.tensor([1]), mail, top_k=6)

    text = "contexts are sharded over 1 ranks, mailboxes have 2"
    with pytest.raises(ValueError, match=text):
        VirtualRanks(2).run(step)


def test_waiting_for_heads_that_nobody_sends_fails() -> None:
    with pytest.raises(MailboxError, match="q_mail"):
        VirtualRanks(2).run(lambda comm: query.query_wait(boxes(comm, 1)["q_mail"], rows=1))
