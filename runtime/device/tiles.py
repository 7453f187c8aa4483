"""Tiles of a BF16 matrix in shared memory, as the tensor cores read them.

One instruction of one thread has the copy engine bring a whole tile and report its bytes to a
barrier; what must not pass by the engine is copied word by word to the same places (`word_place`).
A tile lies in blocks of BLOCK columns, within a block row after row: 128 bytes, the widest row
whose eight 16-byte words the engine can swizzle. Word w of row r stands at place w ^ (r % 8).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, cute
from cutlass.cute.nvgpu import cpasync

from . import memory

BLOCK = 64
"""Columns of a block."""
ALIGN = 1024
"""Alignment of a tile in shared memory, in bytes."""
ROWS = 8
"""Rows after which the swizzle repeats; those of a tile are a multiple."""

_ROW_WORDS = 8
_SWIZZLE = (3, 4, 3)  # 3 bits of the 16-byte word are mixed with 3 bits of the 128-byte row
_BF16_BYTES = 2


@dataclass(frozen=True)
class TileShape:
    """Rows (a multiple of ROWS) and columns (a multiple of BLOCK) of a tile."""

    rows: int
    columns: int

    @property
    def bytes(self) -> int:
        """Bytes of a tile."""
        return self.rows * self.columns * _BF16_BYTES

    def map_of(self, matrix: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """How the engine finds tiles of a row-major matrix; made at the launch.

        The columns divide those of the matrix. Rows past its last one arrive as zeros.
        """
        rows, columns = matrix.shape
        layout = cute.make_layout(
            (rows, BLOCK, columns // BLOCK), stride=(matrix.stride[0], 1, BLOCK)
        )
        blocks = cute.make_tensor(matrix.iterator, layout)
        how = cpasync.CopyBulkTensorTileG2SOp()
        found = cpasync.make_tiled_tma_atom(how, blocks, self._layout(), self._layout().shape)
        return found.atom, found.tma_tensor

    def shared(self, base: cute.Pointer, count: int) -> cute.Tensor:
        """Shared memory for `count` tiles, BF16 [element, tile]; `base` is aligned to ALIGN."""
        size = self.rows * self.columns
        layout = cute.make_layout((size, count), stride=(1, size))
        return cute.make_tensor(cute.recast_ptr(base, dtype=BFloat16), layout)

    @cute.jit
    def copy(
        self,
        source: tuple[cute.CopyAtom, cute.Tensor],
        row,
        column,
        tile: cute.Tensor,
        barrier: cute.Pointer,
        once: bool,
    ) -> None:
        """Requests the tile at (`row`, `column`), counted in tiles of the matrix.

        `source` is its map. With `once` the bytes leave the L2 cache before all others: nobody
        reads them again soon. A whole warp calls it, one lane issues it; `bytes` must have been
        announced to the barrier, or be announced by the same lane.
        """
        atom, places = source
        layout = self._layout()
        wanted = cute.local_tile(places, layout.shape, (row, 0, column))
        target = cute.make_tensor(cute.recast_ptr(tile.iterator, layout.inner), layout.outer)
        into, out_of = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(target, 0, 3),
            cute.group_modes(wanted, 0, 3),
        )
        policy = {"cache_policy": memory.evict_first()} if cutlass.const_expr(once) else {}
        cute.copy(atom, out_of, into, tma_bar_ptr=barrier, **policy)

    def word_place(self, row, word):
        """Where in a tile the `word`-th 16 bytes of a row stand, in words of 16 bytes."""
        block, inner = word // _ROW_WORDS, word % _ROW_WORDS
        return (block * self.rows + row) * _ROW_WORDS + (inner ^ (row % ROWS))

    def load_words(self, tile: cute.Tensor, first_row, part, group, group_lane) -> cute.TensorSSA:
        """This lane's 16 bytes of row `first_row + group`, for a product of slices.

        `part` counts slices of half a block, `first_row` is a multiple of ROWS. Of a block, lane t
        of a group holds word 2t in the first slice and word 2t + 1 in the second: which columns a
        lane holds is free where both sides of the product are read alike, and so the lanes of two
        neighbouring rows touch all banks once.
        """
        block, second = part // 2, part % 2
        word = (2 * group_lane + second) ^ group
        row = block * self.rows + first_row + group
        return memory.load_words(tile, row * _ROW_WORDS + word)

    def _layout(self) -> cute.ComposedLayout:
        """(row, column of a block, block) -> place in a tile."""
        shape = (self.rows, BLOCK, self.columns // BLOCK)
        plain = cute.make_layout(shape, stride=(BLOCK, 1, self.rows * BLOCK))
        return cute.make_composed_layout(cute.make_swizzle(*_SWIZZLE), 0, plain)


def prefetch_map(source: tuple[cute.CopyAtom, cute.Tensor]) -> None:
    """Brings a map to the engine ahead of the first copy with it."""
    cpasync.prefetch_descriptor(source[0])
