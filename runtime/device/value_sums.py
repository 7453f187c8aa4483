"""Weighted sums of E4M3 columns of rows in shared memory: weights are A, values are B.

A transposed 8 x 8 matrix of 16-bit elements delivers two neighbouring columns of two keys in a
word; its bytes are put in pairs of keys. So a window of 16 columns makes two C fragments, of its
even and of its odd columns, and a lane holds four neighbouring columns of it (a quad).
"""

from __future__ import annotations

import cutlass
from cutlass import Uint32, cute

from . import half, ldmatrix, mma, softmax
from .split_sums import QUAD, WINDOW, SplitSums

_PAIR = 2  # windows that one load of four matrices covers


def load_columns(keys: cute.Tensor, first_column, windows: int, lane) -> list:
    """Pairs of `windows` (an even number) windows of a group's keys, u8 (key, byte), in F16.

    Returns [fragment][window] -> B of the even and of the odd columns, each a pair of every octet
    of that weights' fragment. Lane 8m + i points to column i of octet m % 2, one window on where
    m >= 2.
    """
    matrix, matrix_row = lane // ldmatrix.MATRIX_ROWS, lane % ldmatrix.MATRIX_ROWS
    key = matrix % 2 * softmax.OCTET + softmax.key_of_column(matrix_row)
    column = first_column + matrix // 2 * WINDOW
    fragments = []
    for first_key in range(0, softmax.GROUP, 2 * softmax.OCTET):
        row = keys[first_key + key, None].iterator
        words = []
        for pair in range(windows // _PAIR):
            loaded = ldmatrix.load_transposed(row + (column + pair * _PAIR * WINDOW))
            words += [loaded[:2], loaded[2:]]
        fragments.append([_columns(octets) for octets in words])
    return fragments


def _columns(octets: list[Uint32]) -> list[tuple[Uint32, Uint32]]:
    """B of a window's even and of its odd columns, from a word of each of two octets."""
    settled = ([half.settled(pair) for pair in half.widen_interleaved(word)] for word in octets)
    return list(zip(*settled, strict=True))


def add_products(total: cute.Tensor, weights: list, windows: list) -> None:
    """total += weights . values over one fragment's keys; `total` is FP32 (tile, element).

    Tiles 2w and 2w + 1 are the even and the odd columns of window w, `windows` as loaded.
    """
    for window, columns in enumerate(windows):
        for odd, pairs in enumerate(columns):
            tile = 2 * window + odd
            before = [total[tile, place] for place in range(4)]
            after = mma.mma_step_f16(weights, pairs, before)
            for place in range(4):
                total[tile, place] = after[place]


def quad(total: cute.Tensor, window: int, side: int) -> list:
    """This lane's QUAD neighbouring columns of a window, of row g + 8 * side."""
    return [total[2 * window + place % 2, 2 * side + place // 2] for place in range(QUAD)]


@cute.jit
def send(total: cute.Tensor, sums: SplitSums, rank, warp, lane):
    """Sends the sums of CTA `rank`'s warp `warp`, whose windows follow those of warp - 1."""
    group, group_lane = mma.fragment_place(lane)
    windows = total.shape[0] // 2
    for window in cutlass.range_constexpr(windows):
        for side in cutlass.range_constexpr(softmax.SIDES):
            head = group + side * mma.HALF_M
            if head < sums.heads:
                values = quad(total, window, side)
                sums.send_quad(values, rank, warp * windows + window, head, group_lane)
