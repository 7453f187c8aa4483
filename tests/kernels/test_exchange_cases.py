"""The judges of the kernels on mailboxes: they pass what the definition makes, and nothing else.

What a kernel would do is done by torch here, on the CPU, from the definition; each fault is one
that a kernel could have.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kpipe.runtime.launch_cases import boxes, candidates, exchange, reduce, select, small
from kpipe.runtime.reference.reduce import attn_res
from kpipe.runtime.reference.select import best, score_bits
from kpipe.runtime.sharding import Shard

RANKS, HEADS, KV_LORA, V_DIM, LATENT, HIDDEN, ROWS_CAP = 4, 2, 32, 8, 48, 64, 8
PITCH, GATE = 64, 16


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    for module in (boxes, candidates, exchange, reduce, select, small):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    torch.manual_seed(0)


def specs(*names: str) -> tuple[SimpleNamespace, ...]:
    return tuple(SimpleNamespace(name=name) for name in names)


VALUE = SimpleNamespace(
    RANKS=RANKS,
    HEADS=HEADS,
    GATHERED=RANKS * HEADS,
    KV_LORA=KV_LORA,
    LATENT=LATENT,
    V_DIM=V_DIM,
    PITCH=PITCH,
    GATE_COLUMN=GATE,
    ROWS_CAP=ROWS_CAP,
    QUERY_BYTES=1,
)
REDUCE = SimpleNamespace(
    RANKS=RANKS, HIDDEN=HIDDEN, OWNED=HIDDEN // RANKS, ROWS_CAP=ROWS_CAP, RMS_EPS=1e-6
)
ALONE = {"two_shot": False, "add_prefix": False, "mix_blocks": False, "round_mix": "fp32"}
O_PROJ = SimpleNamespace(
    RANKS=RANKS,
    OUTPUTS=HIDDEN,
    operands=lambda: (
        SimpleNamespace(name="gated", shape=(None, 16)),
        SimpleNamespace(name="o_proj", shape=(HIDDEN, 16)),
        SimpleNamespace(name="o_mail_peers"),
    ),
)


def cleared(values: Tensor) -> Tensor:
    """BF16 without negative zeros."""
    return torch.where(values == 0, 0.0, values)


def rearm(tensor: Tensor, sentinel: int) -> None:
    tensor.copy_(boxes.armed(tuple(tensor.shape), tensor.dtype, sentinel))


def value_kernel(case, live: dict[str, Tensor], pushes: bool, lse_base: str) -> None:
    """dcp_value, by its definition in FP32."""
    rows = live["gated"].shape[0]
    rearm(live["q_mail"], exchange.ALL_ONES)
    if pushes:
        filled = (live["valid"] > 0)[:, None]
        for owner in range(RANKS):
            heads = slice(owner * HEADS, (owner + 1) * HEADS)
            row = torch.where(filled[..., None], cleared(live["partial"][:, heads]), 0.0)
            lse = torch.where(filled, live["partial_lse"][:, heads], exchange.EMPTY_LSE)
            case.boxes.of(live["partial_mail_peers"])[owner][case.rank, :rows] = row
            case.boxes.of(live["lse_mail_peers"])[owner][case.rank, :rows] = lse
    lse = live["lse_mail"]
    base = 2.0 if lse_base == "2" else torch.e
    weight = torch.where(lse > exchange.EMPTY_LSE, base ** (lse - lse.amax(0)), 0.0)
    share = (weight / weight.sum(0)).nan_to_num(0.0)[..., None]
    merged = torch.where(share > 0, share * live["partial_mail"].float(), 0.0).sum(0).bfloat16()
    value = torch.einsum("rhl,hvl->rhv", merged.float(), live["w_uv"].float()).bfloat16()
    gated = (value.float().flatten(1) * torch.sigmoid(live["gate"].float())).bfloat16()
    queries = rows // live["lengths"].shape[0]
    seen = case._visible(live["lengths"], queries) > 0
    live["gated"].copy_(torch.where(seen[:, None], gated, 0.0))
    rearm(live["partial_mail"], exchange.NEGATIVE_ZERO)
    rearm(live["lse_mail"], exchange.ALL_ONES)


def reduce_kernel(
    case,
    live: dict[str, Tensor],
    two_shot: bool,
    add_prefix: bool,
    mix_blocks: bool,
    round_mix: str,
) -> None:
    """o_reduce, by its definition."""
    mail, rows = live["o_mail"].float(), live["out"].shape[0]
    total = mail[0]
    for source in range(1, RANKS):
        total = total + mail[source]
    total = total.bfloat16()
    columns = slice(0, REDUCE.OWNED) if two_shot else slice(None)
    rearm(live["o_mail"][:, :, columns], exchange.NEGATIVE_ZERO)
    prefix = live["prefix"].float() if add_prefix else torch.zeros(())
    stream = (prefix + (live["o_gather"] if two_shot else total).float()).bfloat16()
    if mix_blocks:
        live["new_prefix"].copy_(stream)
        query = live["mix_norm"].float() * live["mix_query"].float()
        stream = attn_res(live["saved"], stream, query, live["out_norm"], 1e-6, round_mix)
    live["out"].copy_(stream)
    if not two_shot:
        return
    for box in case.boxes.of(live["o_gather_peers"]):
        box[:rows, columns] = cleared(total[:, columns])
    rearm(live["o_gather"], exchange.NEGATIVE_ZERO)


def judged(case, kernel: Callable, fault: Callable = lambda live: None, q: int = 1, **flags):
    """What is wrong with what `kernel`, and then `fault`, have made of fresh operands."""
    case.flags = {"rank": 0, **flags}
    given = case.inputs(8, q)
    done = {
        name: tensor.clone(memory_format=torch.preserve_format) if name in case.outputs else tensor
        for name, tensor in given.items()
    }
    kernel(case, done, **{name: flags[name] for name in flags if name != "rank"})
    fault(done)
    return case.check(given, done, q, **{"rank": 0, **flags} if "two_shot" in flags else flags)


@pytest.mark.parametrize("pushes", [True, False])
@pytest.mark.parametrize("lse_base", ["2", "e"])
@pytest.mark.parametrize("q", [1, 4])
def test_a_right_value_passes(pushes, lse_base, q):
    case = exchange.DcpValueCase(VALUE)
    verdict = judged(case, value_kernel, q=q, pushes=pushes, lse_base=lse_base)
    assert not verdict.wrong, verdict.wrong
    assert 0 < verdict.error < verdict.bound


def sent_to_another(case) -> Callable:
    def fault(live: dict[str, Tensor]) -> None:
        other = (case.rank + 1) % RANKS
        case.boxes.of(live["partial_mail_peers"])[2][other, 0, 0, 0] = 1.0

    return fault


def test_a_wrong_value_does_not_pass():
    def word(name: str, value: float) -> Callable:
        def fault(live: dict[str, Tensor]) -> None:
            live[name][(0,) * live[name].dim()] = value

        return fault

    case = exchange.DcpValueCase(VALUE)
    faults = {
        "q_mail: 1 words are not re-armed": word("q_mail", 3),
        "partial_mail: 1 words are not re-armed": word("partial_mail", 2.0),
        "lse_mail: 1 words are not re-armed": word("lse_mail", 0.0),
        "rows at rank 2: 1 words were sent to another's place": sent_to_another(case),
        "gated: error": lambda live: live["gated"].mul_(1.1),
    }
    for text, fault in faults.items():
        verdict = judged(case, value_kernel, fault, pushes=True, lse_base="2")
        assert any(text in wrong for wrong in verdict.wrong), (text, verdict.wrong)
    wrong_base = judged(
        case, lambda c, live, pushes, lse_base: value_kernel(c, live, pushes, "e"),
        pushes=True, lse_base="2",
    )  # fmt: skip
    assert any("gated: error" in wrong for wrong in wrong_base.wrong)


@pytest.mark.parametrize(
    "mixes", [{}, {"mix_blocks": True}, {"mix_blocks": True, "round_mix": "bf16"}]
)
@pytest.mark.parametrize("add_prefix", [True, False])
@pytest.mark.parametrize("two_shot", [True, False])
def test_a_right_sum_passes_and_a_wrong_one_does_not(two_shot, add_prefix, mixes):
    case = reduce.OReduceCase(REDUCE)
    flags = {**ALONE, "two_shot": two_shot, "add_prefix": add_prefix, **mixes}
    verdict = judged(case, reduce_kernel, **flags)
    assert not verdict.wrong, verdict.wrong
    assert (verdict.error > 0) == bool(mixes) and verdict.error <= verdict.bound
    written = ("new_prefix", 7.0) if mixes else ("out", 7.0)
    for name, value in (written, ("out", 7.0), ("o_mail", 1.0)):

        def fault(live: dict[str, Tensor], name=name, value=value) -> None:
            live[name][(0,) * live[name].dim()] = value

        assert judged(case, reduce_kernel, fault, **flags).wrong, name


def test_a_sum_that_is_not_rounded_ahead_of_the_stream_does_not_pass():
    def at_once(case, live: dict[str, Tensor], **flags) -> None:
        mail = live["o_mail"].float()
        total = live["prefix"].float() + mail[0] + mail[1] + mail[2] + mail[3]
        reduce_kernel(case, live, **flags)
        live["out"].copy_(total)

    case = reduce.OReduceCase(REDUCE)
    verdict = judged(case, at_once, **{**ALONE, "add_prefix": True})
    assert any("out" in wrong for wrong in verdict.wrong)


@pytest.mark.parametrize("blocks", [0, 1, 8])
@pytest.mark.parametrize("fault", ["mix_norm", "mix_query", "out_norm", "saved", "eps"])
def test_a_mixture_of_something_else_does_not_pass(fault, blocks):
    def other(case, live: dict[str, Tensor], **flags) -> None:
        eps = 1e-1 if fault == "eps" else 1e-6
        live = {**live, fault: live[fault].flip(0)} if fault != "eps" else live
        reduce_kernel(case, live, **flags)
        query = live["mix_norm"].float() * live["mix_query"].float()
        stream = live["new_prefix"]
        live["out"].copy_(attn_res(live["saved"], stream, query, live["out_norm"], eps, "fp32"))

    case = reduce.OReduceCase(REDUCE)
    case.blocks = blocks
    wrong = judged(case, other, **{**ALONE, "mix_blocks": True}).wrong
    same = fault == "saved" or (blocks == 0 and fault.startswith("mix"))  # order does not matter
    assert any("out" in text for text in wrong) != same, wrong


def test_a_sum_in_another_order_does_not_pass():
    def backwards(case, live: dict[str, Tensor], **flags) -> None:
        live["o_mail"].copy_(live["o_mail"].flip(0).clone())
        reduce_kernel(case, live, **flags)

    case = reduce.OReduceCase(REDUCE)
    verdicts = [judged(case, backwards, **ALONE) for _ in range(20)]
    assert any("out" in wrong for verdict in verdicts for wrong in verdict.wrong)


@pytest.mark.parametrize("two_shot", [True, False])
@pytest.mark.parametrize("clears", [True, False])
def test_partials_without_negative_zeros_pass(two_shot, clears):
    case = exchange.SentOProjCase(O_PROJ)
    given = case.inputs(8, 1)
    partial = (given["gated"].double() @ given["o_proj"].double().T).bfloat16()
    partial[:, 0] = -0.0
    partial = cleared(partial) if clears else partial
    owned = HIDDEN // RANKS
    for peer, box in enumerate(case.boxes.of(given["o_mail_peers"])):
        columns = slice(peer * owned, (peer + 1) * owned) if two_shot else slice(None)
        box[case.rank, :8, columns] = partial[:, columns]
    wrong = case.check(given, given, 1, two_shot=two_shot).wrong
    assert bool(wrong) != clears, wrong


def test_heads_that_are_late_or_lost_do_not_pass():
    shape = (None, RANKS * HEADS, LATENT)
    module = SimpleNamespace(operands=lambda: (SimpleNamespace(dtype="u8", shape=shape),))
    case = exchange.QueryWaitCase(module)
    live = case.inputs(4, 1)
    words = live["q_mail"].view(torch.int32)
    assert case.check(live, live, 1).wrong
    words.copy_(case.arriving)
    assert not case.check(live, live, 1).wrong
    words[1, 2, 3] += 1
    assert case.check(live, live, 1).wrong


CANDIDATES = SimpleNamespace(
    RANKS=RANKS, TOP_K=16, CONTEXT=1024, PAGE=64, ROW_BYTES=48, ROWS_CAP=12
)


def pairs_of(given: dict[str, Tensor], row: int, count: int, shard: Shard, tie: str) -> Tensor:
    """The candidates of one row of a rank, by the reference's order."""
    bits = score_bits(given["scores"][row, :count])
    ids = shard.global_position(torch.arange(count))
    kept = best(bits, ids, CANDIDATES.TOP_K, tie).sort().values
    pairs = torch.empty(CANDIDATES.TOP_K, 2, dtype=torch.int32)
    pairs[:, 0], pairs[:, 1] = candidates.MINUS_INFINITY, candidates.EMPTY_ID
    pairs[: kept.numel()] = torch.stack([bits[kept], ids[kept].int()], 1)
    return pairs


