"""Pairs of F16 in a 32-bit word: what the tensor cores are fed from E4M3 bytes.

Every E4M3 value is exact in F16. A pair holds its first element in the low half.
"""

from __future__ import annotations

from cutlass import Float32, Uint32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_WIDEN = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
    "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
_INTERLEAVE = 0x3120  # bytes 0, 2, 1, 3


@dsl_user_op
def widen_e4m3(word: Uint32, *, loc=None, ip=None) -> tuple[Uint32, Uint32]:
    """Four E4M3 bytes as two pairs: bytes 0 and 1, bytes 2 and 3."""
    number = T.i32()
    result = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32)>"),
        [Uint32(word).ir_value(loc=loc, ip=ip)],
        _WIDEN,
        "=r,=r,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return tuple(
        Uint32(llvm.extractvalue(number, result, [place], loc=loc, ip=ip)) for place in range(2)
    )


def widen_interleaved(word: Uint32) -> tuple[Uint32, Uint32]:
    """Four E4M3 bytes as two pairs: bytes 0 and 2, bytes 1 and 3."""
    return widen_e4m3(Uint32(cute.arch.prmt(word, word, _INTERLEAVE)))


@dsl_user_op
def pack(first: Float32, second: Float32, *, loc=None, ip=None) -> Uint32:
    """Two FP32 values, rounded to nearest, as a pair."""
    return _word("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", (first, second), loc, ip)


@dsl_user_op
def multiply(pair: Uint32, factors: Uint32, *, loc=None, ip=None) -> Uint32:
    """Element by element, rounded to nearest."""
    return _word("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", (pair, factors), loc, ip)


@dsl_user_op
def settled(pair: Uint32, *, loc=None, ip=None) -> Uint32:
    """The pair, computed here and not where it is first used, behind a wait perhaps."""
    return _word("mov.b32 $0, $1;", "=r,r", (pair,), loc, ip, here=True)


def _word(text: str, constraints: str, operands: tuple, loc, ip, here: bool = False) -> Uint32:
    return Uint32(
        llvm.inline_asm(
            T.i32(),
            [operand.ir_value(loc=loc, ip=ip) for operand in operands],
            text,
            constraints,
            has_side_effects=here,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def unpack(pair: Uint32, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """Both elements in FP32."""
    number = T.f32()
    result = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(f32, f32)>"),
        [Uint32(pair).ir_value(loc=loc, ip=ip)],
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
        "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
        "=f,=f,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return tuple(
        Float32(llvm.extractvalue(number, result, [place], loc=loc, ip=ip)) for place in range(2)
    )


@dsl_user_op
def pack_bf16(first: Float32, second: Float32, *, loc=None, ip=None) -> Uint32:
    """Two FP32 values, rounded to nearest, as a pair of BF16."""
    return _word("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", (first, second), loc, ip)
