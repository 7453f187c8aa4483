"""Dimensions of a DSA decode layer, before any split over ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """Global dimensions; every count is in elements, heads_total is over all ranks."""

    hidden: int
    heads_total: int
    q_lora: int
    kv_lora: int
    pe: int
    nope: int
    v_dim: int
    index_heads: int
    index_dim: int
    top_k: int
    rms_eps: float = 1e-6
    index_eps: float = 1e-6

    @property
    def latent(self) -> int:
        """Width of a cached key: compressed latent, then the pe slot."""
        return self.kv_lora + self.pe

    @property
    def qk_head(self) -> int:
        """Width of one head of Q_B: nope rows, then pe rows."""
        return self.nope + self.pe

    @property
    def softmax_scale(self) -> float:
        """Attention scale: (nope + pe) ** -0.5, the width of the uncompressed head."""
        return self.qk_head**-0.5

    @property
    def index_scale(self) -> float:
        """Factor folded into the index head weights: index_dim ** -0.5 * index_heads ** -0.5."""
        return self.index_dim**-0.5 * self.index_heads**-0.5

    def heads(self, ranks: int) -> int:
        """Heads of one rank. Raises ValueError when the ranks do not divide the heads."""
        if ranks < 1 or self.heads_total % ranks:
            raise ValueError(f"{self.heads_total} heads do not divide over {ranks} ranks")
        return self.heads_total // ranks

    def columns(self, ranks: int) -> dict[str, slice]:
        """Columns of one rank's packed row, in order: q_a | kv_a | gate | wk | wv."""
        widths = {
            "q_a": self.q_lora,
            "kv_a": self.latent,
            "gate": self.heads(ranks) * self.v_dim,
            "wk": self.index_dim,
            "wv": self.index_heads,
        }
        columns, start = {}, 0
        for name, width in widths.items():
            columns[name] = slice(start, start + width)
            start += width
        return columns

    def pitch(self, ranks: int) -> int:
        """Elements of one rank's packed row."""
        return self.columns(ranks)["wv"].stop


KIMI_K31 = Geometry(
    hidden=7168,
    heads_total=96,
    q_lora=1536,
    kv_lora=512,
    pe=64,
    nope=128,
    v_dim=128,
    index_heads=32,
    index_dim=128,
    top_k=2048,
)

SMALL = Geometry(
    hidden=256,
    heads_total=16,
    q_lora=128,
    kv_lora=128,
    pe=16,
    nope=32,
    v_dim=32,
    index_heads=4,
    index_dim=32,
    top_k=16,
)
