"""Insert of one token into the paged latent cache, by one warp, in both formats.

    latent = BF16(x * rsqrt(fma(sum(x * x), 1 / n, eps)) * weight)      FP32, fast rsqrt

    fp8_tensor   codes of value * k_scale_inv
    fp8_ds_mla   scale = power of two at or above max(amax / 448, 1e-4) of a group

Where the bytes lie: see latent_layout.py. A lane holds n / 32 neighbouring latents and two
neighbouring pe.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import BFloat16, Float32, cute

from . import fp8, memory, reduce
from .latent_layout import SCALE_BYTES, SCALE_GROUP, Fp8DsMla, Fp8Tensor

PE_VECTOR = 2


@dataclass(frozen=True)
class LatentRow:
    """A token of `width` latents (a multiple of 32) and `pe` more elements (even, at most 64)."""

    width: int
    pe: int
    eps: float

    def __post_init__(self) -> None:
        if self.pe % PE_VECTOR or self.pe > PE_VECTOR * reduce.WARP:
            raise ValueError(f"pe {self.pe} is not even and at most {PE_VECTOR * reduce.WARP}")

    @property
    def vector(self) -> int:
        """Neighbouring latents of a lane."""
        return self.width // reduce.WARP

    def load(self, row: cute.Tensor, lane) -> cute.TensorSSA:
        """This lane's run of a row of `width` elements, in FP32."""
        return memory.load_float(row, lane, self.vector)

    def normalised(self, x: cute.TensorSSA, weight: cute.TensorSSA) -> cute.TensorSSA:
        """This lane's normed latents, rounded to BF16 and widened again."""
        squares = (x * x).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        total = reduce.lanes_sum(squares)
        mean = cute.math.fma(total, Float32(1.0 / self.width), Float32(self.eps))
        y = x * cute.math.rsqrt(mean, fastmath=True) * weight
        return y.to(BFloat16).to(Float32)

    @cute.jit
    def store_fp8_tensor(
        self,
        latent: cute.TensorSSA,
        pe: cute.Tensor,
        k_scale_inv: Float32,
        token: cute.Tensor,
        lane,
    ):
        """Stores the row `latent` | `pe` into the bytes of a token, every lane its share."""
        codes = memory.vector_at(token, lane, self.vector)
        fp8.store_e4m3(latent * k_scale_inv, codes)
        if lane < self.pe // PE_VECTOR:
            values = memory.load_float(pe, lane, PE_VECTOR)
            place = Fp8Tensor(self.width, self.pe).pe_offset // PE_VECTOR + lane
            fp8.store_e4m3(values * k_scale_inv, memory.vector_at(token, place, PE_VECTOR))

    @cute.jit
    def store_fp8_ds_mla(self, latent: cute.TensorSSA, pe: cute.Tensor, token: cute.Tensor, lane):
        """As `store_fp8_tensor`, with a scale for every SCALE_GROUP latents and BF16 pe."""
        layout = Fp8DsMla(self.width, self.pe)
        lanes = SCALE_GROUP // self.vector
        amax = cute.math.absf(latent).reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
        scale = fp8.power_of_two_group_scale(reduce.lanes_max(amax, lanes))
        codes = memory.vector_at(token, lane, self.vector)
        fp8.store_e4m3(latent * fp8.inverse_of_power_of_two(scale), codes)
        if lane % lanes == 0:
            place = layout.scale_offset // SCALE_BYTES + lane // lanes
            cute.recast_tensor(memory.vector_at(token, place, SCALE_BYTES), Float32)[0] = scale
        if lane < self.pe // PE_VECTOR:
            size = PE_VECTOR * layout.pe_bytes
            target = memory.vector_at(token, layout.pe_offset // size + lane, size)
            source = memory.vector_at(pe, lane, PE_VECTOR)
            cute.recast_tensor(target, BFloat16).store(source.load())
