"""Vector access to device memory: what a lane holds of a row, and how it gets there."""

from __future__ import annotations

from math import gcd

import cutlass
from cutlass import Boolean, Int64, Uint32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import SmemAllocator

VECTOR_BYTES = 16
"""Widest access of one thread."""
BF16_VECTOR = 8
"""BF16 of the widest access."""

WORD_BITS = 32


def vector_width(element_bytes: int, *extents: int) -> int:
    """Elements of the widest access that every extent (pitch, column offset, length) allows.

    `extents` are in elements; the result is a power of two, at most VECTOR_BYTES wide.
    """
    return gcd(VECTOR_BYTES // element_bytes, *extents)


def vector_at(row: cute.Tensor, index, width: int) -> cute.Tensor:
    """The `index`-th run of `width` elements of a one-dimensional tensor.

    The alignment follows from the strides and the base of `row`, so a load or store of the
    result is one access as wide as `width` where these allow it.
    """
    return cute.local_tile(row, (width,), (index,))


def allocate(shared: SmemAllocator, dtype, *shape: int, align: int = VECTOR_BYTES) -> cute.Tensor:
    """A row-major tensor in shared memory."""
    layout = cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape)))))
    return shared.allocate_tensor(dtype, layout, align)


def load_float(row: cute.Tensor, index, width: int) -> cute.TensorSSA:
    """The `index`-th run of `width` elements, loaded now and widened to FP32."""
    return vector_at(row, index, width).load().to(cutlass.Float32)


def load_words(row: cute.Tensor, index) -> cute.TensorSSA:
    """The `index`-th 16 bytes of a contiguous row as four 32-bit words (two BF16 each).

    `row` is one-dimensional with elements of at most 32 bits and a 16-byte aligned base.
    """
    width = VECTOR_BYTES * 8 // row.element_type.width
    vector = vector_at(row, index, width)
    return cute.recast_tensor(vector, cutlass.Uint32).load()


@dsl_user_op
def evict_first(*, loc=None, ip=None) -> Int64:
    """The cache policy of bytes that are read once."""
    result = llvm.inline_asm(
        T.i64(),
        [],
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;",
        "=l",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Int64(result)


@dsl_user_op
def load_words_once(row: cute.Tensor, index, *, loc=None, ip=None) -> list[Uint32]:
    """`load_words` of device memory that nobody reads again soon, asked for where this stands.

    The words leave the L2 cache ahead of all others, and with them what kernels need to start:
    their code, and their arguments.
    """
    width = VECTOR_BYTES * 8 // row.element_type.width
    address = vector_at(row, index, width).iterator.toint(loc=loc, ip=ip)
    words = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        [Int64(address).ir_value(loc=loc, ip=ip), evict_first(loc=loc, ip=ip).ir_value()],
        "ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {$0, $1, $2, $3}, [$4], $5;",
        "=r,=r,=r,=r,l,l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [
        Uint32(llvm.extractvalue(T.i32(), words, [place], loc=loc, ip=ip)) for place in range(4)
    ]


def add_shared(counters: cute.Tensor, index, value: Uint32, condition: Boolean) -> None:
    """Adds to word `index` of uint32 counters in shared memory, at once, where `condition` holds.

    No branch, and nothing is returned, so that additions of one lane do not wait for each other.
    """
    inline_ptx(
        "red.shared.add.u32 [{$r0}], {$r1};",
        read_only_args=[(counters.iterator + index).toint(), value],
        predicate=condition,
    )


def take_shared(counters: cute.Tensor, index) -> Uint32:
    """Adds one to word `index` of uint32 counters in shared memory, and what was there before."""
    return inline_ptx(
        "atom.shared.add.u32 {$w0}, [{$r0}], 1;",
        write_only_types=[Uint32],
        read_only_args=[(counters.iterator + index).toint()],
    )


def set_shared(words: cute.Tensor, bit, condition: Boolean) -> None:
    """Sets a bit of uint32 words in shared memory, at once, where `condition` holds."""
    inline_ptx(
        "red.shared.or.b32 [{$r0}], {$r1};",
        read_only_args=[
            (words.iterator + bit // WORD_BITS).toint(),
            Uint32(1) << Uint32(bit % WORD_BITS),
        ],
        predicate=condition,
    )


def add_shared_at(base: Uint32, offset: Uint32, value: Uint32) -> None:
    """`add_shared` at a byte offset behind a shared address, for counters of a hot loop."""
    inline_ptx("red.shared.add.u32 [{$r0}], {$r1};", read_only_args=[Uint32(base) + offset, value])


def load_word(row: cute.Tensor, index) -> cutlass.Uint32:
    """The `index`-th 32-bit word of a contiguous row with a 4-byte aligned base."""
    width = 32 // row.element_type.width
    return cute.recast_tensor(vector_at(row, index, width), cutlass.Uint32)[0]


def vector_words(row: cute.Tensor, index, count: int) -> cute.TensorSSA:
    """The `index`-th run of `count` 32-bit words of a contiguous row, aligned to its length."""
    width = count * 32 // row.element_type.width
    return cute.recast_tensor(vector_at(row, index, width), cutlass.Uint32).load()


def store_words(row: cute.Tensor, words) -> None:
    """Stores 32-bit words into the contiguous 32-bit elements of `row`, as one access."""
    values = cute.make_rmem_tensor((len(words),), row.element_type)
    for place, word in enumerate(words):
        values[place] = word
    row.store(values.load())
