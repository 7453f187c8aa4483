"""Rows of a cache, picked by a list of indices, on their way into a ring of slots."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from . import copy_async, memory, reduce
from .key_groups import KeyGroups
from .slots import Slots
from .softmax import GROUP


@dataclass(frozen=True)
class Gather:
    """`warps` warps that fill slots, a whole group of GROUP rows of `row_bytes` bytes each.

    16 bytes a lane: lane l copies vectors l, l + 32, ... of a group's rows laid end to end, a
    whole number of turns. `ahead`: groups whose indices a warp holds, so that their loads are
    over when their turn comes.
    """

    row_bytes: int
    warps: int
    ahead: int

    @cute.jit
    def fill(
        self,
        cache: cute.Pointer,
        indices: cute.Tensor,
        count,
        groups: KeyGroups,
        split,
        slots: Slots,
        warp,
        lane,
    ):
        """Fills the slots of groups warp, warp + warps, ... of CTA `split`.

        `cache`: its rows, u8, one behind the other. `indices`: the list, of which `count` count.
        """
        ahead = cute.make_rmem_tensor((self.ahead,), Int32)
        for turn in cutlass.range_constexpr(self.ahead):
            ahead[turn] = self._index(indices, groups, warp + turn * self.warps, split, lane)
        for order in cutlass.range(warp, groups.of(count, split), self.warps, unroll=1):
            index = ahead[0]
            for place in cutlass.range_constexpr(self.ahead - 1):
                ahead[place] = ahead[place + 1]
            later = order + self.ahead * self.warps
            ahead[self.ahead - 1] = self._index(indices, groups, later, split, lane)
            if order >= slots.count:
                slots.wait_free(order)
            # Behind the last key of the list this repeats it: no other row may be read.
            last = cutlass.min(count - groups.first_key(order, split), GROUP) - 1
            slot = order % slots.count
            self._request(cache, index, last, slots.keys[slot, None, None], lane)
            copy_async.arrive_when_done(slots.ready + slot)

    def _index(self, indices: cute.Tensor, groups: KeyGroups, order, split, lane):
        """Cache row of key `lane` of a group; past the list's end, any of its entries."""
        last = cute.size(indices) - 1
        return indices[cutlass.min(groups.first_key(order, split) + lane, last)]

    def _request(self, cache: cute.Pointer, index, last, target: cute.Tensor, lane) -> None:
        """Requests a group's rows into `target`, u8 (row, byte).

        `index` is the cache row of target row `lane`; rows behind `last` repeat that one, so that
        nothing else is read. All lanes call it together; offsets are 64 bits wide.
        """
        row_vectors = self.row_bytes // memory.VECTOR_BYTES
        turns = GROUP * row_vectors // reduce.WARP
        vectors = [turn * reduce.WARP + lane for turn in range(turns)]
        rows = [
            cute.arch.shuffle_sync(index, cutlass.min(vector // row_vectors, last))
            for vector in vectors
        ]
        for vector, row in zip(vectors, rows, strict=True):
            byte = vector % row_vectors * memory.VECTOR_BYTES
            copy_async.copy_bytes(
                cache + (Int64(row) * self.row_bytes + byte),
                target[vector // row_vectors, None].iterator + byte,
            )
