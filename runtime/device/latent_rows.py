"""Rows of a latent cache in shared memory as operands of the tensor cores, by cache format.

The rows' E4M3 codes enter as F16, in which they are exact. Key columns are taken in the order in
which wide loads deliver them; the query's fragments are built in the same order.

A format gives, beside its layout: `pitch` (bytes from row to row in shared memory, an odd number of
vectors, so that lanes on different rows hit distinct banks), the dtype of the query that goes with
it, the query's A fragments, the scores of eight keys, and P with the rows' own scales. Where
`tensor_scaled` is set, query and keys are codes that the caller's q_scale and k_scale belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Uint32, cute

from . import half, memory, mma, reduce, scalar
from .latent_layout import SCALE_BYTES, SCALE_GROUP, Fp8DsMla, Fp8Tensor

CODE_CHUNK = 64
"""Codes that the four lanes of a fragment row load at once: four steps."""
STEP = 16
"""Columns of a step."""

_BF16_BYTES = 2
_STEP_WORDS = 4
_GROUP_STEPS = SCALE_GROUP // STEP
_CHUNK_VECTORS = CODE_CHUNK * _BF16_BYTES // memory.VECTOR_BYTES
_QUERY_EXPONENT = 15
_FRAGMENT_KEYS = 4  # of a lane in a fragment of weights


def odd_pitch(row_bytes: int) -> int:
    """`row_bytes`, or a vector more: an odd number of vectors."""
    return row_bytes + memory.VECTOR_BYTES * (row_bytes // memory.VECTOR_BYTES % 2 == 0)


def code_words(row: cute.Tensor, columns: int, group_lane, first: int = 0) -> list[Uint32]:
    """This lane's word (four codes) of every step of the row's codes `first` to `columns`.

    `first` is a multiple of CODE_CHUNK.
    """
    words = []
    for chunk in range(first // CODE_CHUNK, columns // CODE_CHUNK):
        vector = memory.load_words(row, chunk * mma.GROUP_LANES + group_lane)
        words += [vector[place] for place in range(_STEP_WORDS)]
    for step in range(first // STEP + len(words), columns // STEP):
        words.append(memory.load_word(row, step * mma.GROUP_LANES + group_lane))
    return words


def code_fragments(upper: cute.Tensor, lower: cute.Tensor, columns: int, group_lane) -> list:
    """A fragments in F16 of every step of two rows' first `columns` codes (rows g and g + 8)."""
    fragments = []
    rows = (code_words(row, columns, group_lane) for row in (upper, lower))
    for words in zip(*rows, strict=True):
        a, b = (half.widen_e4m3(word) for word in words)
        fragments.append((a[0], b[0], a[1], b[1]))
    return fragments


