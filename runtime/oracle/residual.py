"""The residual stream behind the o-projection and AttnRes, in float64 at the rounding points."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .compare import Bound
from .number_formats import round_bf16

_ROUNDING = 2.0**-9


@dataclass(frozen=True)
class MixWeights:
    """Weights of one layer's AttnRes: mix_norm, mix_query, out_norm [hidden] BF16."""

    mix_norm: torch.Tensor
    mix_query: torch.Tensor
    out_norm: torch.Tensor


def make_mix_weights(hidden: int, seed: int) -> MixWeights:
    """Random weights under which the blocks get shares of very different sizes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(std: float, mean: float) -> torch.Tensor:
        return torch.empty(hidden).normal_(mean, std, generator=generator).bfloat16()

    return MixWeights(normal(0.1, 1.0), normal(2 * hidden**-0.5, 0.0), normal(0.1, 1.0))


def residual_stream(prefix: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
    """BF16(prefix + reduced) in float64; both [rows, hidden], `reduced` rounded already."""
    return round_bf16(prefix.double() + reduced.double())


def stream_bound(bound: Bound, reduced: torch.Tensor, stream: torch.Tensor) -> Bound:
    """The relative error bound of a stream, of which the sum `reduced` may be off by `bound`."""
    size = float(stream.double().norm())
    share = float(reduced.double().norm()) / size if size else 0.0
    reason = "the bound of `out` for the part that was added, and one BF16 rounding"
    return Bound(bound * share + _ROUNDING, reason)


def mix_shares(
    saved: torch.Tensor, stream: torch.Tensor, weights: MixWeights, eps: float
) -> torch.Tensor:
    """Shares [blocks + 1, rows] of saved [blocks, rows, hidden] and stream [rows, hidden].

    The softmax, over a row's vectors, of their RMS-normed dots with a learned query; `eps` is added
    to every mean square.
    """
    vectors = _vectors(saved, stream)
    normed = vectors / (vectors.square().mean(-1, keepdim=True) + eps).sqrt()
    return (normed @ (weights.mix_query.double() * weights.mix_norm.double())).softmax(0)


def attn_res(
    saved: torch.Tensor,
    stream: torch.Tensor,
    weights: MixWeights,
    eps: float,
    round_mix: bool = False,
) -> torch.Tensor:
    """AttnRes of saved [blocks, rows, hidden] and stream [rows, hidden], unrounded float64.

    A row's vectors, mixed by their shares and, with `round_mix`, rounded to BF16; then their RMS
    norm.
    """
    shares = mix_shares(saved, stream, weights, eps)
    mix = (shares[..., None] * _vectors(saved, stream)).sum(0)
    mix = round_bf16(mix) if round_mix else mix
    return mix / (mix.square().mean(-1, keepdim=True) + eps).sqrt() * weights.out_norm.double()


def _vectors(saved: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """The vectors of every row [blocks + 1, rows, hidden], the stream last."""
    return torch.cat([saved.double(), stream[None].double()])
