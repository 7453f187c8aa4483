"""Rows of a cache, picked by a list of indices, on their way into a ring of slots."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from . import barrier, bulk, copy_async, memory, reduce, scalar
from .key_groups import KeyGroups
from .slots import Slots
from .softmax import GROUP


@dataclass(frozen=True)
class Gather:
    """`warps` warps that fill slots together, each an equal share of every group's GROUP rows of
    `row_bytes` bytes each, `pitch` bytes apart.

    16 bytes a lane. A row goes in parts of a power of two of vectors, at most one a lane (36
    vectors: 32 and 4); a turn copies the same part of as many rows as there are lanes for. So a
    lane's places in a row do not change from row to row, and a copy's address is one product.
    A lane holds the index of one row of every `batch` of groups, `ahead` batches at a time, so that
    their loads are over when their turn comes; each keeps its register, as a move would wait for
    the load.
    """

    row_bytes: int
    pitch: int
    warps: int
    ahead: int
    bulk: bool = False

    @property
    def share(self) -> int:
        """Rows of a group that a warp copies."""
        return GROUP // self.warps

    @property
    def batch(self) -> int:
        """Groups whose indices the lanes of a warp hold together."""
        return reduce.WARP // self.share

    @property
    def arrivals(self) -> int:
        """Arrivals that make a slot ready."""
        return self.warps * (1 if self.bulk else reduce.WARP)

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
        """Fills warp `warp`'s share of the slots of all groups of CTA `split`.

        `cache`: its rows, u8, one behind the other. `indices`: the list, of which `count` count.
        """
        batches = -(-groups.most(cute.size(indices)) // self.batch)
        held = min(self.ahead, batches)
        index = cute.make_rmem_tensor((held,), Int32)
        first_index = indices[0]
        for turn in cutlass.range_constexpr(held):
            index[turn] = self._index(indices, groups, turn * self.batch, split, warp, lane)
        ours = groups.of(count, split)
        for first in cutlass.range(0, ours, held * self.batch, unroll=1):
            for turn in cutlass.range_constexpr(held):
                begin = first + turn * self.batch
                place = self._place(groups, begin, split, warp, lane)
                # Behind the last key of the list the first is repeated: no other row may be read.
                listed = Int32(scalar.choose(place < count, index[turn], first_index))
                for member in cutlass.range_constexpr(self.batch):
                    order = begin + member
                    if order < ours:
                        if order >= slots.count:
                            slots.wait_free(order)
                        slot = order % slots.count
                        keys = slots.keys[slot, None, None]
                        ready = slots.ready + slot
                        if cutlass.const_expr(self.bulk):
                            self._request_bulk(cache, listed, keys, ready, member, warp, lane)
                        else:
                            self._request(cache, listed, keys, member, warp, lane)
                            copy_async.arrive_when_done(ready)
                if cutlass.const_expr(held < batches):
                    later = begin + held * self.batch
                    index[turn] = self._index(indices, groups, later, split, warp, lane)

    def _place(self, groups: KeyGroups, begin, split, warp, lane):
        """Place in the list of this lane's key of the batch that begins with a group."""
        first = groups.first_key(begin + lane // self.share, split)
        return first + warp * self.share + lane % self.share

    def _index(self, indices: cute.Tensor, groups: KeyGroups, begin, split, warp, lane):
        """Cache row of this lane's key of a batch; past the list's end, any of its entries."""
        last = cute.size(indices) - 1
        return indices[cutlass.min(self._place(groups, begin, split, warp, lane), last)]

    def _request(
        self, cache: cute.Pointer, index, target: cute.Tensor, member: int, warp, lane
    ) -> None:
        """Requests this warp's rows of group `member` of a batch into `target`, u8 (row, byte).

        All lanes call it together; offsets are 64 bits wide.
        """
        for first, vectors in self.parts:
            rows = reduce.WARP // vectors  # of a turn
            byte = first * memory.VECTOR_BYTES + lane % vectors * memory.VECTOR_BYTES
            place = target[warp * self.share + lane // vectors, None].iterator + byte
            source = cache + byte
            for turn in range(-(-self.share // rows)):
                own = turn * rows + lane // vectors
                row = cute.arch.shuffle_sync(index, member * self.share + own % self.share)
                copy_async.copy_bytes(
                    source + Int64(row) * self.row_bytes,
                    place + turn * rows * self.pitch,
                    condition=own < self.share if rows > self.share else None,
                )

    @cute.jit
    def _request_bulk(
        self, cache: cute.Pointer, index, target: cute.Tensor, ready, member: int, warp, lane
    ):
        """The same by the copy engine, a lane a row."""
        row = cute.arch.shuffle_sync(index, member * self.share + lane % self.share)
        if lane == 0:
            barrier.expect(ready, self.share * self.row_bytes)
        cute.arch.sync_warp()
        if lane < self.share:
            bulk.copy_bytes(
                cache + Int64(row) * self.row_bytes,
                target[warp * self.share + lane, None].iterator,
                self.row_bytes,
                ready,
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
