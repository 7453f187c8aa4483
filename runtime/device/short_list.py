"""Few candidates in shared memory, ranked against each other."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

RANKERS = 8
"""Lanes that count together what is ahead of one candidate."""


class Share(NamedTuple):
    """Neighbouring keys that one warp looks at."""

    keys: cute.Tensor  # scores of the whole row, FP32
    first: Int32  # position of the first
    end: Int32  # position behind the last
    region: Int32  # place of the first in the shared memory of the CTA


@cute.jit
def count_ahead(candidates: cute.Tensor, number, count):
    """The candidate of `number`, and how many of all `count` (uint64, no two equal) are smaller.

    RANKERS neighbouring lanes have the same number and the same result; all 32 call it together.
    """
    mine = candidates[cutlass.min(number, count - 1)]
    ahead = Int32(0)
    helper = cute.arch.lane_idx() % RANKERS
    for other in cutlass.range(helper, count, RANKERS, unroll=4):
        ahead = ahead + Int32(candidates[other] < mine)
    distance = 1
    for _ in cutlass.range_constexpr(RANKERS.bit_length() - 1):
        ahead = ahead + cute.arch.shuffle_sync_bfly(ahead, distance)
        distance = 2 * distance
    return mine, ahead
