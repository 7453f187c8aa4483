"""Sharded contexts: owner, place and visible counts, against a deal token by token."""

from __future__ import annotations

import pytest
import torch

from kpipe.runtime.reference.rows import local_counts
from kpipe.runtime.sharding import Shard


def dealt(length: int, ranks: int, interleave: int) -> list[list[int]]:
    """Tokens of every rank, dealt one run after the other."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    rank, run = 0, 0
    for token in range(length):
        if run == interleave:
            rank, run = (rank + 1) % ranks, 0
        hands[rank].append(token)
        run += 1
    return hands


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("interleave", [1, 16, 64])
def test_every_token_has_one_place(ranks: int, interleave: int) -> None:
    length = 3 * ranks * interleave + 2
    for rank, tokens in enumerate(dealt(length, ranks, interleave)):
        shard = Shard(rank, ranks, interleave)
        for place, token in enumerate(tokens):
            assert shard.owner(token) == rank
            assert shard.local(token) == place
            assert shard.global_position(place) == token
        assert Shard(0, ranks, interleave).local_length(length, rank) == len(tokens)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("interleave", [1, 16, 64])
def test_lengths_sum_up_and_tensors_agree_with_ints(ranks: int, interleave: int) -> None:
    longest = 3 * ranks * interleave + 2
    lengths = torch.arange(longest + 1)
    total = torch.zeros_like(lengths)
    for rank, tokens in enumerate(dealt(longest, ranks, interleave)):
        shard = Shard(rank, ranks, interleave)
        local = shard.local_length(lengths)
        counted = [sum(token < length for token in tokens) for length in (0, 1, longest // 2)]
        assert [int(local[length]) for length in (0, 1, longest // 2)] == counted
        assert local.tolist() == [shard.local_length(int(length)) for length in lengths]
        assert shard.owner(lengths).tolist() == [shard.owner(int(t)) for t in lengths]
        assert shard.local(lengths).tolist() == [shard.local(int(t)) for t in lengths]
        assert int(local.max()) <= shard.local_max(longest)
        total += local
    assert torch.equal(total, lengths)


# Ranks, interleave, global length, rows of the request, visible counts per rank.
CASES = [
    (2, 1, 6, 4, [[2, 2, 3, 3], [1, 2, 2, 3]]),
    (2, 1, 10, 3, [[4, 5, 5], [4, 4, 5]]),
    (2, 64, 130, 4, [[64, 64, 65, 66], [63, 64, 64, 64]]),
    (4, 1, 3, 1, [[1], [1], [1], [0]]),
    (2, 64, 64, 1, [[64], [0]]),
    (4, 64, 300, 1, [[108], [64], [64], [64]]),
    (3, 16, 100, 1, [[36], [32], [32]]),
    (2, 1, 2, 2, [[1, 1], [0, 1]]),
    (1, 1, 10, 3, [[8, 9, 10]]),
]


@pytest.mark.parametrize(("ranks", "interleave", "length", "queries", "counts"), CASES)
def test_visible_counts_per_rank(
    ranks: int, interleave: int, length: int, queries: int, counts: list[list[int]]
) -> None:
    for rank in range(ranks):
        shard = Shard(rank, ranks, interleave)
        seen = local_counts(torch.tensor([length]), queries, shard)
        assert seen.tolist() == counts[rank]


def test_next_length_follows_from_the_global_one() -> None:
    # Context 3 and one of two verify rows accepted: rank 1 holds 2 of 4 tokens, as it did of 5.
    shard = Shard(1, 2, 1)
    assert [shard.local_length(length) for length in (3, 4, 5)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("interleave", "context", "bound"),
    [(1, 1, 64), (1, 128, 64), (1, 129, 128), (64, 257, 192), (128, 128, 128), (48, 100, 192)],
)
def test_local_max_is_whole_granules(interleave: int, context: int, bound: int) -> None:
    assert Shard(0, 2, interleave).local_max(context) == bound
    assert max(len(hand) for hand in dealt(context, 2, interleave)) <= bound


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2, 2, 1), "rank 2 is outside 0..1"),
        ((0, 0, 1), "shard over 0 ranks"),
        ((0, 2, 0), "interleave 0 must be at least 1"),
    ],
)
def test_impossible_shards_are_refused(arguments: tuple[int, int, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Shard(*arguments)
