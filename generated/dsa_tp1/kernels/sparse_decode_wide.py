"""Generated from pipelines/dsa_tp1.yaml; do not edit.

Sparse attention core for 64 heads and more: every row's heads over its selected cache rows.

    S[h, j] = query[row, h] . key[j],  j < min(valid[row], TOP_K); key j: cache row selected[row, j]
    P       = exp2(S * c - m),  c = SOFTMAX_SCALE * q_scale * k_scale * log2(e)
    out     = BF16(k_scale * sum over j of P[h, j] * key[j][:KV_LORA] / sum over j of P[h, j])

A row without keys gives exactly 0. No cache row but the selected ones is read.

Grid     (splits, rows, tiles of 64 heads by `parts` of the columns); the `splits` CTAs of a row,
         tile and part are a cluster. CTA s takes groups s, s + splits, ... of GROUP keys.
Warps    GATHER_WARPS load rows and store them as F16 in blocks that wgmma reads both ways, two
         groups of keys deep. SCORE_WARPS multiply the query with a group's keys and store their
         weights P. VALUE_WARPS, four for a share of the part's columns, add P times the group's
         values to the sums that they hold. P refers to the running maximum, rounded up to an
         integer: sums are moved to another one by an exact power of two, and seldom have to be.
Merge    each CTA of the cluster loads its peers' sums of the columns that it owns, and adds them in
         the order of the CTAs.
Wait     the scales are loaded before it, all else behind it. Released right behind it.
Rounding P to F16 (its sum is taken before), the result to BF16. FP32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import cutlass
from cutlass import Float32, Int64, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import (
    barrier,
    cluster,
    memory,
    mma,
    operand_blocks,
    pdl,
    reduce,
    scalar,
    warpgroup,
    wgmma,
    wide_rows,
    wide_softmax,
)
from kpipe.runtime.device.key_groups import KeyGroups
from kpipe.runtime.device.wide_gather import WARP_ROWS, WideGather
from kpipe.runtime.device.wide_results import WideResults
from kpipe.runtime.device.wide_softmax import GROUP
from kpipe.runtime.device.wide_stages import SHARES, Stages
from kpipe.runtime.device.wide_sums import WideSums
from kpipe.runtime.host.compile import Symbol, TensorSpec

HEADS = 96
KV_LORA = 512
PE = 64
TOP_K = 2048
PAGE = 64  # tokens of a cache page
SOFTMAX_SCALE = 0.07216878364870322

ROWS = wide_rows.FORMATS["fp8_tensor"](KV_LORA, PE)
TILES = -(-HEADS // wgmma.ROWS)
VALUE_GROUPS = -(-KV_LORA // wgmma.MAX_COLUMNS)
PARTS = (1, 2, 4)

SCORE_WARPS = wgmma.WARPS
VALUE_WARPS = VALUE_GROUPS * wgmma.WARPS
GATHER_WARPS = SHARES
GATHER = WideGather(ROWS, GATHER_WARPS)
THREADS = (SCORE_WARPS + VALUE_WARPS + GATHER_WARPS) * reduce.WARP
# Registers of a thread; a value warp holds 16 rows of up to wgmma.MAX_COLUMNS sums.
SCORE_REGISTERS = 72
VALUE_REGISTERS = 160
GATHER_REGISTERS = 120


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows = Symbol("rows")
    # A block may lie among other layers' blocks; row * row_bytes passes 2^31 in a large cache.
    page_stride = Symbol("page_stride", multiple=memory.VECTOR_BYTES, bits=64)
    row_bytes = ROWS.row_bytes
    return (
        TensorSpec("latent_kv", "u8", (None, PAGE, row_bytes), (page_stride, row_bytes, 1)),
        TensorSpec("selected", "i32", (rows, TOP_K)),
        TensorSpec("valid", "i32", (rows,), align=4),
        TensorSpec("q_scale", "fp32", (1,), align=4),
        TensorSpec("k_scale", "fp32", (1,), align=4),
        TensorSpec("query", ROWS.query_dtype, (rows, HEADS, KV_LORA + PE)),
        TensorSpec("latent", "bf16", (rows, HEADS, KV_LORA)),
    )


@dataclass(frozen=True)
class SparseDecodeWide:
    """Softmax attention of every row over its selected keys.

    release: let the dependent grid start right behind the wait.
    pdl:     launch with the attribute that lets this grid start before its predecessor ends.
    splits:  CTAs that share the keys of a row, at most 16. More than 8 need a GPU with room for
             such a cluster.
    parts:   shares of the columns that clusters of their own sum up: 1, 2 or 4. Each computes all
             scores; what a CTA sends to its peers shrinks, which pays where SMs are idle.
    dcp:     runs every rank's heads over the local shard; this file has one form only.
    """

    release: bool = True
    pdl: bool = True
    splits: int = 8
    parts: int = 1
    dcp: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.splits <= cluster.MAX_CTAS:
            raise ValueError(f"splits {self.splits} is not within 1..{cluster.MAX_CTAS}")
        if self.parts not in PARTS:
            raise ValueError(f"parts {self.parts} is none of {', '.join(map(str, PARTS))}")
        if self.dcp:
            raise ValueError("dcp=True: this kernel was generated without context parallelism")

    @property
    def groups(self) -> KeyGroups:
        """Which CTA takes which keys."""
        return KeyGroups(self.splits, GROUP)

    @property
    def tiles(self) -> int:
        """Tiles of 8 columns that a value warp sums up."""
        return KV_LORA // self.parts // VALUE_GROUPS // mma.TILE_N

    @cute.jit
    def __call__(
        self,
        latent_kv: cute.Tensor,
        selected: cute.Tensor,
        valid: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        query: cute.Tensor,
        latent: cute.Tensor,
        stream,
    ):
        self.sparse_decode_wide(
            latent_kv=latent_kv,
            selected=selected,
            valid=valid,
            q_scale=q_scale,
            k_scale=k_scale,
            query=query,
            result=latent,
        ).launch(
            grid=[self.splits, selected.shape[0], TILES * self.parts],
            block=[THREADS, 1, 1],
            cluster=[self.splits, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def sparse_decode_wide(
        self,
        latent_kv: cute.Tensor,
        selected: cute.Tensor,
        valid: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        query: cute.Tensor,
        result: cute.Tensor,
    ):
        split, row, place = cute.arch.block_idx()
        tile, part = place // self.parts, place % self.parts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        first_head = tile * wgmma.ROWS
        shared = SmemAllocator()
        stages = Stages.allocate(shared, ROWS.blocks)
        sums = WideSums.over(
            VALUE_GROUPS * self.tiles, self.splits, stages.arena.iterator, stages.masses
        )
        if cute.arch.thread_idx()[0] == 0:
            stages.initialise(GATHER_WARPS, SCORE_WARPS, VALUE_WARPS)
        cute.arch.sync_threads()
        query_scale, key_scale = q_scale[0], k_scale[0]

        pdl.wait()
        if self.release:
            pdl.release()
        if warp < SCORE_WARPS:
            cute.arch.setmaxregister_decrease(SCORE_REGISTERS)
            count = self._count(valid, row)
            scale = query_scale * key_scale * Float32(SOFTMAX_SCALE * log2(e))
            self._score(count, split, scale, stages, warp, lane)
            if cutlass.const_expr(self.splits > 1):
                self._let_merge()
        elif warp < SCORE_WARPS + VALUE_WARPS:
            cute.arch.setmaxregister_increase(VALUE_REGISTERS)
            value_warp = warp - SCORE_WARPS
            self._load_query(query[row, None, None], first_head, stages, value_warp, lane)
            count = self._count(valid, row)
            total = self._sum_values(count, split, part, stages, value_warp, lane)
            results = WideResults(
                heads=HEADS,
                first_head=first_head,
                first_tile=part * (VALUE_GROUPS * self.tiles),
                result=result[row, None, None],
                lse=None,
                count=count,
                key_scale=key_scale,
            )
            if cutlass.const_expr(self.splits == 1):
                results.store(total, stages.masses, value_warp, lane)
            else:
                sums.store(total, value_warp, lane)
                cluster.sync()
                results.merge(sums, split, VALUE_WARPS, value_warp, lane)
                cluster.start()
        else:
            cute.arch.setmaxregister_decrease(GATHER_REGISTERS)
            gather_warp = warp - SCORE_WARPS - VALUE_WARPS
            indices = selected[row, None]
            asked = GATHER.ask(indices, self.groups, split, gather_warp, lane)
            GATHER.fill(
                latent_kv.iterator,
                indices,
                asked,
                self._count(valid, row),
                self.groups,
                split,
                stages,
                gather_warp,
                lane,
            )
            if cutlass.const_expr(self.splits > 1):
                self._let_merge()

    def _let_merge(self) -> None:
        """What the other warps do while those of the values merge: their stores lie behind `done`,
        for which these have waited, and no CTA ends before its peers have read.
        """
        cluster.start()
        cluster.start()

    def _count(self, valid: cute.Tensor, row):
        """Keys of a row; each kind of warp loads it behind what need not wait for it."""
        return cutlass.min(cutlass.Int32(wide_rows.load_index(valid.iterator + row)), TOP_K)

    @cute.jit
    def _load_query(self, heads: cute.Tensor, first_head, stages: Stages, warp, lane):
        """Puts the query into its blocks, four lanes a head; heads past the end repeat the last."""
        row_lane = lane % wide_rows.LANES
        for turn in cutlass.range_constexpr(wgmma.ROWS // (VALUE_WARPS * WARP_ROWS)):
            place = (turn * VALUE_WARPS + warp) * WARP_ROWS + lane // wide_rows.LANES
            head = cutlass.min(first_head + place, HEADS - 1)
            source = heads[head, None].iterator
            ROWS.convert_query(source, stages.query, place, row_lane, stages.head_scales)
        warpgroup.fence_operand()
        barrier.arrive_as_warp(stages.asked)

    @cute.jit
    def _score(self, count, split, scale: Float32, stages: Stages, warp, lane):
        """Weights of all groups of this CTA; then each row's maximum and mass."""
        group, group_lane = mma.fragment_place(lane)
        row = warp * mma.TILE_M + group
        top = cute.make_rmem_tensor((wide_softmax.SIDES,), Float32)
        mass = cute.make_rmem_tensor((wide_softmax.SIDES,), Float32)
        references = cute.make_rmem_tensor((wide_softmax.SIDES,), Float32)
        top.fill(-Float32.inf)
        mass.fill(0.0)
        references.fill(-Float32.inf)
        barrier.wait_soon(stages.asked, 0)
        query = operand_blocks.descriptor(stages.query)
        for order in cutlass.range(self.groups.of(count, split), unroll=1):
            stages.wait_ready(order)
            keys = operand_blocks.descriptor(stages.keys(order))
            key_scales = stages.scales_of(order)
            head_scales = [stages.head_scales[row + side * mma.HALF_M] for side in range(2)]
            scores = ROWS.scores(query, keys, key_scales, head_scales, group_lane)
            if order > 0:
                # Earlier, both products would share the tensor cores, and these stand idle while
                # the weights are computed.
                barrier.arrive_as_warp(stages.scored)
            present = count - self.groups.first_key(order, split)
            weights = wide_softmax.soften(scores, present, scale, top, mass, group_lane)
            moves = ROWS.weigh(weights, top, references, key_scales, group_lane)
            if order > 0:
                stages.wait_free(order - 1)
            wide_softmax.store_weights(weights, stages.weights, row, group_lane)
            if group_lane == 0:
                for side in cutlass.range_constexpr(wide_softmax.SIDES):
                    stages.moves[row + side * mma.HALF_M] = moves[side]
            warpgroup.fence_operand()
        if self.groups.of(count, split) > 0:
            barrier.arrive_as_warp(stages.scored)
        for side in cutlass.range_constexpr(wide_softmax.SIDES):
            mass[side] = reduce.lanes_sum(mass[side], mma.GROUP_LANES)
            # Before the first key both are -inf.
            last = cute.arch.exp2(references[side] - top[side])
            last = scalar.select(references[side] == top[side], Float32(1.0), last)
            if group_lane == 0:
                for place, value in enumerate((top[side], mass[side], last)):
                    stages.masses[row + side * mma.HALF_M, place] = value
        barrier.arrive_as_warp(stages.done)

    @cute.jit
    def _sum_values(self, count, split, part, stages: Stages, warp, lane):
        """Sums of P times this warpgroup's columns over all groups of this CTA: C fragments."""
        group = mma.fragment_place(lane)[0]
        row = warp % wgmma.WARPS * mma.TILE_M + group
        share = part * VALUE_GROUPS + warp // wgmma.WARPS
        blocks = self.tiles * mma.TILE_N // operand_blocks.COLUMNS
        total = cute.make_rmem_tensor((self.tiles * mma.FRAGMENT,), Float32)
        total.fill(0.0)
        weights = operand_blocks.descriptor(stages.weights)
        for order in cutlass.range(self.groups.of(count, split), unroll=1):
            stages.wait_ready(order)
            stages.wait_scored(order)
            moves = [stages.moves[row + side * mma.HALF_M] for side in range(2)]
            if cute.arch.vote_any_sync((moves[0] != 1.0) | (moves[1] != 1.0)):
                self._multiply(total, moves)
            first_block = stages.keys(order) + share * (blocks * operand_blocks.BYTES)
            values = operand_blocks.descriptor(first_block)
            self._add(total, weights, values, stages.free_of(order))
        barrier.arrive_as_warp(stages.done)
        barrier.wait_soon(stages.done, 0)
        if cutlass.const_expr(not ROWS.tensor_scaled):
            self._multiply(total, [stages.masses[row + s * mma.HALF_M, 2] for s in range(2)])
        return total

    def _add(self, total: cute.Tensor, weights: Int64, values: Int64, free: cute.Pointer) -> None:
        """Adds the products of the weights with the values behind two descriptors.

        Gives the stage back, a share of its keys behind the other.
        """
        before = [total[place] for place in range(cute.size(total))]
        barriers = cutlass.Int32(free.toint())
        products = wgmma.add_column_products(before, weights, values, barriers)
        for place, value in enumerate(products):
            total[place] = value

    def _multiply(self, total: cute.Tensor, factors: list) -> None:
        """Multiplies the rows of C fragments, each with its side's factor."""
        for place in range(cute.size(total)):
            total[place] = total[place] * factors[place % mma.FRAGMENT // 2]
