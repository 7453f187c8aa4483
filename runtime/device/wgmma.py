"""Products of blocks in shared memory by the four warps of a warpgroup (sm_90a only).

Both operands are operand_blocks of 64 rows. C has 64 rows, those of the left operand; warp w of
the warpgroup holds rows 16 w .. 16 w + 15 as mma.py's C fragments, one for every 8 columns. All
lanes of the warpgroup call these together. They return once the products are done: what overlaps
with them is the work of other warps.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.base_dsl import Arch
from cutlass.cutlass_dsl import BaseDSL, dsl_user_op

from . import barrier, mma, operand_blocks

ROWS = operand_blocks.ROWS
WARPS = ROWS // mma.TILE_M
MAX_COLUMNS = 256
SUM_STEPS = operand_blocks.COLUMNS // operand_blocks.STEP_COLUMNS
"""Instructions over the 64 rows that are summed over, for a part of the columns."""
WIDEST = 128
"""Columns of an instruction: its sums have to fit in what a thread of a large CTA starts with."""


def require() -> None:
    """Raises ValueError where the target has no such product."""
    arch = BaseDSL._get_dsl().get_arch_enum()
    if arch != Arch.sm_90a:
        raise ValueError(f"wgmma exists on sm_90a only, not on {arch.name}")


@dsl_user_op
def row_products(
    left: Int64,
    right: Int64,
    kind: str,
    steps: range,
    total: list[Float32] | None = None,
    *,
    loc=None,
    ip=None,
) -> list[Float32]:
    """Products of all rows of `left` and `right`, both descriptors, added to `total` if given.

    Summed over columns 16 s .. 16 s + 15 for s in `steps`, which are numbers of that kind, f16 or
    bf16. Returns the C fragments of 64 columns, one behind the other.
    """
    require()
    count = ROWS // 2
    inputs = count * (1 if total is None else 2)
    lines = [_HEAD]
    for step in steps:
        offset = operand_blocks.columns_step(step)
        fresh = total is None and step == steps[0]
        lines.append(f"add.s64 a, ${inputs}, {offset}; add.s64 b, ${inputs + 1}, {offset};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{ROWS}k16.f32.{kind}.{kind} "
            f"{_registers(0, count)}, a, b, {'none' if fresh else 'more'}, 1, 1, 0, 0;"
        )
    lines.append(_COMMIT)
    return _issue(lines, count, [left, right], total or [], loc, ip)


@dsl_user_op
def add_column_products(
    total: list[Float32], left: Int64, right: Int64, free: Int32, *, loc=None, ip=None
) -> list[Float32]:
    """total + left . right over 64 columns of `left` (one block), the 64 rows of `right`, in F16.

    `total` are C fragments of as many columns as the product has, at most MAX_COLUMNS; `right`
    is the descriptor of the block of the first 64 of them. At `free` lie SUM_STEPS barriers: the
    warp arrives at the s-th once rows 16 s .. 16 s + 15 of `right` have been read (and those
    before them).
    """
    require()
    count = len(total)
    columns = 2 * count
    width = min(columns, WIDEST)
    lines = [_HEAD]
    for step in range(SUM_STEPS):
        lines.append(f"add.s64 a, ${2 * count}, {operand_blocks.columns_step(step)};")
        for first in range(0, columns, width):
            block = operand_blocks.columns_step(first // operand_blocks.STEP_COLUMNS)
            lines.append(f"add.s64 b, ${2 * count + 1}, {operand_blocks.rows_step(step) + block};")
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.f16.f16 "
                f"{_registers(first // 2, width // 2)}, a, b, more, 1, 1, 0, 1;"
            )
        lines.append(_COMMIT)
    for step in range(SUM_STEPS):
        lines.append(f"wgmma.wait_group.sync.aligned {SUM_STEPS - 1 - step};")
        place = f"[${2 * count + 2} + {step * barrier.BYTES}]"
        lines.append(f"@lead mbarrier.arrive.shared::cta.b64 _, {place};")
    return _issue(lines, count, [left, right, free], total, loc, ip)


_HEAD = (
    ".reg .pred more, none; .reg .b64 a, b; setp.eq.b32 more, 0, 0; setp.ne.b32 none, 0, 0; "
    ".reg .b32 lane; .reg .pred lead; mov.u32 lane, %laneid; setp.eq.u32 lead, lane, 0; "
    "wgmma.fence.sync.aligned;"
)
_COMMIT = "wgmma.commit_group.sync.aligned;"
_TAIL = "wgmma.wait_group.sync.aligned 0;"


def _registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"${first + place}" for place in range(count)) + "}"


def _issue(lines: list[str], results: int, operands: list, total: list, loc, ip) -> list[Float32]:
    """Runs the instructions; `total`, where given, is what the results start from."""
    tied = [str(place) for place in range(len(total))]
    kinds = ["l" if isinstance(operand, Int64) else "r" for operand in operands]
    outcome = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * results)})>"),
        [value.ir_value(loc=loc, ip=ip) for value in (*total, *operands)],
        "{ " + " ".join([*lines, _TAIL]) + " }",
        ",".join(["=f"] * results + tied + kinds + ["~{memory}"]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    number = Float32.mlir_type
    return [
        Float32(llvm.extractvalue(number, outcome, [place], loc=loc, ip=ip))
        for place in range(results)
    ]
