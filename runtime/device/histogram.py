"""Histograms in shared memory of one CTA, and the search for the n-th smallest digit.

Bins lie in groups of GROUP. Every warp counts into `counts`; `sum_groups` sums up groups. Behind a
barrier one warp finds the bin: sums of groups first, then the bins of one group. `tally` does the
same over a cluster.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint32, cute

from kpipe.runtime.device import memory, reduce

GROUP = reduce.WARP
"""Bins of a group: one a lane."""


@cute.jit
def clear(words: cute.Tensor, threads: cutlass.Constexpr):
    """Zeroes one-dimensional uint32 shared memory; the caller puts a barrier behind it."""
    for place in range(cute.arch.thread_idx()[0], cute.size(words), threads):
        words[place] = Uint32(0)


@cute.jit
def sum_groups(counts: cute.Tensor, groups: cute.Tensor, threads: cutlass.Constexpr):
    """groups (uint32, bins / GROUP) = sums of `counts` (uint32, bins).

    Barriers before and behind are the caller's.
    """
    tid = cute.arch.thread_idx()[0]
    each = cute.size(counts) // threads
    members = GROUP // each  # threads of a group
    mine = memory.vector_at(counts, tid, each).load()
    total = Uint32(0)
    for place in cutlass.range_constexpr(each):
        total = total + mine[place]
    distance = 1
    for _ in cutlass.range_constexpr(members.bit_length() - 1):
        total = total + cute.arch.shuffle_sync_bfly(total, distance)
        distance = 2 * distance
    if tid % members == 0:
        groups[tid // members] = total


@cute.jit
def find_group(sums, wanted) -> tuple:
    """(group, things in groups before it) of the `wanted`-th (uint32, from 1) of all things.

    sums: this lane's groups, uint32, as many a lane, in order; all lanes of a warp call it.
    """
    lane, each = cute.arch.lane_idx(), len(sums)
    mine = Uint32(0)
    for place in cutlass.range_constexpr(each):
        mine = mine + sums[place]
    before = reduce.running_sum(mine) - mine
    group, passed = Uint32(0), Uint32(0)
    for place in cutlass.range_constexpr(each):
        if before < wanted and wanted <= before + sums[place]:
            group, passed = Uint32(lane * each + place), before
        before = before + sums[place]
    # One lane has found it; the others add nothing.
    group = cute.arch.warp_redux_sync(Int32(group), "add")
    passed = Uint32(cute.arch.warp_redux_sync(Int32(passed), "add"))
    return group, passed


@cute.jit
def find(counts: cute.Tensor, groups: cute.Tensor, wanted, found: cute.Tensor):
    """Where the `wanted`-th (uint32, from 1) of all counted things lies; for one whole warp.

    found (uint32, 3) = the bin, how many lie in bins before it, how many in it. The caller puts a
    barrier behind it.
    """
    lane = cute.arch.lane_idx()
    each = cute.size(groups) // reduce.WARP
    sums = memory.vector_at(groups, lane, each).load()
    group, passed = find_group([sums[place] for place in range(each)], wanted)
    count = counts[group * GROUP + lane]
    upto = passed + reduce.running_sum(count)
    if upto - count < wanted and wanted <= upto:
        found[0] = Uint32(group * GROUP + lane)
        found[1] = upto - count
        found[2] = count
