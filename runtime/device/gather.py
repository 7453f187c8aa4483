"""Rows of a cache, picked by a list of indices, on their way into a ring of slots."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from . import barrier, bulk, reduce, scalar
from .key_groups import KeyGroups
from .slots import Slots
from .softmax import GROUP


@dataclass(frozen=True)
class Gather:
    """`warps` warps that fill slots together, each an equal share of every group's GROUP rows of
    `row_bytes` bytes each.

    The copy engine moves a row with one instruction of one lane, and the L2 cache lets go of it
    first. A lane holds the index of one row of every `batch` of groups, `ahead` batches at a time,
    so that their loads are over when their turn comes; each keeps its register, as a move would
    wait for the load.
    """

    row_bytes: int
    warps: int
    ahead: int

    @property
    def share(self) -> int:
        """Rows of a group that a warp copies."""
        return GROUP // self.warps

    @property
    def batch(self) -> int:
        """Groups whose indices the lanes of a warp hold together."""
        return reduce.WARP // self.share

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
                        self._request(cache, listed, slots, order, member, warp, lane)
                if cutlass.const_expr(held < batches):
                    later = begin + held * self.batch
                    index[turn] = self._index(indices, groups, later, split, warp, lane)

    def _place(self, groups: KeyGroups, begin, split, warp, lane):
        """Place in the list of this lane's key of the batch that begins with a group."""
        key = warp * self.share + lane % self.share
        return groups.first_key(begin + lane // self.share, split) + key

    def _index(self, indices: cute.Tensor, groups: KeyGroups, begin, split, warp, lane):
        """Cache row of this lane's key of a batch; past the list's end, any of its entries."""
        last = cute.size(indices) - 1
        return indices[cutlass.min(self._place(groups, begin, split, warp, lane), last)]

    @cute.jit
    def _request(self, cache: cute.Pointer, index, slots: Slots, order, member: int, warp, lane):
        """Requests this warp's rows of a group, the `member`-th of its batch, into its slot.

        All lanes call it together; offsets are 64 bits wide.
        """
        slot = order % slots.count
        ready = slots.ready + slot
        if lane == 0:
            barrier.expect(ready, self.share * self.row_bytes)
        cute.arch.sync_warp()
        if lane // self.share == member:
            source = cache + Int64(index) * self.row_bytes
            target = slots.keys[slot, warp * self.share + lane % self.share, None].iterator
            row = cute.make_layout(self.row_bytes)
            source, target = cute.make_tensor(source, row), cute.make_tensor(target, row)
            bulk.copy_run(source, target, ready, once=True)