def code_products(fragments: list, rows: list, first: int, group_lane) -> list[list[Float32]]:
    """C fragments of A fragments times the codes of several octets from column `first` on.

    `rows[octet]` is the lane's row of an octet. A chunk is loaded at a time, so that few words are
    held, and the octets take turns, two chains of sums each: a step need not wait for the one
    before.
    """
    chains = [[mma.zero_accumulator() for _ in range(2)] for _ in rows]
    end = first + len(fragments) * STEP
    for start in range(first, end, CODE_CHUNK):
        stop = min(start + CODE_CHUNK, end)
        words = [code_words(row, stop, group_lane, start) for row in rows]
        for place in range((stop - start) // STEP):
            step = (start - first) // STEP + place
            for octet, sums in zip(words, chains, strict=True):
                pairs = half.widen_e4m3(octet[place])
                sums[step % 2] = mma.mma_step_f16(fragments[step], pairs, sums[step % 2])
    return [[a + b for a, b in zip(*sums, strict=True)] for sums in chains]


@dataclass(frozen=True)
class Fp8TensorRows(Fp8Tensor):
    """Codes all along; one scale for the tensor."""

    tensor_scaled = True
    query_dtype = "u8"

    @property
    def pitch(self) -> int:
        """Bytes from row to row in shared memory."""
        return odd_pitch(self.row_bytes)

    def query_fragments(self, upper: cute.Tensor, lower: cute.Tensor, group_lane) -> tuple:
        """A fragments of query rows g and g + 8, and what their scores are to be multiplied by."""
        fragments = code_fragments(upper, lower, self.row_bytes, group_lane)
        return fragments, [Float32(1.0)] * 2

    def scores(self, fragments: list, rows: list, lane_rows: list, group_lane) -> list:
        """C fragments of octets of keys: `rows[octet]` is key column g of it.

        `lane_rows` are the rows of this lane's columns of C, two an octet.
        """
        return code_products(fragments, rows, 0, group_lane)

    def weigh(self, weights: list, maxima: list, lane_rows, first_column) -> tuple[list, list]:
        """P as it stands: the rows have no scales of their own."""
        return weights, maxima


@dataclass(frozen=True)
class Fp8DsMlaRows(Fp8DsMla):
    """Codes of the latent with their scales, and BF16 values of the position part."""

    tensor_scaled = False
    query_dtype = "bf16"

    @property
    def pitch(self) -> int:
        """Bytes from row to row in shared memory."""
        return odd_pitch(self.row_bytes)

    def query_fragments(self, upper: cute.Tensor, lower: cute.Tensor, group_lane) -> tuple:
        """A fragments of query rows g and g + 8, and what their scores are to be multiplied by.

        F16 for the codes, BF16 for the position part. A power of two first moves the largest
        element of a row to 2^14..2^15, so that elements down to 2^-30 of it are exact in F16.
        """
        sides, factors = [], []
        for row in (upper, lower):
            pairs = [scalar.unpack_bf16(word) for word in self._query_words(row, group_lane)]
            largest = Float32(0.0)
            for element in (element for pair in pairs for element in pair):
                largest = cute.arch.fmax(largest, cute.arch.fmax(element, -element))
            exponent = scalar.exponent_above(reduce.lanes_max(largest, mma.GROUP_LANES))
            factor = cute.arch.exp2(Float32(_QUERY_EXPONENT) - exponent)
            factors.append(cute.arch.exp2(exponent - Float32(_QUERY_EXPONENT)))
            steps = []
            for step, (first, second) in enumerate(zip(pairs[::2], pairs[1::2], strict=True)):
                a, b, c, d = (element * factor for element in (*first, *second))
                pack = half.pack_bf16 if step >= self.kv_lora // STEP else half.pack
                steps.append((pack(a, b), pack(c, d)))
            sides.append(steps)
        fragments = [
            (upper_pairs[0], lower_pairs[0], upper_pairs[1], lower_pairs[1])
            for upper_pairs, lower_pairs in zip(*sides, strict=True)
        ]
        return fragments, factors

    def _query_words(self, row: cute.Tensor, group_lane) -> list[Uint32]:
        """This lane's pairs of neighbouring columns of a query row, two a step."""
        words = []
        for chunk in range(self.kv_lora // CODE_CHUNK):
            first = chunk * _CHUNK_VECTORS + group_lane * 2
            for vector in (memory.load_words(row, first), memory.load_words(row, first + 1)):
                words += [vector[place] for place in range(_STEP_WORDS)]
        for piece in range(self.pe // mma.K_SLICE):
            first = (self.kv_lora + piece * mma.K_SLICE) * _BF16_BYTES // memory.VECTOR_BYTES
            vector = memory.load_words(row, first + group_lane)
            words += [vector[place] for place in range(_STEP_WORDS)]
        return words

    def scores(self, fragments: list, rows: list, lane_rows: list, group_lane) -> list:
        """As for fp8_tensor; every group of codes is summed by itself and then takes its scale."""
        position = fragments[self.kv_lora // STEP :]
        totals = [self._position_scores(position, row, group_lane) for row in rows]
        for group in range(self.kv_lora // SCALE_GROUP):
            mine = slice(group * _GROUP_STEPS, (group + 1) * _GROUP_STEPS)
            products = code_products(fragments[mine], rows, group * SCALE_GROUP, group_lane)
            for octet, sums in enumerate(products):
                pair = lane_rows[2 * octet : 2 * octet + 2]
                scales = [self._scale(row, group) for row in pair]
                totals[octet] = [
                    cute.math.fma(sums[place], scales[place % 2], totals[octet][place])
                    for place in range(4)
                ]
        return totals

    def _position_scores(self, fragments: list, row: cute.Tensor, group_lane) -> list[Float32]:
        """C fragment of the position part of one octet."""
        total = mma.zero_accumulator()
        for piece in range(self.pe // mma.K_SLICE):
            place = self.pe_offset // memory.VECTOR_BYTES + piece * mma.GROUP_LANES + group_lane
            vector = memory.load_words(row, place)
            for step in range(2):
                pair = vector[2 * step], vector[2 * step + 1]
                total = mma.mma_step(fragments[2 * piece + step], pair, total)
        return total

    def weigh(self, weights: list, maxima: list, lane_rows, first_column) -> tuple[list, list]:
        """P times the scale of each key for the columns from `first_column` on, and its maxima.

        `lane_rows` are the rows of the keys that this lane's weights belong to. The products are
        moved by a power of two so that the largest of a row of P lies within 0.5..1.
        """
        scales = [self._scale(row, first_column // SCALE_GROUP) for row in lane_rows]
        moved, references = [[None] * 4 for _ in weights], []
        for side in range(2):
            highest = maxima[0][side]
            for part in maxima[1:]:
                highest = cute.arch.fmax(highest, part[side])
            factors = [cute.arch.exp2(part[side] - highest) for part in maxima]
            places = [(part, word) for part in range(len(weights)) for word in (side, side + 2)]
            values = [v for part, word in places for v in half.unpack(weights[part][word])]
            values = [
                value * (scale * factors[place // _FRAGMENT_KEYS])
                for place, (value, scale) in enumerate(zip(values, scales, strict=True))
            ]
            largest = Float32(0.0)
            for value in values:
                largest = cute.arch.fmax(largest, cute.arch.fmax(value, -value))
            exponent = scalar.exponent_above(reduce.lanes_max(largest, mma.GROUP_LANES))
            factor = cute.arch.exp2(-exponent)
            for at, (part, word) in enumerate(places):
                first, second = values[2 * at], values[2 * at + 1]
                moved[part][word] = half.pack(first * factor, second * factor)
            references.append(highest + exponent)
        return moved, [references] * len(maxima)

    def _scale(self, row: cute.Tensor, group) -> Float32:
        """Scale of a row's group of codes."""
        word = memory.load_word(row, self.scale_offset // SCALE_BYTES + group)
        return word.bitcast(Float32)


FORMATS = {"fp8_tensor": Fp8TensorRows, "fp8_ds_mla": Fp8DsMlaRows}
"""Cache format -> its rows."""
