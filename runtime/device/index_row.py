"""Operands of the indexer's scores for one row: its key, its heads' scales and weights.

key     k = (wk - mean) * rsqrt(var + eps) * norm + bias       FP32
        s = power of two at or above max(amax(k), 1e-4) / 448;  codes = E4M3(k / s)
        page[slot // page]: bytes [token * dim, +dim) = codes, token = slot % page
                            FP32 behind all keys of the page, number `token` = s
weight  wv * s * dim^-0.5 * heads^-0.5, with the scale s of the head's query
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, cute

from . import fp8, memory, reduce

FP32_BYTES = 4


@dataclass(frozen=True)
class IndexRow:
    """dim: elements of a key, a multiple of 32. page: tokens of a cache page. eps: of the norm."""

    heads: int
    dim: int
    page: int
    eps: float

    @property
    def token_bytes(self) -> int:
        """Bytes of a token: E4M3 codes and one scale."""
        return self.dim + FP32_BYTES

    @property
    def key_vector(self) -> int:
        """Neighbouring elements of a key that a lane holds."""
        return self.dim // reduce.WARP

    @cute.jit
    def insert_key(self, wk: cute.Tensor, slot, norm, bias, index_kv: cute.Tensor, lane):
        """Norms and quantises one key, `key_vector` elements a lane, and inserts it at `slot`.

        norm, bias: this lane's share, FP32. A negative slot inserts nothing.
        """
        x = memory.load_float(wk, lane, self.key_vector)
        mean = self._mean(x)
        centred = x - mean
        variance = self._mean(centred * centred)
        k = centred * cute.math.rsqrt(variance + Float32(self.eps), fastmath=True) * norm + bias
        scale = group_scale(k, reduce.WARP)
        if slot >= 0:
            page = index_kv[slot // self.page, None, None].iterator
            token = slot % self.page
            key_bytes = self.page * self.dim
            keys = cute.make_tensor(page, cute.make_layout(key_bytes))
            codes = memory.vector_at(keys, token * reduce.WARP + lane, self.key_vector)
            fp8.store_e4m3(k * fp8.inverse_of_power_of_two(scale), codes)
            scale_words = cute.recast_ptr(page + key_bytes, dtype=Float32)
            scales = cute.make_tensor(scale_words, cute.make_layout(self.page))
            if lane == 0:
                scales[token] = scale

    def weight(self, wv: Float32, scale: Float32) -> Float32:
        """A head's weight, with the scale of its query and the constant factors."""
        return wv * scale * Float32(self.dim**-0.5 * self.heads**-0.5)

    def _mean(self, values: cute.TensorSSA) -> Float32:
        """Mean over the key's elements, which the warp's lanes share."""
        total = values.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return reduce.lanes_sum(total) / Float32(self.dim)


def largest(values: cute.TensorSSA, lanes: int) -> Float32:
    """Largest magnitude of the group of elements that `lanes` lanes share."""
    amax = cute.math.absf(values).reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
    return reduce.lanes_max(amax, lanes)


def group_scale(values: cute.TensorSSA, lanes: int) -> Float32:
    """Power-of-two scale of the group of elements that `lanes` lanes share."""
    return fp8.power_of_two_scale(largest(values, lanes))
