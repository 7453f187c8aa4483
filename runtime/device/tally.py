"""Histograms of a cluster: where the n-th smallest of all counted digits lies, in two messages.

Bins lie in groups of GROUP. Every CTA counts into `counts` of its own and sends the sums of its
groups to all, itself among them; each finds the group. Then it sends its bins of that group, and
each finds the bin. Messages complete on the receiver's barriers (see `inbox`), which count bytes:
no barrier of the cluster is needed, and nobody reads what a peer may still change. A second
histogram may follow at once: its sums come from a peer that has received all bins of the first
one, and so behind every look at them; its bins likewise.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Uint32, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import barrier, inbox, memory, reduce
from kpipe.runtime.device.histogram import GROUP, find_group

_EACH = memory.VECTOR_BYTES // 4
_LANES = GROUP // _EACH  # that sum up a group
_FOUND = 5
_IN_FLIGHT = 4  # loads of a lane


class Tally(NamedTuple):
    """Shared memory of a CTA for the histograms of its cluster; uint32 but for the barriers."""

    counts: cute.Tensor  # this CTA's bins
    own: cute.Tensor  # sums of this CTA's groups
    sums: cute.Tensor  # of groups, from every part
    bins: cute.Tensor  # of the group found, from every part
    found: cute.Tensor  # bin, how many before it, in it, of lower parts in it, of this part in it
    received: cute.Pointer  # barriers of `sums` and `bins`


def allocate(shared: SmemAllocator, bins: int, parts: int) -> Tally:
    """Room for histograms of `bins` bins, 128 at least, over `parts` CTAs."""
    return Tally(
        counts=memory.allocate(shared, Uint32, bins),
        own=memory.allocate(shared, Uint32, bins // GROUP),
        sums=memory.allocate(shared, Uint32, parts * bins // GROUP),
        bins=memory.allocate(shared, Uint32, parts * GROUP),
        found=memory.allocate(shared, Uint32, _FOUND),
        received=barrier.allocate(shared, 2),
    )


@cute.jit
def clear(tally: Tally, threads: cutlass.Constexpr):
    """Zeroes the bins; the caller puts a barrier of the CTA behind it."""
    for place in range(cute.arch.thread_idx()[0], cute.size(tally.counts) // _EACH, threads):
        memory.vector_at(tally.counts, place, _EACH).fill(Uint32(0))


def open_inboxes(tally: Tally) -> None:
    """Barriers for the first histogram; by one thread, `cluster.start` or `sync` follows."""
    barrier.make_ready(tally.received, 2, 1)
    barrier.fence_ready()
    expect(tally)


def expect(tally: Tally) -> None:
    """Announces the bytes of one histogram, by one thread that has seen those of the last."""
    barrier.expect(tally.received, cute.size(tally.sums) * 4)
    barrier.expect(tally.received + 1, cute.size(tally.bins) * 4)


@cute.jit
def send_sums(tally: Tally, part, parts: cutlass.Constexpr, threads: cutlass.Constexpr):
    """Sends this CTA's sums of groups to every part; by all warps, behind a barrier of the CTA.

    A warp sends all of them at once: neighbouring words to one CTA cost little more than one.
    """
    lane, warp, warps = cute.arch.lane_idx(), cute.arch.warp_idx(), threads // reduce.WARP
    step, groups = reduce.WARP * _EACH, cute.size(tally.own)
    for base in range(warp * step, cute.size(tally.counts), warps * step):
        bins = memory.vector_at(tally.counts, base // _EACH + lane, _EACH).load()
        total = bins[0] + bins[1] + bins[2] + bins[3]
        distance = 1
        for _ in cutlass.range_constexpr(_LANES.bit_length() - 1):
            total = total + cute.arch.shuffle_sync_bfly(total, distance)
            distance = 2 * distance
        if lane % _LANES == 0:
            tally.own[base // GROUP + lane // _LANES] = total
    cute.arch.sync_threads()
    vectors = groups // _EACH
    for number in range(warp * reduce.WARP + lane, parts * vectors, threads):
        peer, place = number // vectors, number % vectors
        loaded = memory.vector_at(tally.own, place, _EACH).load()
        sums = [loaded[number] for number in range(_EACH)]
        inbox.send_words(sums, tally.sums, part * vectors + place, tally.received, peer)


@cute.jit
def find(tally: Tally, parity, part, parts: cutlass.Constexpr, wanted):
    """tally.found = where the `wanted`-th (uint32, from 1) of all counted things lies.

    By one whole warp; `parity` is that of the number of histograms before. The caller puts a
    barrier of the CTA behind it.
    """
    lane, groups = cute.arch.lane_idx(), cute.size(tally.counts) // GROUP
    barrier.wait_for_peers(tally.received, parity)
    each = groups // reduce.WARP
    sums = [Uint32(0)] * each
    for peer in cutlass.range(parts, unroll=min(parts, _IN_FLIGHT)):
        loaded = memory.vector_at(tally.sums, peer * reduce.WARP + lane, each).load()
        sums = [total + loaded[place] for place, total in enumerate(sums)]
    group, passed = find_group(sums, wanted)
    _send_bins(tally, group, part, parts)
    barrier.wait_for_peers(tally.received + 1, parity)
    lower, own, count = Uint32(0), Uint32(0), Uint32(0)
    for peer in cutlass.range(parts, unroll=min(parts, _IN_FLIGHT)):
        bins = tally.bins[peer * GROUP + lane]
        count = count + bins
        if peer < part:
            lower = lower + bins
        if peer == part:
            own = bins
    upto = passed + reduce.running_sum(count)
    if upto - count < wanted and wanted <= upto:
        tally.found[0] = Uint32(group * GROUP + lane)
        tally.found[1] = upto - count
        tally.found[2] = count
        tally.found[3] = lower
        tally.found[4] = own


@cute.jit
def _send_bins(tally: Tally, group, part, parts: cutlass.Constexpr):
    """Sends this CTA's bins of a group to every part, _LANES lanes a part; by one warp."""
    lane, at_once = cute.arch.lane_idx(), reduce.WARP // _LANES
    place = lane % _LANES
    loaded = memory.vector_at(tally.counts, group * _LANES + place, _EACH).load()
    bins = [loaded[number] for number in range(_EACH)]
    for base in cutlass.range_constexpr(0, parts, at_once):
        peer = base + lane // _LANES
        if peer < parts:
            inbox.send_words(bins, tally.bins, part * _LANES + place, tally.received + 1, peer)
