"""Blocks of 64 rows by 64 columns of 16 bits in shared memory, as wgmma reads them.

Row r of a block is its r-th 128 bytes; the 16 bytes of columns 8 c.. lie at place c xor r % 8 of
them. One block serves both ways: with its columns summed over (keys of scores: the rows are those
of the product) and with its rows summed over (values: the columns are). Blocks that lie one behind
the other continue the columns, so that one descriptor, of the first of them, does for all.
"""

from __future__ import annotations

from cutlass import Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

ROWS = 64
COLUMNS = 64
CHUNK = 8
"""Columns of 16 bytes, the unit that moves as a whole."""
CHUNK_BYTES = 16
ROW_BYTES = 128
BYTES = ROWS * ROW_BYTES
ALIGN = 1024
"""Eight rows; a block begins at a multiple of it."""

STEP_COLUMNS = 16
"""Columns, or rows, that one instruction sums over."""

_UNIT_BITS = 4
_UNIT = 1 << _UNIT_BITS  # the descriptor counts in it
_WITHIN_CTA = (1 << 18) - 1
_SWIZZLED = 1 << 62
_BLOCK_FIELD = BYTES // _UNIT << 16  # from 64 columns to the next, where rows are summed over
_GROUP_FIELD = ALIGN // _UNIT << 32  # from eight rows to the next


def place(row, chunk):
    """Byte of a block at which columns 8 * chunk.. of `row` lie."""
    return row * ROW_BYTES + (chunk ^ row % (ALIGN // ROW_BYTES)) * CHUNK_BYTES


def start_field(address) -> Int32:
    """What a wgmma descriptor says of where an operand begins, for its shared address.

    In a cluster an address carries the CTA's rank from bit 24 on; the hardware takes the place
    within the CTA alone, and would read the rank as part of the descriptor's next field.
    """
    return (Int32(address) & _WITHIN_CTA) >> _UNIT_BITS


def descriptor(address) -> Int64:
    """The wgmma descriptor of the block (and those behind it) at a shared address."""
    return Int64(start_field(address)) | Int64(_SWIZZLED | _GROUP_FIELD | _BLOCK_FIELD)


def columns_step(step: int) -> int:
    """From the descriptor to that of columns 16 step.., in the units that it counts in."""
    per_block = COLUMNS // STEP_COLUMNS
    inner = step % per_block * STEP_COLUMNS // CHUNK * CHUNK_BYTES
    return (step // per_block * BYTES + inner) // _UNIT


def rows_step(step: int) -> int:
    """From the descriptor to that of rows 16 step.., in the units that it counts in."""
    return step * STEP_COLUMNS * ROW_BYTES // _UNIT


@dsl_user_op
def store_chunk(address, words: list[Uint32], *, loc=None, ip=None) -> None:
    """Stores four words (8 columns) at a shared address, a multiple of 16."""
    llvm.inline_asm(
        None,
        [value.ir_value(loc=loc, ip=ip) for value in (Int32(address), *map(Uint32, words))],
        "st.shared.v4.b32 [$0], {$1, $2, $3, $4};",
        "r,r,r,r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_pair(address, word: Uint32, *, loc=None, ip=None) -> None:
    """Stores one word (2 columns) at a shared address, a multiple of 4."""
    llvm.inline_asm(
        None,
        [value.ir_value(loc=loc, ip=ip) for value in (Int32(address), Uint32(word))],
        "st.shared.b32 [$0], $1;",
        "r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
