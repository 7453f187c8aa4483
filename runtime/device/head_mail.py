"""Query rows of one head on their way into the same place of every rank's mailbox.

What the lanes of a product hold of a row is narrower than the words that a mailbox is polled by,
so rows are put together in shared memory first, a tile of TILE_M at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from . import mailbox, memory, mma


@dataclass(frozen=True)
class HeadMail:
    """heads: of all ranks. latent: elements of a row, `dtype` each. threads: that send."""

    heads: int
    latent: int
    dtype: type
    threads: int

    @property
    def per_word(self) -> int:
        """Elements of a word."""
        return mailbox.WORD_BYTES * 8 // self.dtype.width

    @property
    def row_bytes(self) -> int:
        """Bytes of a head's row."""
        return self.latent * self.dtype.width // 8

    def allocate(self, shared: SmemAllocator) -> cute.Tensor:
        """A tile of rows in shared memory."""
        return memory.allocate(shared, self.dtype, mma.TILE_M, self.latent)

    def rows(self, tile: cute.Tensor, count) -> cute.Tensor:
        """The first `count` rows of a tile, or all of them."""
        shape = (cutlass.min(count, mma.TILE_M), self.latent)
        return cute.make_tensor(tile.iterator, cute.make_layout(shape, stride=(self.latent, 1)))

    @cute.jit
    def send(
        self, tile: cute.Tensor, count, first_row, head, columns: tuple,
        grain: cutlass.Constexpr, peers: cute.Tensor, thread,
    ):  # fmt: skip
        """Stores columns [columns[0], columns[1]) of a tile's rows into every rank's mailbox.

        tile: its first `count` rows (at most TILE_M) are rows `first_row` on of this rank's head
        `head`. grain: words of a store, 1 or 4, aligned. peers: i64, addresses of this rank's
        heads. A barrier stands between whoever has filled the tile and this.
        """
        words = cute.recast_tensor(tile, Uint32)
        first = columns[0] // self.per_word // grain
        pieces = columns[1] // self.per_word // grain - first
        items = cutlass.min(count, mma.TILE_M) * pieces
        for item in cutlass.range(thread, items, self.threads, unroll=1):
            row, piece = item // pieces, first + item % pieces
            values = memory.vector_at(words[row, None], piece, grain).load()
            sent = [values[place] for place in range(grain)]
            offset = Int64((first_row + row) * self.heads + head) * self.row_bytes
            offset = offset + piece * (grain * mailbox.WORD_BYTES)
            for peer in cutlass.range_constexpr(cute.size(peers)):
                mailbox.store(peers[peer] + offset, sent)

    @cute.jit
    def receive(
        self, box: cute.Tensor, first, step, stage: cutlass.Constexpr,
        fault: cute.Tensor,
    ):  # fmt: skip
        """Returns once every `step`-th fragment from `first` on of all heads of all rows of
        `box`, (row, head, element), has come."""
        fragments = box.shape[0] * (self.heads * self.row_bytes // mailbox.FRAGMENT_BYTES)
        place = box.iterator.toint()
        mailbox.wait(place, fragments, first, step, mailbox.ALL_ONES, stage, fault)
