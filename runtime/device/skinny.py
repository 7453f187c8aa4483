"""Product of a few tokens with a large weight matrix, bound by how fast the weights stream in.

    y[token, output] = BF16(sum over k of x[token, k] * w[output, k])        FP32 accumulation

Tile     A CTA makes `tile_n` outputs of up to `tokens` tokens, over all columns.
Loads    A ring in shared memory: a stage holds some columns of the CTA's weights and of its
         tokens. With `ring` KiB it fills shared memory, or leaves room for a CTA of the next
         kernel, which then requests its weights while this one ends. Of all that the ring has
         room for, `window` KiB are on their way at a time: what runs meanwhile then finds no
         long queue in front of memory. One warp has the copy engine bring
         the weights, others copy the tokens by cp.async: the kernel that writes tokens may then
         let this one start before it ends, which the engine's reads would forbid (async proxy).
Product  The other warps share a stage: groups of WARP_ROWS outputs, times groups of columns.
         Weights are A of the tensor cores and tokens are B, so that eight tokens cost one tile.
Sum      Over the groups of columns in their order; the same bits in every run.

Rows past the last output arrive as zeros, those past the last token hold anything; no sum of
either is stored, and none enters another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

import cutlass
from cutlass import BFloat16, Float32, Uint8, cute
from cutlass.memory import SmemAllocator

from . import barrier, copy_async, memory, mma, reduce
from .tiles import ALIGN, BLOCK, TileShape, prefetch_map

REQUESTING_WARP = 0
"""Warp that requests weights; those that copy tokens follow, then those that multiply."""
COPIED_TOKENS = 16
"""Tokens for each warp that copies them."""
WARPS = 8
"""Warps that multiply, at most."""
WARP_ROWS = 2 * mma.TILE_M
"""Outputs of a warp."""
MAX_TILE = WARPS * WARP_ROWS
TOKENS = (8, 16, 32, 64)
STORE_WIDTH = 4
"""Outputs of one store, at most."""
SUM_PAD = 4
"""FP32 words behind the outputs of one token: fragments then hit distinct banks."""
FP32_BYTES = 4
KIB = 1024
MOST_SHARED = 227
"""Shared memory that a CTA may have, in KiB."""
STAGE_COLUMNS = (256, 128, 64)
"""Columns of a stage: the first that divides a CTA's columns and leaves MIN_STAGES."""
MIN_STAGES = 3
LEAST_STAGES = 2
"""Fewer would not load anything while they multiply."""


@dataclass(frozen=True)
class Ring:
    """A CTA's shared memory, as the device functions pass it on."""

    weights: cute.Tensor  # BF16 [element, stage]
    tokens: cute.Tensor  # BF16 [element, stage]
    sums: cute.Tensor  # FP32 [group of columns, token, output]; over the stages, after them
    full: cute.Pointer  # barrier of a stage: its tokens have landed, without a window its weights
    empty: cute.Pointer  # barrier of a stage: every warp has read it
    landed: cute.Pointer  # barrier of a stage: its weights have landed; `full` without a window


