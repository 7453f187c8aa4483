"""Product of a few tokens with a large weight matrix, bound by how fast the weights stream in.

    y[token, output] = BF16(sum over k of x[token, k] * w[output, k])        FP32 accumulation

Tile     A CTA makes `tile_n` outputs of `tokens` tokens. With `split_k` the columns are divided
         between the CTAs of a cluster, each keeps FP32 sums of its share.
Loads    One warp requests bulk copies into a ring in shared memory: a stage holds `stage_k`
         columns of the tile's weights and of its tokens. The ring fills the shared memory, so
         that enough bytes are in flight; where a whole tile fits there is a stage for all of it.
Product  The other warps share a stage: groups of WARP_ROWS outputs, times groups of columns.
         Weights are A of the tensor cores and tokens are B, so that eight tokens cost one tile.
Sum      Over the groups of columns and the ranks of the cluster in that order; the same bits in
         every run.

Rows of the ring are ROW_PAD elements further apart than they are long: the 16-byte loads of two
neighbouring rows then touch different banks. Rows past the last output or token are not loaded;
what shared memory holds there reaches sums that are not stored, and no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

import cutlass
from cutlass import BFloat16, Float32, Int64, Uint8, cute
from cutlass.memory import SmemAllocator

from . import bulk, cluster, memory, mma, reduce

WARPS = 8
"""Warps that multiply; one more requests the copies."""
REQUESTING_WARP = WARPS
THREADS = (WARPS + 1) * reduce.WARP
WARP_ROWS = 2 * mma.TILE_M
"""Outputs of a warp."""
ROW_PAD = mma.K_SLICE
SUM_PAD = 4
"""FP32 words behind the outputs of one token: fragments then hit distinct banks."""
BF16_BYTES = 2
SHARED_BYTES = 227 * 1024
"""Shared memory that a CTA may have."""
BARRIER_ROOM = 512
MAX_TOKENS = 64
MAX_SPLIT = 8
STAGE_COLUMNS = (1024, 768, 512, 256)
"""Columns of a stage, best first; fewer where the columns of a CTA are fewer."""
MIN_STAGES = 4


@dataclass(frozen=True)
class Ring:
    """A CTA's shared memory and place in the product, as the device functions pass it on."""

    weights: cute.Tensor  # BF16 [stage, output, column]
    tokens: cute.Tensor  # BF16 [stage, token, column]
    sums: cute.Tensor  # FP32 [group of columns, token, output]; over the stages, after them
    full: cute.Pointer  # barrier of a stage: its bytes have landed
    empty: cute.Pointer  # barrier of a stage: every warp has read it


