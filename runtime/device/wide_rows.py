"""Rows of a latent cache on their way into operand blocks, by cache format.

Four lanes share 64 columns of a row; each takes 16 of them. The E4M3 codes enter as F16, in which
they are exact; one tile of blocks then serves the scores (K) and the sums (V) alike.

A format gives: `row_bytes`, the dtype of the query that goes with it, what the lanes of a warp load
of eight rows (`fill`) and how that becomes blocks (`convert`), the same for a query row, and the
scores and weights of a group of keys. Where `tensor_scaled` is set, query and keys are codes that
the caller's q_scale and k_scale belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int64, Uint32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from . import half, memory, mma, operand_blocks, reduce, scalar, wgmma, wide_softmax
from .latent_rows import SCALE_GROUP

LANES = 4
"""Lanes that share a row."""
LANE_COLUMNS = operand_blocks.COLUMNS // LANES
LANE_CHUNKS = LANE_COLUMNS // operand_blocks.CHUNK

_VECTOR = memory.VECTOR_BYTES
_REQUEST = 64  # bytes that device memory delivers at once
_SCALE_BYTES = 4
_BF16_BYTES = 2
_QUERY_EXPONENT = 15
_STEPS = operand_blocks.COLUMNS // operand_blocks.STEP_COLUMNS

_PARTS = reduce.WARP // (2 * LANES)
"""Blocks of two rows that a warp loads at once."""
_COUPLES = reduce.WARP // LANES // 2
"""Pairs among the rows of a warp."""


@dsl_user_op
def load_vector(pointer, *, loc=None, ip=None) -> list[Uint32]:
    """Four words of device memory, aligned to their 16 bytes, past the L1 cache.

    What lies around them comes to the L2 cache, most of it of the same row.
    """
    words = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        [Int64(pointer.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)],
        "ld.global.L1::no_allocate.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [
        Uint32(llvm.extractvalue(T.i32(), words, [place], loc=loc, ip=ip)) for place in range(4)
    ]


@dsl_user_op
def load_index(pointer, *, loc=None, ip=None) -> Uint32:
    """A word of device memory, asked for where this stands and not where it is first used.

    That takes a volatile load: others are moved behind the branch that decides on their use.
    """
    return Uint32(
        llvm.inline_asm(
            T.i32(),
            [Int64(pointer.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)],
            "ld.volatile.global.b32 $0, [$1];",
            "=r,l",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def _request_line(pointer, *, loc=None, ip=None) -> None:
    """Asks the L2 cache for what lies around an address."""
    llvm.inline_asm(
        None,
        [Int64(pointer.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)],
        "prefetch.global.L2 [$0];",
        "l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def request_row(row, size: int, lane) -> None:
    """Asks the L2 cache for the `size` bytes of a row; its lanes call it together.

    One bulk request a row would be a loop over the rows of a warp.
    """
    for first in range(0, size, LANES * _REQUEST):
        _request_line(row + cutlass.min(first + lane * _REQUEST, size - 1))


def make_feed(vectors: int) -> cute.Tensor:
    """Registers for a lane's vectors, u32 (vector, word)."""
    return cute.make_rmem_tensor((vectors, 4), Uint32)


def _fill_one(feed: cute.Tensor, number: int, pointer) -> None:
    for place, word in enumerate(load_vector(pointer)):
        feed[number, place] = word


def taken(feed: cute.Tensor, number: int) -> list[Uint32]:
    """The words of a lane's vector."""
    return [feed[number, place] for place in range(4)]


def _spread(lane) -> tuple:
    """(row of two, block of _PARTS, lane of four) of a lane whose warp loads parts of two rows.

    Eight neighbouring lanes have four neighbouring vectors of both rows: in the blocks these
    meet all banks.
    """
    return lane // LANES % 2, lane // (2 * LANES), lane % LANES


def store_columns(blocks, block: int, row, lane, chunk: int, words: list[Uint32]) -> None:
    """Stores 8 of the lane's 16 columns of a block; `blocks` is the first one's address."""
    place = operand_blocks.place(row, lane * LANE_CHUNKS + chunk)
    operand_blocks.store_chunk(blocks + block * operand_blocks.BYTES + place, words)


def store_codes(blocks, block: int, row, lane, codes: list[Uint32], ratio=None) -> None:
    """Stores the lane's 16 codes of a block as F16, times a pair of `ratio`s where given."""
    pairs = [pair for word in codes for pair in half.widen_e4m3(word)]
    if ratio is not None:
        pairs = [half.multiply(pair, ratio) for pair in pairs]
    store_columns(blocks, block, row, lane, 0, pairs[:4])
    store_columns(blocks, block, row, lane, 1, pairs[4:])


