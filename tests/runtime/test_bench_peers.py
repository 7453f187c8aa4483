"""What is made up for a rank that is timed alone: which words come, and what they are worth."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kpipe.runtime.bench_peers import alone, bring, candidates_of, random_words
from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.comm.mailbox import MailboxSpec
from kpipe.runtime.comm.sanitise import EMPTY_ID
from kpipe.runtime.sharding import Shard

ALL_ONES, NEGATIVE_ZERO = 0xFFFFFFFF, 0x80000000
SPECS = (
    MailboxSpec("q", (5, 12, 8), torch.float8_e4m3fn, ALL_ONES, source_axis=1, source_stride=4),
    MailboxSpec("lse", (3, 5, 4), torch.float32, ALL_ONES, source_axis=0),
    MailboxSpec("o", (3, 5, 24), torch.bfloat16, NEGATIVE_ZERO, source_axis=0),
    MailboxSpec("sums", (5, 24), torch.bfloat16, NEGATIVE_ZERO, source_axis=1, source_stride=8),
)


def pairs(*rows: list[tuple[float, int]]) -> Tensor:
    """Candidates [rows, top_k, 2] i32 of scores and ids."""
    scores = torch.tensor([[score for score, _ in row] for row in rows])
    ids = torch.tensor([[number for _, number in row] for row in rows], dtype=torch.int32)
    return torch.stack([scores.view(torch.int32), ids], dim=-1)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_peers_words_come_and_rank_0s_where_they_are_asked_for(
    spec: MailboxSpec, own: bool
) -> None:
    """In the first four of five rows; nothing is touched behind them."""
    words = random_words(spec, torch.Generator().manual_seed(0))
    assert words.shape == spec.word_shape and not (words == spec.signed_sentinel).any()
    box = SimpleNamespace(name=spec.name, spec=spec, local=torch.full_like(words, 7))
    bring({spec.name: words}, [box], 4, own)
    come, behind = box.local.split([4, 1], dim=spec.rows_axis)
    assert (behind == 7).all()
    for rank, said in enumerate(come.chunk(3, dim=spec.source_axis)):
        said = said.contiguous()
        armed = said == spec.signed_sentinel
        assert armed.all() if rank == 0 and not own else not armed.any()
        values = said.view(spec.dtype).float()
        assert armed.any() or (values.isfinite().all() and len(values.unique()) > 8)


def test_a_rank_alone_keeps_the_others_in_halves() -> None:
    group = DeviceRanks(2, "cpu")
    assert not alone(group).in_halves and group.rank(1).in_halves


def test_peers_sums_are_small_and_their_queries_are_not() -> None:
    drawn = {
        spec.name: random_words(spec, torch.Generator().manual_seed(0)).view(spec.dtype).float()
        for spec in SPECS
    }
    assert all(drawn[name][1:].abs().max() < 0.1 for name in ("o", "lse"))
    assert drawn["sums"][:, 8:].abs().max() < 0.1
    assert 20 < drawn["q"][:, 4:].std() < 80


def test_candidates_that_have_not_been_made_say_nothing() -> None:
    spec = MailboxSpec("c", (2, 3, 4, 2), torch.int32, ALL_ONES, source_axis=0)
    words = random_words(spec, torch.Generator().manual_seed(0))
    assert (words[..., 1] == EMPTY_ID).all() and not (words == -1).any()


def test_a_peer_has_the_same_keys_of_its_own_share_with_scores_in_between() -> None:
    sent = pairs([(3.0, 0), (5.0, 3), (4.0, 6), (-torch.inf, EMPTY_ID)])
    shard, visible = Shard(0, 3, 1), torch.tensor([8])
    found = candidates_of(1, sent, shard, visible)
    third = 1 / 3
    scores = found[..., 0].contiguous().view(torch.float32)
    assert scores[0].tolist() == pytest.approx([3.0, 5 - third, 4 - third, -torch.inf])
    assert found[0, :, 1].tolist() == [1, 4, 7, EMPTY_ID]
    # Of eight keys the third rank holds 2 and 5; 8 is none.
    found = candidates_of(2, sent, shard, visible)
    assert found[0, :, 1].tolist() == [2, 5, EMPTY_ID, EMPTY_ID]
    assert found[0, 2, 0].view(torch.float32).item() == -torch.inf


def test_runs_of_keys_stay_together() -> None:
    sent = pairs([(3.0, 1), (2.0, 130)])
    found = candidates_of(1, sent, Shard(0, 2, 64), torch.tensor([400]))
    assert found[0, :, 1].tolist() == [65, 194]


def test_every_rank_has_its_share_of_the_best() -> None:
    """Whatever the scores are: of 4 x 64 candidates the best 64 are 16 of each rank."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(64, generator=generator).exp() - 2
    sent = pairs([(float(score), 4 * place) for place, score in enumerate(scores)])
    shard, visible = Shard(0, 4, 1), torch.tensor([256])
    found = [sent[0], *(candidates_of(rank, sent, shard, visible)[0] for rank in (1, 2, 3))]
    together = torch.cat(found)
    values = together[:, 0].contiguous().view(torch.float32)
    assert len(values.unique()) >= 4 * 64 - 3  # the lowest of all is the same on all ranks
    assert sorted(together[:, 1].tolist()) == list(range(256))
    best = together[values.argsort(descending=True)[:64], 1] % 4
    assert best.bincount().tolist() == [16, 16, 16, 16]