@dataclass(frozen=True)
class SkinnyGemm:
    """Shape of the product and of its tiles; everything is known when the kernel is compiled.

    outputs, inputs: extents of the weights, BF16 [outputs, inputs].
    tile_n:          outputs of a CTA, a multiple of 8.
    tokens:          tokens of a CTA. More of them take more CTAs, which load the weights again.
    ring:            KiB of shared memory for stages and their barriers; the sums that follow in
                     the same place may take more.
    window:          KiB of weights that are on their way at a time; 0: all that fit the ring.

    Raises ValueError for a tile that the kernel is not written for.
    """

    outputs: int
    inputs: int
    tile_n: int
    tokens: int
    ring: int = MOST_SHARED
    window: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.tile_n % mma.HALF_M or not 0 < self.tile_n <= MAX_TILE:
            raise ValueError(f"tile_n {self.tile_n} is not a multiple of 8 from 8 to {MAX_TILE}")
        if self.tokens not in TOKENS:
            known = ", ".join(map(str, TOKENS))
            raise ValueError(f"tokens {self.tokens} is not one of {known}")
        if self.inputs % BLOCK:
            raise ValueError(f"{self.inputs} columns are not a multiple of {BLOCK}")
        if not 0 < self.ring <= MOST_SHARED or self.stages < min(LEAST_STAGES, self.chunks):
            raise ValueError(
                f"ring {self.ring} is not {LEAST_STAGES} stages of tile_n {self.tile_n} and "
                f"tokens {self.tokens}, or more than {MOST_SHARED} KiB"
            )

    # -- shape -----------------------------------------------------------------------------

    @property
    def stage_columns(self) -> int:
        """Columns of a stage."""
        for size in STAGE_COLUMNS:
            if self.inputs % size == 0 and self._stages(size) >= MIN_STAGES:
                return size
        return BLOCK

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return min(self.chunks, self._stages(self.stage_columns))

    @property
    def in_flight(self) -> int:
        """Stages whose weights may be on their way."""
        if not self.window:
            return self.stages
        return min(self.stages, max(1, self.window * KIB // self.weight_tile.bytes))

    @property
    def chunks(self) -> int:
        """Stages that a CTA goes through."""
        return self.inputs // self.stage_columns

    @property
    def weight_tile(self) -> TileShape:
        """Weights of a stage."""
        return TileShape(self.tile_n, self.stage_columns)

    @property
    def token_tile(self) -> TileShape:
        """Tokens of a stage."""
        return TileShape(self.tokens, self.stage_columns)

    @property
    def row_groups(self) -> int:
        """Groups of WARP_ROWS outputs; the last may be partly empty."""
        return -(-self.tile_n // WARP_ROWS)

    @property
    def column_groups(self) -> int:
        """Groups of warps that divide the columns of a stage between them."""
        return gcd(self.stage_columns // mma.K_SLICE, WARPS // self.row_groups)

    @property
    def copying_warps(self) -> int:
        """Warps that copy tokens; each takes every so manyth row of a stage."""
        return max(1, self.tokens // COPIED_TOKENS)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return (1 + self.copying_warps + self.warps) * reduce.WARP

    @property
    def warps(self) -> int:
        """Warps that multiply."""
        return self.row_groups * self.column_groups

    @property
    def warp_slices(self) -> int:
        """Slices of the tensor cores that a warp takes from a stage."""
        return self.stage_columns // mma.K_SLICE // self.column_groups

    @property
    def width(self) -> int:
        """Outputs of one store."""
        return gcd(STORE_WIDTH, self.outputs, self.tile_n)

    def _stages(self, columns: int) -> int:
        """Stages of that many columns that fit."""
        tiles = (TileShape(rows, columns).bytes for rows in (self.tile_n, self.tokens))
        return self.ring * KIB // (sum(tiles) + self._barriers * barrier.BYTES)

    @property
    def _barriers(self) -> int:
        """Barriers of a stage."""
        return 3 if self.window else 2

    # -- launch ----------------------------------------------------------------------------

    def grid(self, tokens) -> list:
        """CTAs for that many tokens."""
        return [-(-self.outputs // self.tile_n), cute.ceil_div(tokens, self.tokens), 1]

    def weight_map(self, w: cute.Tensor) -> tuple:
        """How the copy engine finds a stage of w, BF16 [outputs, inputs]."""
        return self.weight_tile.map_of(w)

    # -- shared memory ---------------------------------------------------------------------

    @cute.jit
    def make_ring(self) -> Ring:
        """Lays out shared memory."""
        pitch = self.row_groups * WARP_ROWS + SUM_PAD
        sums = cute.make_layout(
            (self.column_groups, self.tokens, self.row_groups * WARP_ROWS),
            stride=(self.tokens * pitch, pitch, 1),
        )
        weight_bytes = self.stages * self.weight_tile.bytes
        ring_bytes = weight_bytes + self.stages * self.token_tile.bytes
        size = max(ring_bytes, FP32_BYTES * cute.cosize(sums))
        shared = SmemAllocator()
        base = shared.allocate_array(Uint8, size, byte_alignment=ALIGN)
        full = barrier.allocate(shared, self._barriers * self.stages)
        empty = full + self.stages
        return Ring(
            weights=self.weight_tile.shared(base, self.stages),
            tokens=self.token_tile.shared(base + weight_bytes, self.stages),
            sums=cute.make_tensor(cute.recast_ptr(base, dtype=Float32), sums),
            full=full,
            empty=empty,
            landed=empty + self.stages if self.window else full,
        )

    # -- the warp that requests weights -----------------------------------------------------

    @cute.jit
    def request_weights(self, ring: Ring, w: tuple):
        """Makes the barriers ready and requests the weights of the first stages.

        The other warps use the ring behind a barrier of the CTA; behind that `request_rest`
        requests all others.
        """
        prefetch_map(w)
        with cute.arch.elect_one():
            # Every lane that copies tokens, and the announcement of the weights' bytes.
            tokens, weights = self.copying_warps * reduce.WARP, 1
            both = tokens if self.window else tokens + weights
            barrier.make_ready(ring.full, self.stages, both)
            if cutlass.const_expr(self.window):
                barrier.make_ready(ring.landed, self.stages, weights)
            barrier.make_ready(ring.empty, self.stages, self.warps * barrier.WARP_ARRIVALS)
            barrier.fence_ready()
        cute.arch.sync_warp()
        for chunk in cutlass.range_constexpr(self.in_flight):
            self._request_weights(ring, w, chunk, chunk)

    @cute.jit
    def request_rest(self, ring: Ring, w: tuple):
        """Requests the weights of every later stage as earlier ones land and the ring empties.

        Weights are no kernel's result: this may stand ahead of the wait.
        """
        for chunk in cutlass.range(self.in_flight, self.chunks, unroll=1):
            stage = chunk % self.stages
            if cutlass.const_expr(self.window):
                before = chunk - self.in_flight
                barrier.wait(ring.landed + before % self.stages, before // self.stages % 2)
            # Of a stage's first turn this asks for the phase before the first: over at once.
            barrier.wait(ring.empty + stage, (chunk // self.stages + 1) % 2)
            self._request_weights(ring, w, chunk, stage)

    @cute.jit
    def _request_weights(self, ring: Ring, w: tuple, chunk, stage):
        """Announces the bytes of a stage's weights and requests them."""
        landed = ring.landed + stage
        with cute.arch.elect_one():
            barrier.expect(landed, self.weight_tile.bytes)
        tile = ring.weights[None, stage]
        self.weight_tile.copy(w, self._output_tile(), chunk, tile, landed, once=True)

    def _output_tile(self):
        return cute.arch.block_idx()[0]

    def _token_tile(self):
        return cute.arch.block_idx()[1]

    # -- the warps that copy tokens ----------------------------------------------------------

    def copies(self, warp):
        """Whether this warp copies tokens; it is none that multiplies."""
        return warp > REQUESTING_WARP

    @cute.jit
    def copy_tokens(self, ring: Ring, x: cute.Tensor):
        """Copies the tokens of every stage, x is BF16 [tokens, inputs], as the ring empties.

        Neighbouring lanes copy neighbouring words, up to a whole row of a stage. Each lane arrives
        at the stage's barrier once its own copies have landed.
        """
        words = self.stage_columns // memory.BF16_VECTOR  # of a row of a stage
        rows = reduce.WARP // words  # that a warp copies at once
        step = self.copying_warps * rows
        first = (cute.arch.warp_idx() - 1) * rows + cute.arch.lane_idx() // words
        word = cute.arch.lane_idx() % words
        row = self._token_tile() * self.tokens + first
        left = x.shape[0] - row
        source = memory.vector_at(x[row, None], word, memory.BF16_VECTOR).iterator
        for chunk in cutlass.range(self.chunks, unroll=1):
            stage = chunk % self.stages
            # Of a stage's first turn this asks for the phase before the first: over at once.
            barrier.wait(ring.empty + stage, (chunk // self.stages + 1) % 2)
            tile = ring.tokens[None, stage].iterator
            for place in cutlass.range_constexpr(0, self.tokens, step):
                copy_async.copy_bytes(
                    source + (place * self.inputs + chunk * self.stage_columns),
                    tile + self.token_tile.word_place(first + place, word) * memory.BF16_VECTOR,
                    condition=place < left,
                )
            copy_async.arrive_when_done(ring.full + stage)

    # -- the multiplying warps -------------------------------------------------------------

    def zero_sums(self) -> cute.Tensor:
        """Registers for the sums of a warp: (outputs / 16, tokens / 8, fragment)."""
        shape = (WARP_ROWS // mma.TILE_M, self.tokens // mma.TILE_N, mma.FRAGMENT)
        sums = cute.make_rmem_tensor(shape, Float32)
        sums.fill(0.0)
        return sums

    def _warp(self):
        """Place of this warp among those that multiply."""
        return cute.arch.warp_idx() - (1 + self.copying_warps)

    def multiplies(self, warp):
        """Whether this warp multiplies."""
        return warp > REQUESTING_WARP + self.copying_warps

    @cute.jit
    def multiply(self, ring: Ring, sums: cute.Tensor):
        """Multiplies the stages as they come in and adds to `sums`."""
        warp = self._warp()
        group, group_lane = mma.fragment_place(cute.arch.lane_idx())
        m_tiles, n_tiles, _ = sums.shape
        # Halves of a fragment past the last output repeat its last rows; nobody stores their sums.
        first_row = warp % self.row_groups * WARP_ROWS
        halves = [
            cutlass.min(first_row + half, self.tile_n - mma.HALF_M)
            for half in range(0, WARP_ROWS, mma.HALF_M)
        ]
        first_slice = warp // self.row_groups * self.warp_slices
        for chunk in cutlass.range(self.chunks, unroll=1):
            stage = chunk % self.stages
            if cutlass.const_expr(self.window):
                barrier.wait(ring.landed + stage, chunk // self.stages % 2)
            barrier.wait(ring.full + stage, chunk // self.stages % 2)
            weights, tokens = ring.weights[None, stage], ring.tokens[None, stage]
            for step in cutlass.range_constexpr(self.warp_slices):
                place = first_slice + step, group, group_lane
                rows = [self.weight_tile.load_words(weights, half, *place) for half in halves]
                for n in cutlass.range_constexpr(n_tiles):
                    token = self.token_tile.load_words(tokens, n * mma.TILE_N, *place)
                    for m in cutlass.range_constexpr(m_tiles):
                        old = [sums[m, n, i] for i in range(mma.FRAGMENT)]
                        new = mma.mma_slice(rows[2 * m], rows[2 * m + 1], token, old)
                        for i in cutlass.range_constexpr(mma.FRAGMENT):
                            sums[m, n, i] = new[i]
            barrier.arrive_as_warp(ring.empty + stage)

    @cute.jit
    def keep(self, ring: Ring, sums: cute.Tensor):
        """Stores a warp's sums over the ring, which every warp must have read to its end."""
        warp = self._warp()
        group, group_lane = mma.fragment_place(cute.arch.lane_idx())
        m_tiles, n_tiles, _ = sums.shape
        mine = ring.sums[warp // self.row_groups, None, None]
        by_output = cute.make_tensor(mine.iterator, cute.select(mine.layout, mode=[1, 0]))
        for m in cutlass.range_constexpr(m_tiles):
            for n in cutlass.range_constexpr(n_tiles):
                place = (warp % self.row_groups * m_tiles + m, n)
                target = cute.local_tile(by_output, (mma.TILE_M, mma.TILE_N), place)
                values = [sums[m, n, i] for i in range(mma.FRAGMENT)]
                mma.store_fragment(values, target, group, group_lane)

    # -- the sum ---------------------------------------------------------------------------

    @cute.jit
    def store(self, ring: Ring, y: cute.Tensor):
        """Adds up what the warps have kept, rounds it and stores it."""
        parts = self.tile_n // self.width
        first = cute.arch.thread_idx()[0]
        for share in cutlass.range(first, self.tokens * parts, self.threads, unroll=1):
            token, part = share // parts, share % parts
            row = self._token_tile() * self.tokens + token
            column = self._output_tile() * parts + part
            if row < y.shape[0] and column < self.outputs // self.width:
                total = memory.load_float(ring.sums[0, token, None], part, self.width)
                for group in cutlass.range_constexpr(1, self.column_groups):
                    kept = memory.load_float(ring.sums[group, token, None], part, self.width)
                    total = total + kept
                memory.vector_at(y[row, None], column, self.width).store(total.to(BFloat16))
