"""Loads of 8 x 8 matrices of 16-bit elements from shared memory into fragments."""

from __future__ import annotations

from cutlass import Int32, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

MATRICES = 4
MATRIX_ROWS = 8
ROW_BYTES = 16


@dsl_user_op
def load_transposed(pointer, *, loc=None, ip=None) -> list[Uint32]:
    """Four matrices, transposed: word m of lane 4g + t is elements (2t, g) and (2t + 1, g) of
    matrix m.

    Lane 8m + i points to row i of matrix m, 16 bytes, aligned. All lanes call it together.
    """
    number = T.i32()
    result = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        [Int32(pointer.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)],
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [
        Uint32(llvm.extractvalue(number, result, [place], loc=loc, ip=ip))
        for place in range(MATRICES)
    ]
