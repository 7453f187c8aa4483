"""Softmax weights of a group of keys in fragments, under a running maximum.

A group is OCTETS octets of keys whose scores are C fragments; the weights of two octets are one A
fragment. Column 2t + b of an octet belongs to its key t + 4b: rows that eight lanes load together
then lie an odd number of vectors times four apart, in different banks.

Maxima are rounded up to integers, so that what refers to one is moved to another by an exact power
of two. Arrays over sides hold rows g (side 0) and g + 8 (side 1) of the fragments.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from . import half, mma, reduce, scalar

OCTET = mma.TILE_N
OCTETS = 4
GROUP = OCTETS * OCTET
FRAGMENTS = OCTETS // 2
SIDES = 2
SLACK = 8.0
"""A weight may be as large as two to this, as long as its maximum need not move for others."""
LOWEST = -3.0e38
"""Maximum of no scores: finite, so that it may be taken from itself."""
_APART = OCTET // 2


def key_of_column(column):
    """Key of an octet whose scores stand in column `column`."""
    return column // 2 + column % 2 * _APART


def lane_keys(group_lane, first: int = 0, octets: int = OCTETS) -> list:
    """Keys of a group in the lane's columns, two of every octet from octet `first` on."""
    places = [octet * OCTET + side for octet in range(octets) for side in (0, _APART)]
    return [group_lane + first * OCTET + place for place in places]


@cute.jit
def soften(scores: list, present: list, scales: list, top: cute.Tensor, mass: cute.Tensor):
    """The A fragment of the weights of two octets: exp2(score * scale - maximum), or 0.

    `scores` holds the octets' C fragments, `present` whether the lane's keys exist, two an octet,
    `scales` a factor a side. The maxima `top` move only where a weight would pass 2^SLACK, so that
    the lanes of a row seldom have to agree on a new one. Adds to this lane's share `mass` of the
    weights' sum, like `top` FP32 (side); the sum is taken before the weights are rounded to F16.
    """
    raw, largest = [], []
    for side in cutlass.range_constexpr(SIDES):
        values = [octet[2 * side + column] for octet in scores for column in range(2)]
        values = [
            scalar.select(here, value, -Float32.inf)
            for here, value in zip(present, values, strict=True)
        ]
        raw.append(values)
        largest.append(_folded(cute.arch.fmax, values) * scales[side])
    higher = (largest[0] > top[0] + SLACK) | (largest[1] > top[1] + SLACK)
    if cute.arch.vote_any_sync(higher):
        for side in cutlass.range_constexpr(SIDES):
            agreed = reduce.lanes_max(largest[side], mma.GROUP_LANES)
            moved = cute.arch.fmax(top[side], scalar.ceiling(agreed))
            mass[side] = mass[side] * cute.arch.exp2(top[side] - moved)
            top[side] = moved
    words = [None] * (SIDES * len(scores))
    for side in cutlass.range_constexpr(SIDES):
        weights = [cute.arch.exp2(cute.math.fma(v, scales[side], -top[side])) for v in raw[side]]
        mass[side] = mass[side] + _folded(lambda a, b: a + b, weights)
        for octet in cutlass.range_constexpr(len(scores)):
            words[SIDES * octet + side] = half.pack(weights[2 * octet], weights[2 * octet + 1])
    return words


def _folded(join, values: list):
    """Neighbours joined until one value is left; as many values as a power of two."""
    while len(values) > 1:
        values = [join(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def refer(fragments: list, maxima: list, top: cute.Tensor) -> list:
    """Weights under their fragments' `maxima` (fragment, side) as weights under `top`, exact but
    for F16's range."""
    referred = []
    for words, sides in zip(fragments, maxima, strict=True):
        factors = [cute.arch.exp2(sides[side] - top[side]) for side in range(SIDES)]
        pairs = [half.pack(factor, factor) for factor in factors]
        referred.append(
            [half.multiply(word, pairs[place % SIDES]) for place, word in enumerate(words)]
        )
    return referred


def move(total: cute.Tensor, top: cute.Tensor, moved: list) -> None:
    """Refers sums to the maxima `moved` instead of `top`, which becomes the same.

    `total` is FP32 (tile, element of its C fragment).
    """
    for side in range(SIDES):
        factor = cute.arch.exp2(top[side] - moved[side])
        # Before the first key both are -inf.
        factor = scalar.select(top[side] == moved[side], Float32(1.0), factor)
        top[side] = moved[side]
        for tile in range(total.shape[0]):
            for place in (2 * side, 2 * side + 1):
                total[tile, place] = total[tile, place] * factor
