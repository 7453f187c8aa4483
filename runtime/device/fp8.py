"""E4M3 with power-of-two (UE8M0) scales: value = code * scale."""

from __future__ import annotations

from math import gcd

import cutlass
from cutlass import Float32, Uint32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

E4M3_MAX = 448.0
"""Largest finite E4M3 magnitude."""

AMAX_FLOOR = 1e-4
"""A group whose magnitudes stay below this is scaled as if its maximum were this."""

SCALE_FLOOR = 1e-4
"""Floor of the quotient, not of the maximum, in the groups of fp8_ds_mla."""

WORD_BYTES = 4
_WORDS = {1: cutlass.Uint8, 2: cutlass.Uint16, 4: cutlass.Uint32}

_MANTISSA = 0x007F_FFFF
_EXPONENT = 0x7F80_0000
_EXPONENT_OF_INVERSE = 0x7F00_0000  # exponent fields of x and 1/x add up to 254


_UNPACK = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
    "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)


def _bits(value: Float32) -> Uint32:
    return value.bitcast(Uint32)


def power_of_two_scale(amax: Float32) -> Float32:
    """max(amax, AMAX_FLOOR) / E4M3_MAX (rounded to nearest), rounded up to a power of two.

    Rounding up is done on the bits: adding the mantissa mask carries into the exponent unless
    the mantissa is zero. The quotient is always a normal number.
    """
    return _ceil_power_of_two(cute.arch.fmax(amax, Float32(AMAX_FLOOR)) / Float32(E4M3_MAX))


def power_of_two_group_scale(amax: Float32) -> Float32:
    """max(amax / E4M3_MAX, SCALE_FLOOR), rounded up to a power of two; of fp8_ds_mla."""
    return _ceil_power_of_two(cute.arch.fmax(amax / Float32(E4M3_MAX), Float32(SCALE_FLOOR)))


def _ceil_power_of_two(value: Float32) -> Float32:
    return ((_bits(value) + Uint32(_MANTISSA)) & Uint32(_EXPONENT)).bitcast(Float32)


def inverse_of_power_of_two(scale: Float32) -> Float32:
    """1 / scale, exactly, for a power of two from `power_of_two_scale`.

    x * (1 / scale) then has the bits of x / scale rounded to nearest, without a division.
    """
    return (Uint32(_EXPONENT_OF_INVERSE) - _bits(scale)).bitcast(Float32)


def store_e4m3(values: cute.TensorSSA, codes: cute.Tensor) -> None:
    """Stores FP32 `values` as E4M3 bytes into `codes` (uint8, same length, contiguous).

    Rounds to nearest even and saturates to +-448; a NaN becomes 0x7F, so the byte 0xFF is
    never produced. The stores are as wide as the length allows, up to words; the alignment of
    `codes` must allow them too.
    """
    word = _WORDS[gcd(cute.size(codes), WORD_BYTES)]
    packed = values.to(cutlass.Float8E4M3FN).bitcast(word)
    cute.recast_tensor(codes, word).store(packed)


@dsl_user_op
def unpack_e4m3(word: Uint32, *, loc=None, ip=None) -> tuple[Uint32, Uint32]:
    """The four E4M3 codes of a word as FP16, without loss: (bytes 0 and 1, bytes 2 and 3)."""
    result = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32)>"),
        [word.ir_value(loc=loc, ip=ip)],
        _UNPACK,
        "=r,=r,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    low, high = (llvm.extractvalue(T.i32(), result, [half], loc=loc, ip=ip) for half in (0, 1))
    return Uint32(low), Uint32(high)
