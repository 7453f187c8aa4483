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
    """`warps` warps that fill slots, a whole group of GROUP rows of `row_bytes` bytes each,
    `pitch` bytes apart.

    16 bytes a lane. A row goes in parts of a power of two of vectors, at most one a lane (36
    vectors: 32 and 4); a turn copies the same part of as many rows as there are lanes for. So a
    lane's places in a row do not change from row to row, and a copy's address is one product.
    `ahead`: groups whose indices a warp holds at most, so that their loads are over when their
    turn comes; each keeps its register, as a move would wait for the load.
    """

    row_bytes: int
    pitch: int
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
        turns = -(-groups.most(cute.size(indices)) // self.warps)
        held = min(self.ahead, turns)
        index = cute.make_rmem_tensor((held,), Int32)
        for turn in cutlass.range_constexpr(held):
            index[turn] = self._index(indices, groups, warp + turn * self.warps, split, lane)
        ours = groups.of(count, split)
        for first in cutlass.range(warp, ours, held * self.warps, unroll=1):
            for turn in cutlass.range_constexpr(held):
                order = first + turn * self.warps
                if order < ours:
                    if order >= slots.count:
                        slots.wait_free(order)
                    # Behind the last key of the list this repeats it: no other row may be read.
                    last = cutlass.min(count - groups.first_key(order, split), GROUP) - 1
                    slot = order % slots.count
                    self._request(cache, index[turn], last, slots.keys[slot, None, None], lane)
                    copy_async.arrive_when_done(slots.ready + slot)
                if cutlass.const_expr(held < turns):
                    later = order + held * self.warps
                    index[turn] = self._index(indices, groups, later, split, lane)

    def _index(self, indices: cute.Tensor, groups: KeyGroups, order, split, lane):
        """Cache row of key `lane` of a group; past the list's end, any of its entries."""
        last = cute.size(indices) - 1
        return indices[cutlass.min(groups.first_key(order, split) + lane, last)]

    def _request(self, cache: cute.Pointer, index, last, target: cute.Tensor, lane) -> None:
        """Requests a group's rows into `target`, u8 (row, byte).

        `index` is the cache row of target row `lane`; rows behind `last` repeat that one, so that
        nothing else is read. All lanes call it together; offsets are 64 bits wide.
        """
        index = cute.arch.shuffle_sync(index, cutlass.min(lane, last))
        for first, vectors in self.parts:
            rows = reduce.WARP // vectors  # of a turn
            byte = first * memory.VECTOR_BYTES + lane % vectors * memory.VECTOR_BYTES
            source, place = cache + byte, target[lane // vectors, None].iterator + byte
            for turn in range(GROUP // rows):
                row = cute.arch.shuffle_sync(index, turn * rows + lane // vectors)
                copy_async.copy_bytes(
                    source + Int64(row) * self.row_bytes, place + turn * rows * self.pitch
                )

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(first vector, vectors) of the parts of a row, the widest first."""
        parts, first, vectors = [], 0, self.row_bytes // memory.VECTOR_BYTES
        while first < vectors:
            width = min(1 << (vectors - first).bit_length() - 1, reduce.WARP)
            parts.append((first, width))
            first += width
        return tuple(parts)
