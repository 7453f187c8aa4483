"""Matrix product of a warpgroup: 64 rows in registers, FP16, FP32 accumulation.

    C[64, n] = A[64, 16 * steps] . B[n, 16 * steps]^T, n a multiple of 8

A  warp w of the four holds rows 16 w .. 16 w + 15, four words a step, as mma.py's A.
B  in shared memory, as core matrices of 8 rows by 16 bytes, 128 contiguous bytes each: that of
   rows 8 j.. and columns 8 k.. is the (k * n / 8 + j)-th. `word_of` finds a word.
C  n / 8 fragments a lane, as mma.py's C for columns 8 j .. 8 j + 7.

On sm_90a the four warps issue the asynchronous product of the architecture together (it reads B
by itself, at twice the rate of mma.sync) and wait for it; elsewhere each warp computes its share
with mma.sync, and nothing binds the four together.
"""

from __future__ import annotations

from cutlass import Float32, Int64, Uint32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.base_dsl import Arch
from cutlass.cutlass_dsl import BaseDSL, dsl_user_op

from . import mma

ROWS = 64
WARPS = ROWS // mma.TILE_M
STEP = 16
"""Columns that are summed over in one step."""

CORE_WORDS = 32
"""32-bit words of a core matrix."""

_CORE_UNITS = 8  # the descriptor counts runs of 16 bytes


def operand_words(n: int, steps: int) -> int:
    """32-bit words of B; its first one lies at a multiple of 128 bytes."""
    return n * steps * STEP // 2


def word_of(n: int, row, step, half, pair):
    """Place, among the words of B, of columns 16 step + 8 half + 2 pair and the next of `row`."""
    core = (2 * step + half) * (n // mma.TILE_N) + row // mma.TILE_N
    return core * CORE_WORDS + row % mma.TILE_N * mma.GROUP_LANES + pair


def fence_operand() -> None:
    """Makes this thread's stores to B visible to the product; a barrier has to follow."""
    cute.arch.fence_proxy("async.shared", space="cta")


def product(a: list[tuple], b: cute.Tensor, n: int) -> list[list[Float32]]:
    """The lane's fragments of C; `a` has four words a step, `b` is Uint32 [operand_words].

    All lanes of the warpgroup call it together.
    """
    if BaseDSL._get_dsl().get_arch_enum() == Arch.sm_90a:
        return _wgmma(a, b, n)
    lane = cute.arch.lane_idx()
    sums = [mma.zero_accumulator() for _ in range(n // mma.TILE_N)]
    for step, words in enumerate(a):
        for tile in range(n // mma.TILE_N):
            cores = [(2 * step + half) * (n // mma.TILE_N) + tile for half in (0, 1)]
            column = [b[core * CORE_WORDS + lane] for core in cores]
            sums[tile] = mma.mma_step_f16(words, column, sums[tile])
    return sums


@dsl_user_op
def _wgmma(a: list[tuple], b: cute.Tensor, n: int, *, loc=None, ip=None) -> list[list[Float32]]:
    results = n // 2  # of a lane
    words = [word for step in a for word in step]
    start = b.iterator.toint(loc=loc, ip=ip)
    # Distance of core matrices along the sum, then along n; no swizzle.
    layout = (n // mma.TILE_N * _CORE_UNITS) << 16 | _CORE_UNITS << 32
    descriptor = Int64(start >> 4, loc=loc, ip=ip) | Int64(layout, loc=loc, ip=ip)
    operands = [value.ir_value(loc=loc, ip=ip) for value in (*words, descriptor)]
    number = Float32.mlir_type
    result = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * results)})>"),
        operands,
        _text(n, len(a)),
        ",".join(["=f"] * results + ["r"] * len(words) + ["l"]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    values = [
        Float32(llvm.extractvalue(number, result, [place], loc=loc, ip=ip))
        for place in range(results)
    ]
    return [values[first : first + 4] for first in range(0, results, 4)]


def _text(n: int, steps: int) -> str:
    """All steps of a product as one run of instructions, from the fence to the wait."""
    results = n // 2
    target = ", ".join(f"${place}" for place in range(results))
    lines = [
        ".reg .pred more; .reg .b64 b;",
        f"mov.b64 b, ${results + 4 * steps};",
        "wgmma.fence.sync.aligned;",
        "setp.ne.b32 more, 0, 0;",
    ]
    for step in range(steps):
        source = ", ".join(f"${results + 4 * step + place}" for place in range(4))
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 "
            f"{{{target}}}, {{{source}}}, b, more, 1, 1, 0;"
        )
        if step == 0:
            lines.append("setp.eq.b32 more, 0, 0;")
        lines.append(f"add.s64 b, b, {2 * n // mma.TILE_N * _CORE_UNITS};")
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    return "{ " + " ".join(lines) + " }"
