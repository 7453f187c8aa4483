"""Warp-level matrix product m16n8k16 on BF16 or F16 with FP32 accumulation.

Fragments, for lane = 4 * g + t (g 0..7, t 0..3), as the instruction defines them:

    A  16 x 16  words 0..3: rows g, g + 8, g, g + 8; columns 2t..2t+1 (words 0, 1), +8 (words 2, 3)
    B   8 x 16  words 0..1: row g (an output column); columns 2t..2t+1, +8
    C  16 x  8  elements 0..3: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)

The 16 columns of A and B are summed over, so any order of them is as good as any other, as long
as it is the same for both. `K_SLICE` uses that: a lane that loads the 16 bytes of columns
8t..8t+7 of a 32-column slice holds the fragments of two steps (words 0, 1 and words 2, 3).
"""

from __future__ import annotations

from cutlass import Float32, Uint32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import dsl_user_op

from . import memory

TILE_M = 16
TILE_N = 8
HALF_M = TILE_M // 2
"""A lane holds rows g and g + HALF_M of A and C."""

FRAGMENT = 4
"""Elements of C that a lane holds."""

GROUP_LANES = 4
"""Lanes that hold one row of a fragment: lane = GROUP_LANES * g + t."""
LANE_COLUMNS = 8
"""Neighbouring columns of a slice that one lane holds."""
K_SLICE = 32
"""Columns that one 16-byte load a lane covers: two steps of the instruction."""
SLICE_WORDS = 4
"""Words of a lane for one row of a slice."""

_ASM = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{type}.{type}.f32 "
    "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
)
_CONSTRAINTS = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"


def fragment_place(lane) -> tuple:
    """(g, t) of a lane."""
    return lane // GROUP_LANES, lane % GROUP_LANES


def zero_accumulator() -> list[Float32]:
    """Four zeros: the C fragment of an empty sum."""
    return [Float32(0.0)] * FRAGMENT


@dsl_user_op
def mma_step(a, b, accumulator: list[Float32], *, loc=None, ip=None) -> list[Float32]:
    """accumulator + A . B^T over 16 columns; `a` is four words, `b` two, all lanes together."""
    return _step("bf16", a, b, accumulator, loc, ip)


@dsl_user_op
def mma_step_f16(a, b, accumulator: list[Float32], *, loc=None, ip=None) -> list[Float32]:
    """As `mma_step`, on F16."""
    return _step("f16", a, b, accumulator, loc, ip)


def _step(element: str, a, b, accumulator: list[Float32], loc, ip) -> list[Float32]:
    operands = [value.ir_value(loc=loc, ip=ip) for value in (*a, *b, *accumulator)]
    number = operands[-1].type
    result = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"),
        operands,
        _ASM.format(type=element),
        _CONSTRAINTS,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [
        Float32(llvm.extractvalue(number, result, [place], loc=loc, ip=ip))
        for place in range(FRAGMENT)
    ]


def mma_slice(
    upper: cute.TensorSSA,
    lower: cute.TensorSSA,
    column: cute.TensorSSA,
    accumulator: list[Float32],
) -> list[Float32]:
    """accumulator + A . B^T over one slice of K_SLICE columns.

    Each operand is the four words that this lane loaded at columns 8t..8t+7 of the slice:
    `upper` of row g of A, `lower` of row g + 8, `column` of row g of B.
    """
    for first in (0, 2):
        a = (upper[first], lower[first], upper[first + 1], lower[first + 1])
        b = (column[first], column[first + 1])
        accumulator = mma_step(a, b, accumulator)
    return accumulator


def store_fragment(accumulator: list[Float32], tile: cute.Tensor, group, group_lane) -> None:
    """Stores this lane's four elements of C into `tile`, FP32 [TILE_M, TILE_N]."""
    for place, value in enumerate(accumulator):
        tile[group + HALF_M * (place // 2), 2 * group_lane + place % 2] = value


def store_fragment_pairs(
    accumulator: list[Float32], tile: cute.Tensor, group, group_lane, halves: int = 2
) -> None:
    """As `store_fragment`, two neighbouring elements in one access of 8 bytes; of the first HALF_M
    rows only where `halves` is 1."""
    for half in range(halves):
        row = tile[group + HALF_M * half, None]
        memory.vector_at(row, group_lane, 2).store(pair(accumulator, half))


def pair(accumulator: list[Float32], half: int) -> cute.TensorSSA:
    """This lane's two neighbouring elements of C: of row g, or of row g + HALF_M for half 1."""
    values = cute.make_rmem_tensor((2,), Float32)
    values[0], values[1] = accumulator[2 * half], accumulator[2 * half + 1]
    return values.load()


def slice_row(column):
    """Where `load_columns` wants row `column` of B^T, inside its slice of K_SLICE rows.

    Columns 8t..8t+7 of a slice are those of lane t; matrix m of the four holds 8t + 2m and
    8t + 2m + 1 of every t, in the order of t.
    """
    inner = column % K_SLICE
    owner, place = inner // LANE_COLUMNS, inner % LANE_COLUMNS
    return column - inner + place // 2 * TILE_N + 2 * owner + place % 2


def load_columns(tile: cute.Tensor, lane) -> list[Uint32]:
    """The words of B for `mma_slice`, out of shared memory where B lies transposed.

    `tile` is BF16 [K_SLICE, TILE_N], its rows in the order of `slice_row`, 8 neighbouring
    elements each, aligned to 16 bytes. All lanes of the warp together.
    """
    row = tile[lane, None].iterator
    return list(
        inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[row.toint()],
        )
    )
