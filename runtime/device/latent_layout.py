"""Bytes of a token in the paged latent cache.

fp8_tensor: kv_lora E4M3 latents, pe E4M3. fp8_ds_mla: kv_lora E4M3 latents, an FP32 scale for each
SCALE_GROUP of them, pe BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

SCALE_GROUP = 128
"""Latents that share a scale in fp8_ds_mla."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class LatentLayout:
    """A token of `kv_lora` latents and `pe` elements of the position part."""

    kv_lora: int
    pe: int
    grouped: ClassVar[bool]
    """Groups of latents have scales of their own."""
    pe_bytes: ClassVar[int]
    """Bytes of an element of the position part."""

    @property
    def scale_offset(self) -> int:
        """Where the scales begin, or would."""
        return self.kv_lora

    @property
    def pe_offset(self) -> int:
        """Where the position part begins."""
        groups = self.kv_lora // SCALE_GROUP if self.grouped else 0
        return self.scale_offset + groups * SCALE_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return self.pe_offset + self.pe * self.pe_bytes


class Fp8Tensor(LatentLayout):
    """One scale for the whole cache, kept elsewhere."""

    grouped, pe_bytes = False, 1


class Fp8DsMla(LatentLayout):
    """A scale for every group of latents, beside them."""

    grouped, pe_bytes = True, 2