@pytest.mark.parametrize("tie", ["low_id", "high_id"])
@pytest.mark.parametrize("q", [1, 4])
def test_right_candidates_pass_and_wrong_ones_do_not(tie, q):
    case = candidates.TopkLocalCase(CANDIDATES)
    case.flags = {"rank": 1}
    given = case.inputs(12, q)
    for row, count in enumerate(case._seen(given["lengths"], q)):
        pairs = pairs_of(given, row, count, Shard(1, RANKS), tie)
        for box in case.boxes.of(given["candidates_peers"]):
            box[case.place, row] = pairs
    assert not case.check(given, given, q, tie, 1).wrong
    case.boxes.of(given["candidates_peers"])[3][case.place, 2, 5, 1] += 1
    assert case.check(given, given, q, tie, 1).wrong


@pytest.mark.parametrize("tie", ["low_id", "high_id"])
def test_a_right_merge_passes_and_a_wrong_one_does_not(tie):
    case = candidates.TopkMergeCase(CANDIDATES)
    case.flags = {"rank": 2}
    given = case.inputs(12, 1)
    done = {name: given[name].clone() for name in case.outputs}
    shard, block_rows = Shard(2, RANKS), 3 * CANDIDATES.PAGE
    for row in range(12):
        bits, ids = given["candidates"][:, row].reshape(-1, 2).unbind(1)
        bits, ids = bits[ids >= 0], ids[ids >= 0]
        chosen = ids[best(bits, ids, CANDIDATES.TOP_K, tie)].long()
        mine = shard.local(chosen[shard.owner(chosen) == 2]).sort().values
        block = given["block_table"][row][mine // CANDIDATES.PAGE]
        done["selected"][row] = -1
        done["selected"][row, : mine.numel()] = block * block_rows + mine % CANDIDATES.PAGE
        done["valid"][row] = mine.numel()
    assert case.check(given, done, 1, tie, 2).wrong  # not re-armed
    done["candidates"].fill_(-1)
    assert not case.check(given, done, 1, tie, 2).wrong
    other = "low_id" if tie == "high_id" else "high_id"
    assert case.check(given, done, 1, other, 2).wrong, "no tie at the last place"
