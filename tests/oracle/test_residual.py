"""The residual stream and AttnRes of the oracle, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kpipe.runtime.oracle.compare import Bound
from kpipe.runtime.oracle.residual import (
    MixWeights,
    attn_res,
    mix_shares,
    residual_stream,
    stream_bound,
)


def weights(query: list[float]) -> MixWeights:
    """The norm weighs 2, so `query` counts half of it; the output norm weighs 3."""
    ones = torch.ones(len(query))
    return MixWeights(2 * ones, torch.tensor(query) / 2, 3 * ones)


def test_the_sum_is_rounded_once() -> None:
    stream = residual_stream(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0**-8, 3 * 2.0**-8]]))
    assert stream.tolist() == [[1.0, 1.0 + 2.0**-6]]  # two ties, to the even neighbour


def test_shares_are_a_softmax_of_normed_dots() -> None:
    saved, stream = torch.tensor([[[5.0, 0.0]]]), torch.tensor([[0.0, 0.1]])
    shares = mix_shares(saved, stream, weights([math.log(3.0) / math.sqrt(2.0), 0.0]), 0.0)[:, 0]
    assert shares.tolist() == pytest.approx([0.75, 0.25])  # logits ln 3 and 0, whatever the sizes


def test_the_mixture_is_normed_behind_its_rounding() -> None:
    saved, stream = torch.tensor([[[1.0, 1.0]]]), torch.tensor([[1.0 + 2.0**-7, 1.0]])
    plain = attn_res(saved, stream, weights([0.0, 0.0]), 0.0)[0]
    mean = (1 + 2.0**-8, 1.0)
    scale = 3.0 / math.sqrt((mean[0] ** 2 + mean[1] ** 2) / 2)
    assert plain.tolist() == pytest.approx([scale * mean[0], scale * mean[1]], rel=1e-12)
    assert attn_res(saved, stream, weights([0.0, 0.0]), 0.0, True)[0].tolist() == [3.0, 3.0]


def test_without_blocks_the_stream_is_normed_alone() -> None:
    nothing = torch.zeros(0, 1, 2)
    out = attn_res(nothing, torch.tensor([[3.0, -3.0]]), weights([1.0, 2.0]), 0.0)
    assert out.tolist() == [[3.0, -3.0]]


def test_only_what_was_added_may_be_off() -> None:
    limit = stream_bound(Bound(0.02, ""), torch.tensor([3.0]), torch.tensor([30.0]))
    assert limit == pytest.approx(0.002 + 2.0**-9)
