"""Rows of a latent cache in shared memory as operands of the tensor cores, by cache format.

The rows' E4M3 codes enter as F16, in which they are exact. Key columns are taken in the order in
which wide loads deliver them; the query's fragments are built in the same order.

A format gives, beside its layout: `pitch` (bytes from row to row in shared memory, an odd number of
vectors, so that lanes on different rows hit distinct banks), the dtype of the query that goes with
it, the query's A fragments, the scores of eight keys, and P with the rows' own scales. Fragments
and scores are those of one of the two parts (0 and 1) of a row's columns; the scores of a key are
the sum of both. Where `tensor_scaled` is set, query and keys are codes that the caller's q_scale
and k_scale belong to.
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


def spreads(place: int) -> bool:
    """True for the steps, or windows, whose codes become F16 by bits instead of by conversion."""
    return False


def code_fragments(
    upper: cute.Tensor, lower: cute.Tensor, first: int, columns: int, group_lane
) -> list:
    """A fragments in F16 of every step of two rows' codes `first` to `columns` (rows g and g + 8).

    Products with the keys come out 2^-SPREAD_EXPONENT times what they are, whichever way the
    codes of a step become F16.
    """
    fragments = []
    rows = (code_words(row, columns, group_lane, first) for row in (upper, lower))
    for step, words in enumerate(zip(*rows, strict=True)):
        if spreads(step):
            a, b = (half.widen_interleaved(word) for word in words)
        else:
            less = Uint32(half.SPREAD_PAIR)
            a, b = ([half.multiply(p, less) for p in half.widen_e4m3(word)] for word in words)
        fragments.append((a[0], b[0], a[1], b[1]))
    return fragments


def code_products(fragments: list, rows: list, first: int, group_lane) -> list[list[Float32]]:
    """C fragments of A fragments times the codes of several octets from column `first` on.

    `rows[octet]` is the lane's row of an octet. A chunk is loaded at a time, so that few words are
    held, and the octets take turns: a step need not wait for the one before.
    """
    sums = [mma.zero_accumulator() for _ in rows]
    end = first + len(fragments) * STEP
    for start in range(first, end, CODE_CHUNK):
        stop = min(start + CODE_CHUNK, end)
        words = [code_words(row, stop, group_lane, start) for row in rows]
        for place in range((stop - start) // STEP):
            step = (start - first) // STEP + place
            widen = half.spread_interleaved if spreads(step) else half.widen_e4m3
            for octet, codes in enumerate(words):
                pairs = widen(codes[place])
                sums[octet] = mma.mma_step_f16(fragments[step], pairs, sums[octet])
    return sums


@dataclass(frozen=True)
class Fp8TensorRows(Fp8Tensor):
    """Codes all along; one scale for the tensor."""

    tensor_scaled = True
    query_dtype = "u8"

    @property
    def pitch(self) -> int:
        """Bytes from row to row in shared memory."""
        return odd_pitch(self.row_bytes)

    def columns(self, part: int) -> tuple[int, int]:
        """First column of a part, and the one behind its last."""
        middle = -(-self.row_bytes // (2 * CODE_CHUNK)) * CODE_CHUNK
        return (middle, self.row_bytes) if part else (0, middle)

    def query_fragments(
        self, upper: cute.Tensor, lower: cute.Tensor, part: int, group_lane
    ) -> tuple:
        """A fragments of query rows g and g + 8, and what their scores are to be multiplied by."""
        fragments = code_fragments(upper, lower, *self.columns(part), group_lane)
        return fragments, [Float32(2.0**half.SPREAD_EXPONENT)] * 2

    def scores(self, fragments: list, rows: list, lane_rows: list, part: int, group_lane) -> list:
        """C fragments of octets of keys: `rows[octet]` is key column g of it.

        `lane_rows` are the rows of this lane's columns of C, two an octet.
        """
        return code_products(fragments, rows, self.columns(part)[0], group_lane)

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

    def groups(self, part: int) -> range:
        """Groups of codes of a part; part 1 has the position part as well."""
        groups = self.kv_lora // SCALE_GROUP
        return range(-(-groups // 2), groups) if part else range(-(-groups // 2))

    def query_fragments(
        self, upper: cute.Tensor, lower: cute.Tensor, part: int, group_lane
    ) -> tuple:
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
            for step in self._steps(part):
                first, second = pairs[2 * step : 2 * step + 2]
                a, b, c, d = (element * factor for element in (*first, *second))
                less = Float32(2.0**-half.SPREAD_EXPONENT)
                if step >= self.kv_lora // STEP:
                    steps.append((half.pack_bf16(a, b), half.pack_bf16(c, d)))
                elif spreads(step):
                    steps.append((half.pack(a, c), half.pack(b, d)))
                else:
                    steps.append((half.pack(a * less, b * less), half.pack(c * less, d * less)))
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

    def _steps(self, part: int) -> range:
        """Steps of a part of the query's columns."""
        groups = self.groups(part)
        end = (self.kv_lora + self.pe) // STEP if part else groups.stop * _GROUP_STEPS
        return range(groups.start * _GROUP_STEPS, end)

    def scores(self, fragments: list, rows: list, lane_rows: list, part: int, group_lane) -> list:
        """As for fp8_tensor; every group of codes is summed by itself and then takes its scale."""
        groups = self.groups(part)
        position = fragments[len(groups) * _GROUP_STEPS :]
        totals = [self._position_scores(position, row, group_lane) for row in rows]
        factor = Float32(2.0**half.SPREAD_EXPONENT)
        for place, group in enumerate(groups):
            mine = slice(place * _GROUP_STEPS, (place + 1) * _GROUP_STEPS)
            products = code_products(fragments[mine], rows, group * SCALE_GROUP, group_lane)
            for octet, sums in enumerate(products):
                pair = lane_rows[2 * octet : 2 * octet + 2]
                scales = [self._scale(row, group) * factor for row in pair]
                totals[octet] = [
                    cute.math.fma(sums[place], scales[place % 2], totals[octet][place])
                    for place in range(4)
                ]
        return totals

    def _position_scores(self, fragments: list, row: cute.Tensor, group_lane) -> list[Float32]:
        """C fragment of the position part of one octet."""
        total = mma.zero_accumulator()
        for piece in range(len(fragments) // 2):
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
            places = [(part, word) for part in range(len(weights)) for word in (side, side + 2)]
            values = [v for part, word in places for v in half.unpack(weights[part][word])]
            values = [value * scale for value, scale in zip(values, scales, strict=True)]
            largest = Float32(0.0)
            for value in values:
                largest = cute.arch.fmax(largest, cute.arch.fmax(value, -value))
            exponent = scalar.exponent_above(reduce.lanes_max(largest, mma.GROUP_LANES))
            factor = cute.arch.exp2(-exponent)
            for at, (part, word) in enumerate(places):
                first, second = values[2 * at], values[2 * at + 1]
                moved[part][word] = half.pack(first * factor, second * factor)
            references.append(maxima[side] + exponent)
        return moved, references

    def _scale(self, row: cute.Tensor, group) -> Float32:
        """Scale of a row's group of codes."""
        word = memory.load_word(row, self.scale_offset // SCALE_BYTES + group)
        return word.bitcast(Float32)


FORMATS = {"fp8_tensor": Fp8TensorRows, "fp8_ds_mla": Fp8DsMlaRows}
"""Cache format -> its rows."""
