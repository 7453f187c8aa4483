"""How far a kernel may be from the oracle: error measures, selection check, declared bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .result import Result


class Bound(float):
    """A relative error bound that says where it comes from."""

    reason: str

    def __new__(cls, limit: float, reason: str) -> Bound:
        """A float equal to `limit` that carries its reason."""
        bound = super().__new__(cls, limit)
        bound.reason = reason
        return bound


_FLIP = 2.0**-9  # half a BF16 step: the largest relative change by one rounding
_BOUNDS = (
    ("projected", 1, "one BF16 rounding after the packed projection"),
    ("q_c", 1, "one BF16 rounding after the norm, on top of a rare flip of q_a"),
    ("new_latent", 1, "one BF16 rounding after the kv norm, on top of a rare flip of kv_a"),
    ("query_bf16", 2, "BF16 after Q_B and BF16 after absorb; flips of q_c average out"),
    ("query_e4m3", 12, "as query_bf16, then E4M3: a flip moves a value by up to 2^-3"),
    ("latent_bytes", 4, "E4M3 flips where kv norm lands next to a tie: rare, 2^-3 each"),
    ("index_q", 1.5, "BF16 after the index GEMM, flips of q_c average out"),
    ("index_q8", 12, "flips of index_q, then E4M3: a flip moves a value by up to 2^-3"),
    ("index_w", 2, "wv is one BF16 rounding; the scale is a power of two and may flip an element"),
    ("index_bytes", 4, "LayerNorm in FP32, then E4M3 flips of 2^-3; no BF16 in between"),
    ("scores", 12, "flips of index_q8 and keys, FP32 sum; relative to the row's largest score"),
    ("selection", 24, "two scores, each off by `scores`, may swap at the k-th place"),
    ("latent", 8, "one BF16 rounding after softmax; query flips move logits by their own error"),
    ("merged", 9, "rank-local rows BF16, merged row BF16, on top of latent"),
    ("gated", 10, "BF16 after W_UV and BF16 after the gate, on top of latent"),
    ("out", 10, "partials BF16 per rank, sum BF16 once; errors of heads average out"),
    ("latent_e4m3_p", 24, "latent or merged with probabilities cast to E4M3 (2^-4 each) first"),
    ("gated_e4m3_p", 26, "gated, with E4M3 probabilities in the core"),
    ("out_e4m3_p", 26, "out, with E4M3 probabilities in the core"),
)


def declared_bounds() -> dict[str, Bound]:
    """Relative error bound per stage of the whole layer, in norm over the active rows.

    A stage's bound includes what the stages in front of it may have let through, provided that
    the oracle continued with the kernel's own selection. LSE is compared absolutely: an error of
    `latent` in the logits is at most that much in base-2 LSE times the logit range.
    """
    return {name: Bound(steps * _FLIP, reason) for name, steps, reason in _BOUNDS}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """norm(actual - expected) / norm(expected); inf if either has a NaN or infinity.

    Against an all-zero expectation: 0 if actual is zero too, else inf. Raises ValueError when the
    shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {list(actual.shape)} and {list(expected.shape)}")
    actual, expected = actual.double(), expected.double()
    if not (actual.isfinite().all() and expected.isfinite().all()):
        return math.inf
    error, size = float((actual - expected).norm()), float(expected.norm())
    if size == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / size


def checked_positions(chosen: Iterable[int] | torch.Tensor, visible: int) -> torch.Tensor:
    """Ascending int64 positions. Raises ValueError on a repeat or a key the row cannot see."""
    if not isinstance(chosen, torch.Tensor):
        chosen = torch.tensor([int(position) for position in chosen], dtype=torch.int64)
    positions = chosen.long().flatten().sort().values
    if positions.numel() and (positions[0] < 0 or positions[-1] >= visible):
        raise ValueError(f"selection holds a position outside [0, {visible})")
    if (positions.diff() == 0).any():
        raise ValueError("selection holds a position twice")
    return positions


def selection_violation(result: Result, row: int, chosen: Iterable[int] | torch.Tensor) -> float:
    """How much worse a selection is than an exact top-k, relative to the row's largest |score|.

    The larger of: how far the worst chosen score lies below the oracle's k-th score, and how far
    the best score left out lies above it (a list that drops the best key for the (k+1)-th passes
    the first test alone). 0 for an exact top-k with any tie rule; inf if the list has the wrong
    length, repeats a position, or names a key that the row does not see.
    """
    scores = result.scores[row]
    try:
        positions = checked_positions(chosen, scores.numel())
    except ValueError:
        return math.inf
    if positions.numel() != result.selection_size(row):
        return math.inf
    if positions.numel() == scores.numel():
        return 0.0
    left_out = torch.ones_like(scores, dtype=torch.bool)
    left_out[positions] = False
    kth = float(result.kth[row])
    below = kth - float(scores[positions].min())
    above = float(scores[left_out].max()) - kth
    worst = max(below, above, 0.0)
    return worst / float(scores.abs().max()) if worst else 0.0


def tie_violations(keys: torch.Tensor, chosen: torch.Tensor, *, low_id: bool = True) -> int:
    """How many positions break the tie rule: chosen though an equal key that comes first was not.

    `keys` uint8 [visible, bytes], the bytes of the keys that a row sees: equal bytes have equal
    scores, whatever the arithmetic. `chosen` int64 [n], positions below `visible`; the lower of
    equal ids comes first with `low_id`, else the higher.
    """
    taken = torch.zeros(keys.shape[0], dtype=torch.bool)
    taken[chosen] = True
    _, group = torch.unique(keys, dim=0, return_inverse=True)
    if not low_id:
        taken, group = taken.flip(0), group.flip(0)
    order = group.argsort(stable=True)  # groups side by side, each in the order of preference
    taken, group = taken[order], group[order]
    late = taken[1:] & ~taken[:-1] & (group[1:] == group[:-1])
    return int(late.sum())
