"""Choices between scalars without a branch, and their powers of two."""

from __future__ import annotations

from cutlass import Boolean, Float32, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op, select_

_SMALLEST = 2.0**-100
_MANTISSA = 0x007F_FFFF
_MANTISSA_BITS = 23
_BIAS = 127


def select(condition: Boolean, value: Float32, otherwise: Float32) -> Float32:
    """`value` where the condition holds, else `otherwise`; the other one may be a NaN."""
    return Float32(select_(condition, value, otherwise))


def choose(condition: Boolean, value: Uint32, otherwise: Uint32) -> Uint32:
    """`select` for 32-bit words."""
    return Uint32(select_(condition, value, otherwise))


@dsl_user_op
def ceiling(value: Float32, *, loc=None, ip=None) -> Float32:
    """The smallest integer that is not below `value`."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [value.ir_value(loc=loc, ip=ip)],
            "cvt.rpi.f32.f32 $0, $1;",
            "=f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


def exponent_above(value: Float32) -> Float32:
    """The smallest integer e with 2^e not below `value`; for values under 2^-100, -100."""
    bits = cute.arch.fmax(value, Float32(_SMALLEST)).bitcast(Uint32)
    rounded = (bits + Uint32(_MANTISSA)) >> Uint32(_MANTISSA_BITS)
    return rounded.to(Float32) - Float32(_BIAS)


def unpack_bf16(pair: Uint32) -> tuple[Float32, Float32]:
    """Both elements of a pair of BF16 in FP32."""
    return (pair << Uint32(16)).bitcast(Float32), (pair & Uint32(0xFFFF_0000)).bitcast(Float32)
