"""Copies of whole rows, picked by index, into a slot of shared memory, by one warp."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int64, cute

from . import copy_async, memory, reduce


@dataclass(frozen=True)
class RowCopies:
    """`count` rows of `row_bytes` bytes, 16 bytes a lane.

    Lane l copies vectors l, l + 32, ... of the rows laid end to end, a whole number of turns.
    """

    row_bytes: int
    count: int

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.row_bytes // memory.VECTOR_BYTES

    def request(self, source: cute.Pointer, index, last, target: cute.Tensor, lane) -> None:
        """Requests all rows into `target`, u8 (row, byte).

        `index` is the source row of target row `lane`; rows behind `last` repeat that one, so that
        nothing else is read. All lanes call it together; offsets are 64 bits wide.
        """
        turns = self.count * self.vectors // reduce.WARP
        vectors = [turn * reduce.WARP + lane for turn in range(turns)]
        rows = [
            cute.arch.shuffle_sync(index, cutlass.min(vector // self.vectors, last))
            for vector in vectors
        ]
        for vector, row in zip(vectors, rows, strict=True):
            byte = vector % self.vectors * memory.VECTOR_BYTES
            copy_async.copy_vector(
                target[vector // self.vectors, None].iterator + byte,
                source + (Int64(row) * self.row_bytes + byte),
            )