@dataclass(frozen=True)
class SkinnyGemm:
    """Shape of the product and of its tiles; everything is known when the kernel is compiled.

    outputs, inputs: extents of the weights, BF16 [outputs, inputs].
    tile_n:          outputs of a CTA, a multiple of 8.
    split_k:         CTAs that share the columns, a cluster.
    tokens:          tokens of a CTA: 8, 16, 32 or 64. More of them take more CTAs, which load
                     the weights again.
    stage_k:         columns of a stage; 0 chooses.

    Raises ValueError for a tile that the kernel is not written for.
    """

    outputs: int
    inputs: int
    tile_n: int
    split_k: int
    tokens: int
    stage_k: int = 0

    def __post_init__(self) -> None:
        if self.tile_n % mma.TILE_N or not 0 < self.tile_n <= WARPS * WARP_ROWS:
            limit = WARPS * WARP_ROWS
            raise ValueError(f"tile_n {self.tile_n} is not a multiple of 8 from 8 to {limit}")
        if self.tokens not in (8, 16, 32, 64):
            raise ValueError(f"tokens {self.tokens} is not one of 8, 16, 32, 64")
        splits = [n for n in (1, 2, 4, 8) if self.inputs % (n * mma.K_SLICE) == 0]
        if self.split_k not in splits:
            known = ", ".join(map(str, splits))
            raise ValueError(
                f"split_k {self.split_k} does not divide {self.inputs} columns into slices of "
                f"{mma.K_SLICE}; choose from {known or 'none'}"
            )
        if self.split_k > 1 and self.width < cluster.WIDTH:
            raise ValueError(
                f"split_k {self.split_k} needs outputs in fours, not {self.outputs} by tiles of "
                f"{self.tile_n}"
            )
        if self.stages < min(2, self.chunks):
            raise ValueError(
                f"tile_n {self.tile_n} with tokens {self.tokens} leaves no room in shared memory "
                "for two stages"
            )

    # -- shape -----------------------------------------------------------------------------

    @property
    def columns(self) -> int:
        """Columns of a CTA."""
        return self.inputs // self.split_k

    @cached_property
    def stage_columns(self) -> int:
        """Columns of a stage."""
        if self.stage_k:
            return self.stage_k
        for size in STAGE_COLUMNS:
            if self.columns % size == 0 and self._stages(size) >= min(
                MIN_STAGES, self.columns // size
            ):
                return size
        return gcd(self.columns, STAGE_COLUMNS[-1])

    @property
    def chunks(self) -> int:
        """Stages that a CTA goes through."""
        return self.columns // self.stage_columns

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return self._stages(self.stage_columns)

    @property
    def row_groups(self) -> int:
        """Groups of WARP_ROWS outputs; the last may be partly empty."""
        return -(-self.tile_n // WARP_ROWS)

    @property
    def _stage_rows(self) -> int:
        """Rows of a stage; a group of outputs that is partly empty reads on into the tokens."""
        return max(self.tile_n + self.tokens, self.row_groups * WARP_ROWS)

    @property
    def column_groups(self) -> int:
        """Groups of warps that divide the columns of a stage between them."""
        return gcd(self.stage_columns // mma.K_SLICE, WARPS // self.row_groups)

    @property
    def warp_slices(self) -> int:
        """Slices of the tensor cores that a warp takes from a stage."""
        return self.stage_columns // mma.K_SLICE // self.column_groups

    @property
    def grid_x(self) -> int:
        """CTAs that share one tile of tokens."""
        return -(-self.outputs // self.tile_n) * self.split_k

    @property
    def width(self) -> int:
        """Outputs of one store."""
        return gcd(cluster.WIDTH, self.outputs, self.tile_n)

    def grid(self, tokens) -> list:
        """CTAs for that many tokens."""
        return [self.grid_x, cute.ceil_div(tokens, self.tokens), 1]

    def cluster(self) -> list[int] | None:
        """CTAs that start together."""
        return [self.split_k, 1, 1] if self.split_k > 1 else None

    def _stages(self, size: int) -> int:
        stage_bytes = self._stage_rows * (size + ROW_PAD) * BF16_BYTES
        return min(self.columns // size, (SHARED_BYTES - BARRIER_ROOM) // stage_bytes)

    # -- shared memory ---------------------------------------------------------------------

    @cute.jit
    def make_ring(self) -> Ring:
        """Lays out shared memory and initialises the barriers; all threads call it together."""
        pitch = self.stage_columns + ROW_PAD
        stage = self._stage_rows * pitch
        sum_pitch = self.row_groups * WARP_ROWS + SUM_PAD
        ring_bytes = self.stages * stage * BF16_BYTES
        sum_bytes = self.column_groups * self.tokens * sum_pitch * 4
        shared = SmemAllocator()
        base = shared.allocate_array(Uint8, max(ring_bytes, sum_bytes), byte_alignment=128)
        barriers = shared.allocate_array(Int64, 2 * self.stages)
        if cute.arch.thread_idx()[0] == 0:
            bulk.make_ready(barriers, self.stages, 1)
            bulk.make_ready(barriers + self.stages, self.stages, self.warps)
            bulk.fence_ready()
        cute.arch.sync_threads()
        weights = cute.recast_ptr(base, dtype=BFloat16)

        def rows(first, count):
            layout = cute.make_layout(
                (self.stages, count, self.stage_columns), stride=(stage, pitch, 1)
            )
            return cute.make_tensor(weights + first * pitch, layout)

        sum_layout = cute.make_layout(
            (self.column_groups, self.tokens, self.row_groups * WARP_ROWS),
            stride=(self.tokens * sum_pitch, sum_pitch, 1),
        )
        return Ring(
            weights=rows(0, self.tile_n),
            tokens=rows(self.tile_n, self.tokens),
            sums=cute.make_tensor(cute.recast_ptr(base, dtype=Float32), sum_layout),
            full=barriers,
            empty=barriers + self.stages,
        )

    @property
    def warps(self) -> int:
        """Warps that multiply."""
        return self.row_groups * self.column_groups

    # -- the requesting warp ---------------------------------------------------------------

    @cute.jit
    def request_weights(self, ring: Ring, x: cute.Tensor, w: cute.Tensor):
        """Requests the weights of the stages that the ring holds, and nothing else."""
        for chunk in cutlass.range_constexpr(self.stages):
            self._expect(ring, x, chunk)
            self._request_weights(ring, w, chunk, chunk)

    @cute.jit
    def request_rest(self, ring: Ring, x: cute.Tensor, w: cute.Tensor):
        """Requests the tokens of those stages, then every later stage as the ring empties."""
        for chunk in cutlass.range_constexpr(self.stages):
            self._request_tokens(ring, x, chunk, chunk)
        for chunk in cutlass.range(self.stages, self.chunks, unroll=1):
            stage = chunk % self.stages
            bulk.wait(ring.empty + stage, (chunk // self.stages - 1) % 2)
            self._expect(ring, x, stage)
            self._request_weights(ring, w, chunk, stage)
            self._request_tokens(ring, x, chunk, stage)

    @cute.jit
    def _expect(self, ring: Ring, x: cute.Tensor, stage):
        """Announces the bytes of a stage; the other lanes request none before."""
        outputs = cutlass.min(self.outputs - self._first_output(), self.tile_n)
        tokens = cutlass.min(x.shape[0] - self._first_token(), self.tokens)
        if cute.arch.lane_idx() == 0:
            size = (outputs + tokens) * (self.stage_columns * BF16_BYTES)
            bulk.expect(ring.full + stage, size)
        cute.arch.sync_warp()

    def _request_weights(self, ring: Ring, w: cute.Tensor, chunk, stage):
        target, barrier = ring.weights[stage, None, None], ring.full + stage
        self._copy_rows(w, self._first_output(), chunk, target, barrier, once=True)

    def _request_tokens(self, ring: Ring, x: cute.Tensor, chunk, stage):
        target, barrier = ring.tokens[stage, None, None], ring.full + stage
        self._copy_rows(x, self._first_token(), chunk, target, barrier, once=False)

    @cute.jit
    def _copy_rows(
        self,
        source: cute.Tensor,
        first,
        chunk,
        target: cute.Tensor,
        barrier: cute.Pointer,
        once: bool,
    ):
        """Copies the columns of `chunk` of the rows from `first` on that exist, one row a lane."""
        place = self._rank() * self.chunks + chunk
        count = target.shape[0]
        for start in cutlass.range_constexpr(0, count, reduce.WARP):
            row = start + cute.arch.lane_idx()
            if row < count and first + row < source.shape[0]:
                run = cute.local_tile(source[first + row, None], (self.stage_columns,), (place,))
                bulk.copy_run(run, target[row, None], barrier, once)

    def _first_output(self):
        return cute.arch.block_idx()[0] // self.split_k * self.tile_n

    def _first_token(self):
        return cute.arch.block_idx()[1] * self.tokens

    def _rank(self):
        """Place of this CTA among those that share the columns."""
        return cute.arch.block_idx()[0] % self.split_k

    # -- the multiplying warps -------------------------------------------------------------

    def zero_sums(self) -> cute.Tensor:
        """Registers for the sums of a warp: (outputs / 16, tokens / 8, fragment)."""
        shape = (WARP_ROWS // mma.TILE_M, self.tokens // mma.TILE_N, mma.FRAGMENT)
        sums = cute.make_rmem_tensor(shape, Float32)
        sums.fill(0.0)
        return sums

    @cute.jit
    def multiply(self, ring: Ring, sums: cute.Tensor):
        """Multiplies the stages as they come in and adds to `sums`."""
        warp = cute.arch.warp_idx()
        group, group_lane = mma.fragment_place(cute.arch.lane_idx())
        first_row = warp % self.row_groups * WARP_ROWS
        first_slice = warp // self.row_groups * self.warp_slices
        m_tiles, n_tiles, _ = sums.shape
        for chunk in cutlass.range(self.chunks, unroll=1):
            stage = chunk % self.stages
            bulk.wait(ring.full + stage, chunk // self.stages % 2)
            for step in cutlass.range_constexpr(self.warp_slices):
                word = (first_slice + step) * mma.GROUP_LANES + group_lane
                halves = [
                    memory.load_words(ring.weights[stage, first_row + half + group, None], word)
                    for half in range(0, WARP_ROWS, mma.HALF_M)
                ]
                for n in cutlass.range_constexpr(n_tiles):
                    token = memory.load_words(
                        ring.tokens[stage, n * mma.TILE_N + group, None], word
                    )
                    for m in cutlass.range_constexpr(m_tiles):
                        old = [sums[m, n, place] for place in range(mma.FRAGMENT)]
                        new = mma.mma_slice(halves[2 * m], halves[2 * m + 1], token, old)
                        for place in cutlass.range_constexpr(mma.FRAGMENT):
                            sums[m, n, place] = new[place]
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                bulk.arrive(ring.empty + stage)

    @cute.jit
    def keep(self, ring: Ring, sums: cute.Tensor):
        """Stores a warp's sums over the ring, which every warp must have read to its end."""
        warp = cute.arch.warp_idx()
        group, group_lane = mma.fragment_place(cute.arch.lane_idx())
        mine = ring.sums[warp // self.row_groups, None, None]
        by_output = cute.make_tensor(mine.iterator, cute.select(mine.layout, mode=[1, 0]))
        for m in cutlass.range_constexpr(sums.shape[0]):
            for n in cutlass.range_constexpr(sums.shape[1]):
                place = (warp % self.row_groups * sums.shape[0] + m, n)
                target = cute.local_tile(by_output, (mma.TILE_M, mma.TILE_N), place)
                mma.store_fragment(
                    [sums[m, n, i] for i in range(mma.FRAGMENT)], target, group, group_lane
                )

    # -- the sum ---------------------------------------------------------------------------

    def sync(self) -> None:
        """Barrier over the CTAs that share the columns."""
        if self.split_k > 1:
            cluster.sync()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def store(self, ring: Ring, y: cute.Tensor):
        """Adds up what the warps and ranks have kept, rounds it and stores it."""
        parts = self.tile_n // self.width
        first = self._rank() * THREADS + cute.arch.thread_idx()[0]
        for share in cutlass.range(first, self.tokens * parts, self.split_k * THREADS, unroll=1):
            token, part = share // parts, share % parts
            row = self._first_token() + token
            column = self._first_output() // self.width + part
            if row < y.shape[0] and column < self.outputs // self.width:
                groups = self._kept(ring.sums[None, token, None], part)
                total = groups[0]
                for group in groups[1:]:
                    total = total + group
                memory.vector_at(y[row, None], column, self.width).store(total.to(BFloat16))

    def _kept(self, sums: cute.Tensor, part) -> list[cute.TensorSSA]:
        """The `part`-th run of outputs from (group, output), of every rank and group in order."""
        groups = [sums[group, None] for group in range(self.column_groups)]
        if self.split_k == 1:
            return [memory.load_float(row, part, self.width) for row in groups]
        return [
            cluster.load_float(row, part, rank) for rank in range(self.split_k) for row in groups
        ]

    def end(self) -> None:
        """Keeps this CTA's shared memory until its cluster has read it."""
        if self.split_k > 1:
            cluster.sync()