@dataclass(frozen=True)
class WideFp8TensorRows:
    """`kv_lora` codes of the latent and `pe` of the position part; one scale for the tensor."""

    kv_lora: int
    pe: int
    tensor_scaled = True
    query_dtype = "u8"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.kv_lora + self.pe

    @property
    def blocks(self) -> int:
        """Blocks of a row's columns."""
        return self.row_bytes // operand_blocks.COLUMNS

    @property
    def vectors(self) -> int:
        """Vectors of a lane for the rows that a warp takes at a time."""
        return self.blocks

    def fill(self, feed: cute.Tensor, cache, index, lane) -> None:
        """Asks for eight rows; lanes 4 r.. hold the `index` of row r of the `cache`, a pointer.

        A load covers whole lines: two rows, 256 columns of each. What is left are eight rows' ends.
        """
        side, part, row_lane = _spread(lane)
        for couple in range(_COUPLES):
            listed = cute.arch.shuffle_sync(index, (2 * couple + side) * LANES)
            row = cache + Int64(listed) * self.row_bytes
            for number, block in self._loads(couple):
                begin = (block + part) * operand_blocks.COLUMNS + row_lane * _VECTOR
                _fill_one(feed, number, row + begin)
        row = cache + Int64(index) * self.row_bytes
        for block in range(self._wide_blocks, self.blocks):
            _fill_one(feed, block, row + block * operand_blocks.COLUMNS + row_lane * _VECTOR)

    def convert(self, feed: cute.Tensor, blocks, first_row, lane, key_scales) -> None:
        """Turns what `fill` has asked for into rows `first_row` and on, a multiple of eight, of the
        blocks from address `blocks` on."""
        side, part, row_lane = _spread(lane)
        for couple in range(_COUPLES):
            row = first_row + 2 * couple + side
            for number, block in self._loads(couple):
                store_codes(blocks, block + part, row, row_lane, taken(feed, number))
        row = first_row + lane // LANES
        for block in range(self._wide_blocks, self.blocks):
            store_codes(blocks, block, row, row_lane, taken(feed, block))

    @property
    def _wide_blocks(self) -> int:
        """Blocks that are loaded two rows at a time."""
        return self.kv_lora // operand_blocks.COLUMNS

    def _loads(self, couple: int) -> list[tuple[int, int]]:
        """(vector of the lane, first block) of the loads of two rows."""
        count = self._wide_blocks // _PARTS
        return [(couple * count + number, number * _PARTS) for number in range(count)]

    def convert_query(self, source, blocks, row, lane, head_scales: cute.Tensor) -> None:
        """As `convert` for the query row at a pointer; its scores come out as they are."""
        offsets = [block * operand_blocks.COLUMNS + lane * _VECTOR for block in range(self.blocks)]
        feed = make_feed(len(offsets))
        for block, offset in enumerate(offsets):
            _fill_one(feed, block, source + offset)
        for block in range(self.blocks):
            store_codes(blocks, block, row, lane, taken(feed, block))

    def scores(self, query, keys, key_scales, head_scales: list, group_lane) -> list[Float32]:
        """C fragments of a group's scores; `query` and `keys` are descriptors."""
        return wgmma.row_products(query, keys, "f16", range(self.blocks * _STEPS))

    def weigh(self, weights: list, top, references, key_scales, group_lane) -> list[Float32]:
        """P as it stands, for the maxima `top`; what sums for other `references` are moved by."""
        moves = [cute.arch.exp2(references[side] - top[side]) for side in range(2)]
        for side in range(2):
            references[side] = top[side]
        return moves


