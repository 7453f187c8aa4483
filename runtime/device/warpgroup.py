"""Matrix product of a warpgroup: 64 rows in registers, FP16 or E4M3, FP32 accumulation.

    C[64, n] = A[64, 16 * steps] . B[n, 16 * steps]^T, n a multiple of 8

The columns are FP16 numbers, or pairs of E4M3 codes in their place.

A  warp w of the four holds rows 16 w .. 16 w + 15, four words a step, as mma.py's A.
B  in shared memory, in blocks of 8 rows by 64 columns, 1024 contiguous bytes each: that of rows
   8 j.. and columns 64 k.. is the (k * n / 8 + j)-th. In row r of a block the 16 bytes of columns
   8 c.. lie at place c xor r, so that 8 rows of a column meet all banks. `word_of` finds a word.
C  n / 8 fragments a lane, as mma.py's C for columns 8 j .. 8 j + 7.

E4M3 exists on sm_90a only, where the tensor core keeps some 14 bits of a sum of its products.

On sm_90a the four warps issue the asynchronous product of the architecture together (it reads B
by itself, at twice the rate of mma.sync) and wait for it; elsewhere each warp computes its share
with mma.sync, and nothing binds the four together.
"""

from __future__ import annotations

from cutlass import Float32, Int64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.base_dsl import Arch
from cutlass.cutlass_dsl import BaseDSL, dsl_user_op

from . import fp8, mma, operand_blocks

ROWS = 64
WARPS = ROWS // mma.TILE_M
STEP = 16
"""Columns that are summed over in one step."""

BLOCK_STEPS = 4
BLOCK_ROWS = 8
BLOCK_WORDS = BLOCK_ROWS * BLOCK_STEPS * STEP // 2
ALIGNMENT = 4 * BLOCK_WORDS
"""Bytes of a block, to a multiple of which B is aligned."""

_SHAPES = {"f16": ("k16.f32.f16.f16", ", 0"), "e4m3": ("k32.f32.e4m3.e4m3", "")}
KINDS = tuple(_SHAPES)
"""What the 32-bit words of A and B hold: two FP16 numbers, or four E4M3 codes."""

_ROW_WORDS = BLOCK_WORDS // BLOCK_ROWS
_CHUNK_WORDS = 4
_CHUNKS = _ROW_WORDS // _CHUNK_WORDS
_UNIT_WORDS = 4  # the descriptor counts runs of 16 bytes
_SWIZZLED = 1 << 62  # chunks of 16 bytes, in rows of 128


def operand_words(n: int, steps: int) -> int:
    """32-bit words of B."""
    return -(-steps // BLOCK_STEPS) * n // BLOCK_ROWS * BLOCK_WORDS


def word_of(n: int, row, step, half, pair):
    """Place, among the words of B, of columns 16 step + 8 half + 2 pair and the next of `row`."""
    block = step // BLOCK_STEPS * (n // BLOCK_ROWS) + row // BLOCK_ROWS
    chunk = (2 * step + half) % _CHUNKS ^ row % BLOCK_ROWS
    return block * BLOCK_WORDS + row % BLOCK_ROWS * _ROW_WORDS + chunk * _CHUNK_WORDS + pair


def operand_a(rows: list[tuple], kind: str) -> list[tuple]:
    """A for `product`, of words of four E4M3 codes each.

    `rows` pairs the words of row g with those of row g + 8 that this lane holds; one pair is a
    step of FP16, two are one of E4M3. Raises ValueError for half a step.
    """
    if kind == "e4m3":
        if len(rows) % 2:
            raise ValueError(f"{len(rows)} pairs of words are no whole steps of e4m3; use f16")
        return [(*rows[place], *rows[place + 1]) for place in range(0, len(rows), 2)]
    steps = []
    for upper, lower in rows:
        upper_low, upper_high = fp8.unpack_e4m3(upper)
        lower_low, lower_high = fp8.unpack_e4m3(lower)
        steps.append((upper_low, lower_low, upper_high, lower_high))
    return steps


def store_b(b: cute.Tensor, n: int, row, place: int, pair, codes, kind: str) -> None:
    """Stores the counterpart in B of the `place`-th word of lane `pair` of each four in A."""
    if kind == "e4m3":
        b[word_of(n, row, place // 2, place % 2, pair)] = codes
        return
    for half, word in enumerate(fp8.unpack_e4m3(codes)):
        b[word_of(n, row, place, half, pair)] = word


def fence_operand() -> None:
    """Makes this thread's stores to B visible to the product; a barrier has to follow."""
    cute.arch.fence_proxy("async.shared", space="cta")


def product(a: list[tuple], b: cute.Tensor, n: int, kind: str = "f16") -> list[list[Float32]]:
    """The lane's fragments of C; `a` has four words a step, `b` is Uint32 [operand_words].

    All lanes of the warpgroup call it together. `kind` is one of KINDS. Raises ValueError where
    the target has no such product.
    """
    if BaseDSL._get_dsl().get_arch_enum() == Arch.sm_90a:
        return _wgmma(a, b, n, kind)
    if kind != "f16":
        raise ValueError(f"the {kind} product of a warpgroup exists on sm_90a only; use f16")
    group, group_lane = mma.fragment_place(cute.arch.lane_idx())
    sums = [mma.zero_accumulator() for _ in range(n // mma.TILE_N)]
    for step, words in enumerate(a):
        for tile in range(n // mma.TILE_N):
            row = tile * mma.TILE_N + group
            column = [b[word_of(n, row, step, half, group_lane)] for half in (0, 1)]
            sums[tile] = mma.mma_step_f16(words, column, sums[tile])
    return sums


@dsl_user_op
def _wgmma(
    a: list[tuple], b: cute.Tensor, n: int, kind: str, *, loc=None, ip=None
) -> list[list[Float32]]:
    results = n // 2  # of a lane
    words = [word for step in a for word in step]
    start = b.iterator.toint(loc=loc, ip=ip)
    layout = BLOCK_WORDS // _UNIT_WORDS << 32 | _SWIZZLED  # from one block of rows to the next
    descriptor = Int64(operand_blocks.start_field(start)) | Int64(layout, loc=loc, ip=ip)
    operands = [value.ir_value(loc=loc, ip=ip) for value in (*words, descriptor)]
    number = Float32.mlir_type
    result = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * results)})>"),
        operands,
        _text(n, len(a), kind),
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


def _text(n: int, steps: int, kind: str) -> str:
    """All steps of a product as one run of instructions, from the fence to the wait."""
    shape, order = _SHAPES[kind]
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
            f"wgmma.mma_async.sync.aligned.m64n{n}{shape} "
            f"{{{target}}}, {{{source}}}, b, more, 1, 1{order};"
        )
        if step == 0:
            lines.append("setp.eq.b32 more, 0, 0;")
        lines.append(f"add.s64 b, b, {_first_unit(n, step + 1) - _first_unit(n, step)};")
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    return "{ " + " ".join(lines) + " }"


def _first_unit(n: int, step: int) -> int:
    """Where the columns of a step begin in B, in units of the descriptor."""
    blocks = step // BLOCK_STEPS * (n // BLOCK_ROWS)
    return (blocks * BLOCK_WORDS + step % BLOCK_STEPS * STEP // 2) // _UNIT_WORDS
