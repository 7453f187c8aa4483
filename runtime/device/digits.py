"""A warp's scores as 16-bit digits in shared memory: read once, counted by bin, listed later.

A digit orders as its score does (`ordered.descending_halves`), two stand in a word, and each lane
looks again only at what it has written itself. Scores of a row are FP32, contiguous, a multiple
of RUN in number.
"""

from __future__ import annotations

import cutlass
from cutlass import Uint32, cute

from kpipe.runtime.device import memory, ordered, reduce, scalar
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
def sorted_out(share: Share, digits: cute.Tensor, base, bin_found):
    """This lane's keys of the run at `base`: a bit for each in a bin before `bin_found`, and for
    each in that bin.

    digits: as `count` has left them. The first key of the lane is the lowest bit.
    """
    ahead = bin_found << (2 * HALF - BIN_BITS)
    limit = (bin_found + Uint32(1)) << (2 * HALF - BIN_BITS)
    place = (share.region + base - share.first) // VECTOR + cute.arch.lane_idx()
    words = memory.vector_at(digits, place, VECTOR // 2).load()
    better, tied = Uint32(0), Uint32(0)
    for pair in cutlass.range_constexpr(VECTOR // 2):
        halves = words[pair]
        for number, upper in enumerate((halves << HALF, halves)):  # what stands below is no matter
            bit = Uint32(1 << 2 * pair + number)
            better = better | scalar.choose(upper < ahead, bit, Uint32(0))
            tied = tied | scalar.choose(upper < limit, bit, Uint32(0))
    return better, tied ^ better