@dataclass(frozen=True)
class WideFp8DsMlaRows:
    """`kv_lora` codes, an FP32 scale for each 128 of them, and `pe` BF16 values.

    A key enters as its codes times their scales over a power of two of its own, at or above the
    largest of them: exact for scales that are powers of two, as the caches' writers make them
    (within 2^15 of each other), rounded to F16 for others. That power of two goes to the scores
    in FP32, and to the weights before they are rounded.
    """

    kv_lora: int
    pe: int
    tensor_scaled = False
    query_dtype = "bf16"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._pe_offset + self.pe * _BF16_BYTES

    @property
    def blocks(self) -> int:
        """Blocks of a row's columns; the last one is BF16."""
        return self._code_blocks + self.pe // operand_blocks.COLUMNS

    @property
    def _code_blocks(self) -> int:
        return self.kv_lora // operand_blocks.COLUMNS

    @property
    def _pe_offset(self) -> int:
        return self.kv_lora + self.kv_lora // SCALE_GROUP * _SCALE_BYTES

    @property
    def vectors(self) -> int:
        """Vectors of a lane for the rows that a warp takes at a time."""
        return 1 + self._code_blocks + LANE_CHUNKS

    def fill(self, feed: cute.Tensor, cache, index, lane) -> None:
        """Asks for eight rows; lanes 4 r.. hold the `index` of row r of the `cache`, a pointer."""
        row = cache + Int64(index) * self.row_bytes
        for number, offset in enumerate(self._offsets(lane % LANES)):
            _fill_one(feed, number, row + offset)

    def _offsets(self, lane) -> list:
        """Bytes of a row at which the lane's vectors begin: scales, codes, position part."""
        codes = [
            block * operand_blocks.COLUMNS + lane * _VECTOR for block in range(self._code_blocks)
        ]
        first = self._pe_offset + lane * (LANE_CHUNKS * _VECTOR)
        return [self.kv_lora, *codes, *(first + chunk * _VECTOR for chunk in range(LANE_CHUNKS))]

    def convert(self, feed: cute.Tensor, blocks, first_row, lane, key_scales: cute.Tensor) -> None:
        """Turns what `fill` has asked for into rows `first_row` and on of the blocks from address
        `blocks` on.

        The power of two of the key goes to `key_scales`, FP32 (key); all four lanes store it.
        """
        row, lane = first_row + lane // LANES, lane % LANES
        scales = [word.bitcast(Float32) for word in taken(feed, 0)]
        largest = scales[0]
        for scale in scales[1:]:
            largest = cute.arch.fmax(largest, scale)
        exponent = scalar.exponent_above(largest)
        inverse = cute.arch.exp2(-exponent)
        ratios = [half.pack(scale * inverse, scale * inverse) for scale in scales]
        key_scales[row] = cute.arch.exp2(exponent)
        for block in range(self._code_blocks):
            group = block * operand_blocks.COLUMNS // SCALE_GROUP
            store_codes(blocks, block, row, lane, taken(feed, 1 + block), ratios[group])
        for chunk in range(LANE_CHUNKS):
            words = taken(feed, 1 + self._code_blocks + chunk)
            store_columns(blocks, self._code_blocks, row, lane, chunk, words)

    def convert_query(self, source, blocks, row, lane, head_scales: cute.Tensor) -> None:
        """As `convert` for the BF16 query row at a pointer.

        A power of two first moves the largest element of the latent part to 2^14..2^15, so that
        elements down to 2^-30 of it are exact in F16; `head_scales` takes what undoes it.
        """
        vectors = [
            load_vector(source + (block * operand_blocks.COLUMNS + lane * LANE_COLUMNS + column))
            for block in range(self.blocks)
            for column in range(0, LANE_COLUMNS, operand_blocks.CHUNK)
        ]
        codes = vectors[: self._code_blocks * LANE_CHUNKS]
        pairs = [[scalar.unpack_bf16(word) for word in vector] for vector in codes]
        largest = Float32(0.0)
        for element in (element for vector in pairs for pair in vector for element in pair):
            largest = cute.arch.fmax(largest, cute.arch.fmax(element, -element))
        exponent = scalar.exponent_above(reduce.lanes_max(largest, LANES))
        factor = cute.arch.exp2(Float32(_QUERY_EXPONENT) - exponent)
        head_scales[row] = cute.arch.exp2(exponent - Float32(_QUERY_EXPONENT))
        for number, vector in enumerate(vectors):
            words = vector
            if number < len(codes):
                words = [half.pack(a * factor, b * factor) for a, b in pairs[number]]
            store_columns(blocks, number // LANE_CHUNKS, row, lane, number % LANE_CHUNKS, words)

    def scores(
        self, query, keys, key_scales: cute.Tensor, head_scales: list, group_lane
    ) -> list[Float32]:
        """C fragments of a group's scores; the position part is added behind the scales."""
        end = self._code_blocks * _STEPS
        scores = wgmma.row_products(query, keys, "f16", range(end))
        for tile in range(wide_softmax.TILES):
            scales = [key_scales[key] for key in wide_softmax.tile_keys(tile, group_lane)]
            for element in range(mma.FRAGMENT):
                number = tile * mma.FRAGMENT + element
                factor = head_scales[element // 2] * scales[element % 2]
                scores[number] = scores[number] * factor
        return wgmma.row_products(query, keys, "bf16", range(end, self.blocks * _STEPS), scores)

    def weigh(
        self, weights: list, top, references, key_scales: cute.Tensor, group_lane
    ) -> list[Float32]:
        """P times each key's power of two, moved so that no element of a row ever passes 1.

        `weights` are C fragments for the maxima `top`, replaced by those for the `references`,
        which grow; returned is what sums for the references before are moved by, a side.
        """
        for tile in range(wide_softmax.TILES):
            scales = [key_scales[key] for key in wide_softmax.tile_keys(tile, group_lane)]
            for element in range(mma.FRAGMENT):
                number = tile * mma.FRAGMENT + element
                weights[number] = weights[number] * scales[element % 2]
        moves = []
        for side in range(2):
            mine = wide_softmax.of_side(weights, side)
            largest = reduce.lanes_max(wide_softmax.folded(cute.arch.fmax, mine), mma.GROUP_LANES)
            exponent = scalar.exponent_above(largest)
            moved = cute.arch.fmax(references[side], top[side] + exponent)
            moves.append(cute.arch.exp2(references[side] - moved))
            references[side] = moved
            factor = cute.arch.exp2(top[side] - moved)
            for tile in range(wide_softmax.TILES):
                for column in range(2):
                    number = tile * mma.FRAGMENT + 2 * side + column
                    weights[number] = weights[number] * factor
        return moves


FORMATS = {"fp8_tensor": WideFp8TensorRows, "fp8_ds_mla": WideFp8DsMlaRows}
"""Cache format -> its rows."""
