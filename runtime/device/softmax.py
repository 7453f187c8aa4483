"""Softmax weights of a group of keys in fragments, under a running maximum.

A group is two octets of keys whose scores are two C fragments; their weights are one A fragment.
Column 2t + b of an octet belongs to its key t + 4b: rows that eight lanes load together then lie
an odd number of vectors times four apart, in different banks.

Maxima are rounded up to integers, so that what refers to one is moved to another by an exact power
of two. Arrays over sides hold rows g (side 0) and g + 8 (side 1) of the fragments.
"""

from __future__ import annotations

from cutlass import Float32, cute

from . import half, mma, reduce, scalar

OCTET = mma.TILE_N
GROUP = 2 * OCTET
SIDES = 2
_APART = OCTET // 2


def key_of_column(column):
    """Key of an octet whose scores stand in column `column`."""
    return column // 2 + column % 2 * _APART


def lane_keys(group_lane) -> list:
    """Keys of a group in the lane's columns: two of the first octet, two of the second."""
    return [group_lane + first for first in (0, _APART, OCTET, OCTET + _APART)]


def soften(
    scores: list, present, scales: list, top: cute.Tensor, mass: cute.Tensor, group_lane
) -> list:
    """Words of the weights' A fragment: exp2(score * scale - maximum), 0 from key `present` on.

    `scores` holds the octets' C fragments, `scales` a factor a side. Moves the running maxima
    `top` and adds to this lane's share `mass` of the weights' sum, both FP32 (side); the sum is
    taken before the weights are rounded to F16.
    """
    words = [None] * 4
    keys = lane_keys(group_lane)
    for side in range(SIDES):
        raw = [*scores[0][2 * side :][:2], *scores[1][2 * side :][:2]]
        raw = [
            scalar.select(key < present, value, -Float32.inf)
            for key, value in zip(keys, raw, strict=True)
        ]
        largest = cute.arch.fmax(cute.arch.fmax(raw[0], raw[1]), cute.arch.fmax(raw[2], raw[3]))
        largest = reduce.lanes_max(largest, mma.GROUP_LANES)
        moved = cute.arch.fmax(top[side], scalar.ceiling(largest * scales[side]))
        weights = [cute.arch.exp2(cute.math.fma(value, scales[side], -moved)) for value in raw]
        carried = mass[side] * cute.arch.exp2(top[side] - moved)
        mass[side] = carried + ((weights[0] + weights[1]) + (weights[2] + weights[3]))
        top[side] = moved
        words[side] = half.pack(weights[0], weights[1])
        words[side + SIDES] = half.pack(weights[2], weights[3])
    return words


def refer(words: list, maxima: list, top: cute.Tensor) -> list:
    """Weights under the group's `maxima` as weights under `top`, exact but for F16's range."""
    factors = [cute.arch.exp2(maxima[side] - top[side]) for side in range(SIDES)]
    pairs = [half.pack(factor, factor) for factor in factors]
    return [half.multiply(words[place], pairs[place % SIDES]) for place in range(len(words))]


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
