"""The four lanes that hold a row of a fragment, and what they hand to each other."""

from __future__ import annotations

from cutlass import Uint32, cute

from . import mma, scalar


def transposed(words: list[Uint32], group_lane) -> list[Uint32]:
    """Word `group_lane` of every lane of the quad, in the order of the lanes.

    So a lane that held two columns of each of four C fragments, packed, holds eight neighbouring
    columns of one of them. All lanes of the warp call it together.
    """
    words = list(words)
    for distance in (1, 2):
        upper = group_lane % (2 * distance) >= distance
        for first in range(mma.GROUP_LANES):
            if first & distance:
                continue
            second = first + distance
            given = scalar.choose(upper, words[first], words[second])
            taken = Uint32(cute.arch.shuffle_sync_bfly(given, distance))
            words[first] = scalar.choose(upper, taken, words[first])
            words[second] = scalar.choose(upper, words[second], taken)
    return words
