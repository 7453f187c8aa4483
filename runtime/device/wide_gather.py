"""Selected cache rows on their way into the stages of the wide core.

A gathering warp takes `turns` times eight neighbouring keys of every group of its CTA and holds
them all in registers: the loads of a group are under way while the one before it is used and its
stage becomes free. They are issued behind the fence that follows the stores of a group. Of the
first groups alone the L2 cache is asked for rows ahead of the loads; later that costs more than it
saves.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from . import barrier, reduce, scalar, warpgroup, wide_rows, wide_stages
from .key_groups import KeyGroups
from .wide_stages import Stages

WARP_ROWS = reduce.WARP // wide_rows.LANES
"""Rows that a warp loads or stores at a time."""
AHEAD = 2
"""Groups whose indices a gathering warp holds, behind the one whose rows it holds."""

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

    def ask(self, indices: cute.Tensor, groups: KeyGroups, split, warp, lane) -> list[list]:
        """Loads for `fill`: the list's first row, those of this lane's keys by group and turn.

        `indices`: i32 (key), the list with all its room. Nothing here depends on how many count.
        """
        key = self._key(warp, lane)
        groups_asked = range(1 + AHEAD)
        rows = [self._listed(indices, groups, split, key, order) for order in groups_asked]
        return [[wide_rows.load_index(indices.iterator)], *rows]

    @cute.jit
    def fill(
        self,
        cache: cute.Pointer,
        indices: cute.Tensor,
        asked: list[list],
        count,
        groups: KeyGroups,
        split,
        stages: Stages,
        warp,
        lane,
    ):
        """Fills the stages with this warp's keys of all groups of CTA `split`.

        `count` of the list's `indices` exist; `asked` is what `ask` has returned.
        """
        key = self._key(warp, lane)
        ahead = cute.make_rmem_tensor((AHEAD, self.turns), Uint32)
        for order in cutlass.range_constexpr(AHEAD):
            for turn in cutlass.range_constexpr(self.turns):
                ahead[order, turn] = asked[2 + order][turn]
        first, mine = asked[0][0], groups.of(count, split)
        if mine > 0:
            feeds = [wide_rows.make_feed(self.rows.vectors) for _ in range(self.turns)]
            present = self._present(count, groups, split, key, 0)
            self._load(feeds, cache, asked[1], present, first, lane)
            present = self._present(count, groups, split, key, 1)
            self._request(cache, asked[2], present, first, lane)
            for order in cutlass.range(mine, unroll=1):
                if order >= wide_stages.COUNT:
                    stages.wait_free(order - wide_stages.COUNT, warp)
                for turn in cutlass.range_constexpr(self.turns):
                    self.rows.convert(
                        feeds[turn],
                        stages.keys(order),
                        (warp * self.turns + turn) * WARP_ROWS,
                        lane,
                        stages.scales_of(order),
                    )
                warpgroup.fence_operand()
                barrier.arrive_as_warp(stages.ready + order % wide_stages.COUNT)
                if order + 1 < mine:
                    present = self._present(count, groups, split, key, order + 1)
                    listed = [ahead[0, turn] for turn in range(self.turns)]
                    self._load(feeds, cache, listed, present, first, lane)
                    listed = self._listed(indices, groups, split, key, order + 1 + AHEAD)
                    for turn in cutlass.range_constexpr(self.turns):
                        for place in cutlass.range_constexpr(AHEAD - 1):
                            ahead[place, turn] = ahead[place + 1, turn]
                        ahead[AHEAD - 1, turn] = listed[turn]

    def _key(self, warp, lane):
        """The first of a lane's keys, among those of a group."""
        return warp * (self.turns * WARP_ROWS) + lane // wide_rows.LANES

    def _load(self, feeds: list, cache: cute.Pointer, listed, present, first, lane) -> None:
        """Asks for the rows of this warp's keys of a group."""
        for turn, feed in enumerate(feeds):
            index = self._index(listed[turn], present[turn], first)
            self.rows.fill(feed, cache, index, lane)

    def _request(self, cache: cute.Pointer, listed, present, first, lane) -> None:
        """Asks the L2 cache for them."""
        for turn in range(self.turns):
            index = self._index(listed[turn], present[turn], first)
            row = cache + Int64(index) * self.rows.row_bytes
            wide_rows.request_row(row, self.rows.row_bytes, lane % wide_rows.LANES)

    def _index(self, index, present, first) -> Int32:
        """A cache row; behind the last key of the list, that of the `first` one.

        No row may be read that is not in the list.
        """
        return Int32(scalar.choose(present, index, first))

    def _present(self, count, groups: KeyGroups, split, key, order) -> list:
        """Whether a gathering lane's keys of a group are in the list, by turn."""
        place = groups.first_key(order, split) + key
        return [place + turn * WARP_ROWS < count for turn in range(self.turns)]

    def _listed(self, indices: cute.Tensor, groups: KeyGroups, split, key, order) -> list:
        """Cache rows of a gathering lane's keys of a group, by turn; all room for a list exists.

        They are asked for without waiting for how many of them count.
        """
        last = cute.size(indices) - 1
        place = groups.first_key(order, split) + key
        places = [cutlass.min(place + turn * WARP_ROWS, last) for turn in range(self.turns)]
        return [wide_rows.load_index(indices.iterator + at) for at in places]
