"""A warp's scores as 16-bit digits in shared memory: read once, counted by bin, listed later.

A digit orders as its score does (`ordered.descending_halves`), two stand in a word, and each lane
looks again only at what it has written itself. Scores of a row are FP32, contiguous, a multiple
of RUN in number.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint32, cute

from kpipe.runtime.device import memory, ordered, reduce, scalar, short_list
from kpipe.runtime.device.short_list import Share

VECTOR = memory.VECTOR_BYTES // 4
"""Scores of one load."""

UNROLL = 4
"""Loads of a lane that are in flight together."""

RUN = reduce.WARP * VECTOR
"""Neighbouring scores that a warp takes at once."""

HALF = 16  # bits of a digit
BIN_BITS = 12
BINS = 2**BIN_BITS
"""Bins of the upper BIN_BITS bits of a digit."""


def run(keys: cute.Tensor, base) -> list:
    """This lane's scores of the run at `base`; runs never pass the end of a row."""
    words = memory.vector_at(keys, base // VECTOR + cute.arch.lane_idx(), VECTOR).load()
    return [words[place] for place in range(VECTOR)]


@cute.jit
def count(share: Share, digits: cute.Tensor, counts: cute.Tensor):
    """Reads the scores of a share, keeps their digits and counts them by bin.

    digits: uint32, two digits a word. counts: uint32, BINS. What does not exist is counted in
    the last bin, which holds no score.
    """
    lane, first, end = cute.arch.lane_idx(), share.first, share.end
    bins = Uint32(counts.iterator.toint())
    final = (end - 1) // RUN * RUN
    for base in range(first, end, UNROLL * RUN):
        loaded = [run(share.keys, cutlass.min(base + n * RUN, final)) for n in range(UNROLL)]
        for number in cutlass.range_constexpr(UNROLL):
            start = base + number * RUN
            left = end - start - lane * VECTOR  # keys of this lane that exist
            if start < end:
                for pair in cutlass.range_constexpr(VECTOR // 2):
                    low, high = loaded[number][2 * pair], loaded[number][2 * pair + 1]
                    halves = ordered.descending_halves(low, high)
                    missing = scalar.choose(left > 2 * pair, Uint32(0), Uint32(0xFFFF))
                    halves = halves | missing
                    missing = scalar.choose(left > 2 * pair + 1, Uint32(0), Uint32(0xFFFF0000))
                    halves = halves | missing
                    place = (share.region + start - first + lane * VECTOR) // 2 + pair
                    digits[place] = halves
                    for shift in (HALF - BIN_BITS, 2 * HALF - BIN_BITS):
                        offset = (halves >> (shift - 2)) & Uint32(4 * BINS - 4)  # in bytes
                        memory.add_shared_at(bins, offset, Uint32(1))


@cute.jit
def shortlist(
    bin_found, share: Share, digits: cute.Tensor, lists: cute.Tensor, queue: cute.Tensor,
    queued: cute.Tensor,
):  # fmt: skip
    """Lists the keys of a share in bins up to `bin_found`; those in that bin tie.

    `lists` is the memory of `digits` as uint16; the rest as in `short_list.append`.
    Returns the length of the list, and how many of this lane's keys tie.
    """
    lane, listed, tied = cute.arch.lane_idx(), Int32(0), Int32(0)
    ahead = bin_found << (2 * HALF - BIN_BITS)
    limit = (bin_found + Uint32(1)) << (2 * HALF - BIN_BITS)
    for base in range(share.first, share.end, RUN):
        distance = base - share.first + lane * VECTOR
        members, ties = [], []
        for pair in cutlass.range_constexpr(VECTOR // 2):
            halves = digits[(share.region + distance) // 2 + pair]
            for upper in (halves << HALF, halves):  # what stands below does not matter
                members.append(upper < limit)
                ties.append(upper >= ahead)
        cute.arch.sync_warp()  # the list overwrites digits that have been read
        listed, tied = short_list.append(
            members, ties, distance, share, (listed, tied), lists, queue, queued
        )
    return listed, tied
