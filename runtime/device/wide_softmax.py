"""Softmax weights of a group of 64 keys in C fragments of a warpgroup, under a running maximum.

Fragment j holds keys 8 j .. 8 j + 7. Maxima are rounded up to integers, so that what refers to one
is moved to another by an exact power of two, and seldom has to be. Arrays over sides hold rows g
(side 0) and g + 8 (side 1) of the fragments.
"""

from __future__ import annotations

from cutlass import Float32, cute

from . import half, mma, operand_blocks, reduce, scalar

GROUP = operand_blocks.ROWS
"""Keys of a group."""
TILES = GROUP // mma.TILE_N
SIDES = 2


def tile_keys(tile: int, group_lane) -> list:
    """Keys of a group in the lane's two columns of a fragment."""
    return [tile * mma.TILE_N + 2 * group_lane + column for column in range(2)]


def of_side(elements: list, side: int) -> list:
    """The elements of one row, in the order of their keys."""
    numbers = range(len(elements))
    return [elements[number] for number in numbers if number % mma.FRAGMENT // 2 == side]


def folded(join, values: list):
    """Neighbours joined until one value is left; as many values as a power of two."""
    while len(values) > 1:
        values = [join(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def soften(
    scores: list, present, scale: Float32, top: cute.Tensor, mass: cute.Tensor, group_lane
) -> list[Float32]:
    """C fragments of the weights: exp2(score * scale - maximum), 0 from key `present` on.

    Moves the running maxima `top` and adds to this lane's share `mass` of the weights' sum, both
    FP32 (side); the sum is taken before the weights are rounded.
    """
    weights = [None] * len(scores)
    keys = [key for tile in range(TILES) for key in tile_keys(tile, group_lane)]
    for side in range(SIDES):
        raw = [
            scalar.select(key < present, value, -Float32.inf)
            for key, value in zip(keys, of_side(scores, side), strict=True)
        ]
        largest = reduce.lanes_max(folded(cute.arch.fmax, raw), mma.GROUP_LANES)
        moved = cute.arch.fmax(top[side], scalar.ceiling(largest * scale))
        mine = [cute.arch.exp2(cute.math.fma(value, scale, -moved)) for value in raw]
        carried = mass[side] * cute.arch.exp2(top[side] - moved)
        mass[side] = carried + folded(lambda a, b: a + b, mine)
        top[side] = moved
        for number, weight in enumerate(mine):
            place = number // 2 * mma.FRAGMENT + 2 * side + number % 2
            weights[place] = weight
    return weights


def store_weights(weights: list, block, row, group_lane) -> None:
    """Stores weights, rounded to F16, into the block at an address: rows `row` and `row` + 8."""
    for tile in range(TILES):
        for side in range(SIDES):
            first = tile * mma.FRAGMENT + 2 * side
            word = half.pack(weights[first], weights[first + 1])
            place = operand_blocks.place(row + side * mma.HALF_M, tile)
            operand_blocks.store_pair(block + place + group_lane * 4, word)
