"""Lists in shared memory that a warp fills in order, and candidates ranked against each other."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint16, Uint32, cute

from kpipe.runtime.device import cluster, memory

TIED = 1 << 15
"""Mark of a listed key that is a candidate; the rest is its place in the queue."""

RANKERS = 8
"""Lanes that count together what is ahead of one candidate."""


class Share(NamedTuple):
    """Neighbouring keys that one warp looks at."""

    keys: cute.Tensor  # scores of the whole row, FP32
    first: Int32  # position of the first
    end: Int32  # position behind the last
    region: Int32  # place of the first in the shared memory of the CTA


@cute.jit
def append(
    members, ties, distance, share: Share, lengths, lists: cute.Tensor, queue: cute.Tensor,
    queued: cute.Tensor,
):  # fmt: skip
    """Appends neighbouring keys to the list of a warp; all 32 lanes call it together.

    members, ties: a flag a key, the lane's first one at `distance` from the share's first. A
    member's entry (uint16, from `share.region` on) is its distance, or, where it ties, TIED and
    its place in the CTA's queue, which gets its position; queued[1] counts those.
    lengths = (entries so far, this lane's ties so far); returns both anew. Places in the list
    follow from lanes, places in the queue from timing.
    """
    listed, tied = lengths
    votes = [Uint32(cute.arch.vote_ballot_sync(member)) for member in members]
    any_vote = votes[0]
    for place in cutlass.range_constexpr(1, len(members)):
        any_vote = any_vote | votes[place]
    if any_vote != Uint32(0):
        lower = Uint32(cute.arch.lanemask_lt())
        target, added = share.region + listed, Int32(0)
        for place in cutlass.range_constexpr(len(members)):
            target = target + Int32(cute.arch.popc(votes[place] & lower))
            added = added + Int32(cute.arch.popc(votes[place]))
        for place in cutlass.range_constexpr(len(members)):
            if members[place]:
                entry = Uint32(distance + place)
                if ties[place]:
                    slot = memory.take_shared(queued, 1)
                    queue[Int32(slot)] = Uint32(share.first + distance + place)
                    entry = slot | Uint32(TIED)
                    tied = tied + 1
                lists[target] = Uint16(entry)
                target = target + 1
        listed = listed + added
    return listed, tied


@cute.jit
def note(listed, tied, taken: cute.Tensor):
    """taken (uint32, one a warp) = the keys of this warp's list that do not tie."""
    tied = cute.arch.warp_redux_sync(tied, "add")
    if cute.arch.lane_idx() == 0:
        taken[cute.arch.warp_idx()] = Uint32(listed - tied)


@cute.jit
def tell(parts: cutlass.Constexpr, part, taken: cute.Tensor, lower: cute.Tensor):
    """Adds the sum of `taken` to lower[0] of all higher parts of the cluster; by one warp."""
    if cute.arch.warp_idx() == 0:
        lane = cute.arch.lane_idx()
        mine = Int32(0)
        if lane < cute.size(taken):
            mine = Int32(taken[lane])
        chosen = Uint32(cute.arch.warp_redux_sync(mine, "add"))
        if lane > part and lane < parts:
            cluster.add(lower, 0, chosen, lane)


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
