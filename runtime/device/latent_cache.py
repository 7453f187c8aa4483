"""Insert of one token into the paged latent cache, by one warp, in both byte layouts.

    latent = BF16(x * rsqrt(fma(sum(x * x), 1 / n, eps)) * weight)      FP32, fast rsqrt

    fp8_tensor   n E4M3 latent | E4M3 pe, both of value * k_scale_inv
    fp8_ds_mla   n E4M3 latent | n / 128 FP32 scales | BF16 pe
                 scale = power of two at or above max(amax / 448, 1e-4) of 128 latents

A lane holds n / 32 neighbouring latents and two neighbouring pe.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import BFloat16, Float32, cute

from . import fp8, memory, reduce

GROUP = 128
"""Latents of one scale in fp8_ds_mla."""
PE_VECTOR = 2
BF16_BYTES = 2
FP32_BYTES = 4


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
            place = self.width // PE_VECTOR + lane
            fp8.store_e4m3(values * k_scale_inv, memory.vector_at(token, place, PE_VECTOR))

    @cute.jit
    def store_fp8_ds_mla(self, latent: cute.TensorSSA, pe: cute.Tensor, token: cute.Tensor, lane):
        """As `store_fp8_tensor`, with a scale for every GROUP latents and BF16 pe."""
        lanes = GROUP // self.vector
        amax = cute.math.absf(latent).reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
        scale = fp8.power_of_two_group_scale(reduce.lanes_max(amax, lanes))
        codes = memory.vector_at(token, lane, self.vector)
        fp8.store_e4m3(latent * fp8.inverse_of_power_of_two(scale), codes)
        if lane % lanes == 0:
            place = self.width // FP32_BYTES + lane // lanes
            cute.recast_tensor(memory.vector_at(token, place, FP32_BYTES), Float32)[0] = scale
        if lane < self.pe // PE_VECTOR:
            first = self.width + self.width // GROUP * FP32_BYTES
            size = PE_VECTOR * BF16_BYTES
            target = memory.vector_at(token, first // size + lane, size)
            source = memory.vector_at(pe, lane, PE_VECTOR)
            cute.recast_tensor(target, BFloat16).store(source.load())
