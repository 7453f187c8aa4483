"""Histograms in shared memory, summed over a cluster, and the search for the n-th smallest digit.

Bins lie in groups of GROUP. Every CTA counts into `counts`; `share` hands the count of a bin to
the owner of its group (group modulo parts), apart for every part, and the sum of a group to all.
Behind a barrier one warp finds the bin: sums of groups first, then the bins of one group.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint32, cute

from kpipe.runtime.device import cluster, memory, reduce

GROUP = reduce.WARP
"""Bins of a group: one a lane."""


@cute.jit
def clear(words: cute.Tensor, threads: cutlass.Constexpr):
    """Zeroes one-dimensional uint32 shared memory; the caller puts a barrier behind it."""
    for place in range(cute.arch.thread_idx()[0], cute.size(words), threads):
        words[place] = Uint32(0)


@cute.jit
def share(
    counts: cute.Tensor, totals: cute.Tensor, groups: cute.Tensor, part,
    parts: cutlass.Constexpr, threads: cutlass.Constexpr,
):  # fmt: skip
    """Hands this CTA's `counts` (uint32, bins) to the CTAs of its cluster.

    totals (uint32, bins) and groups (uint32, bins / GROUP) are zero everywhere before it. With
    one part nothing goes to `totals`. Barriers before and behind are the caller's.
    """
    tid = cute.arch.thread_idx()[0]
    each = cute.size(counts) // threads
    members = GROUP // each  # threads of a group
    group, member = tid // members, tid % members
    mine = memory.vector_at(counts, tid, each).load()
    total = Uint32(0)
    for place in cutlass.range_constexpr(each):
        total = total + mine[place]
    if cutlass.const_expr(parts > 1):
        slot = (group // parts * parts + part) * GROUP + member * each
        for place in cutlass.range_constexpr(each):
            if mine[place] != Uint32(0):
                cluster.store(totals, slot + place, mine[place], group % parts)
    distance = 1
    for _ in cutlass.range_constexpr(members.bit_length() - 1):
        total = total + cute.arch.shuffle_sync_bfly(total, distance)
        distance = 2 * distance
    if cutlass.const_expr(parts == 1):
        if member == 0:
            groups[group] = total
    else:
        for turn in cutlass.range_constexpr((parts + members - 1) // members):
            peer = member + turn * members
            if peer < parts and total != Uint32(0):
                cluster.add(groups, group, total, peer)


@cute.jit
def find(
    counts: cute.Tensor, totals: cute.Tensor, groups: cute.Tensor, part,
    parts: cutlass.Constexpr, wanted, found: cute.Tensor,
):  # fmt: skip
    """Where the `wanted`-th (uint32, from 1) of all counted things lies; for one whole warp.

    found (uint32, 5) = the bin, how many lie in bins before it, how many in it, how many of
    those belong to lower parts, how many to this part. The caller puts a barrier behind it, and
    keeps `totals` until all parts are past that.
    """
    lane = cute.arch.lane_idx()
    each = cute.size(groups) // reduce.WARP
    sums = memory.vector_at(groups, lane, each).load()
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
    lower, own, count = Uint32(0), Uint32(0), Uint32(0)
    if cutlass.const_expr(parts == 1):
        count = counts[group * GROUP + lane]
        own = count
    else:
        slot = group // parts * parts * GROUP + lane
        each_part = [
            cluster.load(totals, slot + peer * GROUP, group % parts) for peer in range(parts)
        ]
        for peer in cutlass.range_constexpr(parts):
            count = count + each_part[peer]
            if peer < part:
                lower = lower + each_part[peer]
            if peer == part:
                own = each_part[peer]
    upto = passed + reduce.running_sum(count)
    if upto - count < wanted and wanted <= upto:
        found[0] = Uint32(group * GROUP + lane)
        found[1] = upto - count
        found[2] = count
        found[3] = lower
        found[4] = own
