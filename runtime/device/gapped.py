"""A product of a few tokens that leaves neighbouring outputs to another kernel."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute
from cutlass.cutlass_dsl import select_

from .skinny import SkinnyGemm


@dataclass(frozen=True)
class GappedGemm(SkinnyGemm):
    """SkinnyGemm without the outputs gap_at to gap_at + gap: neither loaded nor stored.

    Raises ValueError where the gap does not begin and end between two tiles.
    """

    gap_at: int = 0
    gap: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gap_at % self.tile_n or self.gap % self.tile_n:
            raise ValueError(
                f"outputs {self.gap_at} to {self.gap_at + self.gap} are not whole tiles of tile_n "
                f"{self.tile_n}"
            )

    def grid(self, tokens) -> list:
        """CTAs for that many tokens."""
        return [-(-(self.outputs - self.gap) // self.tile_n), *super().grid(tokens)[1:]]

    def _output_tile(self):
        tile = Int32(cute.arch.block_idx()[0])
        behind = tile >= self.gap_at // self.tile_n
        return Int32(select_(behind, tile + self.gap // self.tile_n, tile))
