"""Selected cache rows on their way into the stages of the wide core.

Four lanes share a row. A gathering warp takes `turns` times eight neighbouring keys of every group
of its CTA: the loads of a turn are under way while the one before it is converted, and rows of
later turns are on their way to the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from . import barrier, reduce, warpgroup, wide_rows, wide_stages
from .key_groups import KeyGroups
from .wide_stages import Stages

WARP_ROWS = reduce.WARP // wide_rows.LANES
"""Rows that a warp loads or stores at a time."""
AHEAD = 4
"""Turns whose indices a gathering warp holds."""

Rows = wide_rows.WideFp8TensorRows | wide_rows.WideFp8DsMlaRows


@dataclass(frozen=True)
class WideGather:
    """`warps` warps that gather rows of one format."""

    rows: Rows
    warps: int

    @property
    def turns(self) -> int:
        """Turns of a warp for a group."""
        return wide_stages.GROUP // (self.warps * WARP_ROWS)

    @cute.jit
    def fill(
        self,
        cache: cute.Pointer,
        indices: cute.Tensor,
        count,
        groups: KeyGroups,
        split,
        stages: Stages,
        warp,
        lane,
    ):
        """Fills the stages with this warp's keys of all groups of CTA `split`.

        `indices`: i32 (key), the cache rows of the list; `count` of them exist.
        """
        mine = groups.of(count, split)
        if mine > 0:
            row_lane = lane % wide_rows.LANES
            key = warp * (self.turns * WARP_ROWS) + lane // wide_rows.LANES
            offsets = self.rows.offsets(row_lane)
            feed = wide_rows.make_feed(offsets)
            first = self._row(cache, self._index(indices, count, groups, split, key, 0))
            wide_rows.fill(feed, offsets, first)
            ahead = cute.make_rmem_tensor((AHEAD,), Int32)
            for turn in cutlass.range_constexpr(AHEAD):
                ahead[turn] = self._index(indices, count, groups, split, key, 1 + turn)
            for turn in cutlass.range_constexpr(AHEAD - 1):
                wide_rows.request_row(self._row(cache, ahead[turn]), self.rows.row_bytes, row_lane)
            for order in cutlass.range(mine, unroll=1):
                for part in cutlass.range_constexpr(self.turns):
                    following = self._row(cache, ahead[0])
                    for place in cutlass.range_constexpr(AHEAD - 1):
                        ahead[place] = ahead[place + 1]
                    asked = self._row(cache, ahead[AHEAD - 2])
                    wide_rows.request_row(asked, self.rows.row_bytes, row_lane)
                    turn = order * self.turns + part + 1 + AHEAD
                    ahead[AHEAD - 1] = self._index(indices, count, groups, split, key, turn)
                    if part == 0 and order >= wide_stages.COUNT:
                        stages.wait_free(order - wide_stages.COUNT)
                    self.rows.convert(
                        wide_rows.replaced(feed, self.rows.offsets(row_lane), following),
                        stages.keys(order),
                        key + part * WARP_ROWS,
                        row_lane,
                        stages.scales_of(order),
                    )
                warpgroup.fence_operand()
                barrier.arrive_as_warp(stages.ready + order % wide_stages.COUNT)

    def _row(self, cache: cute.Pointer, index):
        """Where a cache row begins."""
        return cache + Int64(index) * self.rows.row_bytes

    def _index(self, indices: cute.Tensor, count, groups: KeyGroups, split, key, turn):
        """Cache row of a gathering lane's turn: key `key` and on of group turn // turns.

        Behind the last key of the list this repeats it: no other row may be read.
        """
        first = groups.first_key(turn // self.turns, split) + turn % self.turns * WARP_ROWS
        return indices[cutlass.min(first + key, count - 1)]
