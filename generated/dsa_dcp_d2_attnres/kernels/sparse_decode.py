"""Generated from pipelines/dsa_dcp_d2_attnres.yaml; do not edit.

Sparse attention core: every row's heads over the cache rows that its indexer selected.

    S[h, j] = query[row, h] . key[j],  j < min(valid[row], TOP_K); key j: cache row selected[row, j]
    P       = exp2(S * c - m),  c = SOFTMAX_SCALE * q_scale * k_scale * log2(e)
    out     = BF16(k_scale * sum over j of P[h, j] * key[j][:KV_LORA] / sum over j of P[h, j])
    lse     = log2(sum over j of P[h, j]) + m

A row without keys gives exactly 0 and -inf. No cache row but the selected ones is read.

Grid     (splits, rows, head tiles); the `splits` CTAs of a row are a cluster. CTA s takes groups s,
         s + splits, ... of GROUP keys.
Warps    GATHER_WARPS request the rows of every group, an equal share each, for a slot of a ring.
         SCORE_WARPS keep the query in registers; TEAM of them share a group, and the teams take
         groups in turn. VALUE_WARPS each sum KV_LORA / VALUE_WARPS columns over all groups. m is a
         score warp's own, an integer, so that moving P to a common maximum is an exact power of
         two; it moves only where a weight would pass 2^softmax.SLACK.
Merge    sums go to the CTA of the cluster that owns their columns, whose score and value warps add
         them in the order of the CTAs.
Wait     the scales are loaded before it, all else behind it. Released right behind it.
Rounding P to F16 (its sum is taken before), the result to BF16. FP32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import cutlass
from cutlass import BFloat16, Float32, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import (
    barrier,
    cluster,
    latent_rows,
    memory,
    mma,
    pdl,
    reduce,
    scalar,
    softmax,
    split_sums,
    value_sums,
)
from kpipe.runtime.device.gather import Gather
from kpipe.runtime.device.key_groups import KeyGroups
from kpipe.runtime.device.slots import TEAM, Slots, ring_slots, slot_bytes
from kpipe.runtime.device.split_sums import QUAD, QUADS, WINDOW, SplitSums
from kpipe.runtime.host.compile import Symbol, TensorSpec

HEADS = 96  # of all ranks
KV_LORA = 512
PE = 64
TOP_K = 2048
PAGE = 64  # tokens of a cache page
SOFTMAX_SCALE = 0.07216878364870322

ROWS = latent_rows.FORMATS["fp8_tensor"](KV_LORA, PE)
TILE_HEADS = min(HEADS, mma.TILE_M)
TILES = -(-HEADS // mma.TILE_M)
WINDOWS = KV_LORA // WINDOW

SCORE_WARPS = 4
VALUE_WARPS = 8 if WINDOWS % 16 == 0 else 4  # an even number of windows each
GATHER_WARPS = SCORE_WARPS
AHEAD = 2  # batches of groups whose indices a gathering warp holds
GATHER = Gather(ROWS.row_bytes, GATHER_WARPS, AHEAD)
TEAMS = SCORE_WARPS // TEAM
SCORE_OCTETS = softmax.OCTETS // TEAM
THREADS = (SCORE_WARPS + VALUE_WARPS + GATHER_WARPS) * reduce.WARP
WARP_WINDOWS = WINDOWS // VALUE_WARPS
# Registers of a thread. The query takes a quarter of a row's columns, the sums of the values half
# of a warp's.
SCORE_REGISTERS = 208
VALUE_REGISTERS = 128
GATHER_REGISTERS = 40
MERGING_WARPS = SCORE_WARPS + VALUE_WARPS
SCORE_BARRIER = 1
SHARED_BYTES = 227 * 1024
RESERVE = 2048  # of shared memory: the warps' masses, alignment


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
        TensorSpec("q_mail", ROWS.query_dtype, (None, HEADS, KV_LORA + PE)),
        TensorSpec("partial", "bf16", (rows, HEADS, KV_LORA)),
        TensorSpec("partial_lse", "fp32", (rows, HEADS), align=4),
    )


@dataclass(frozen=True)
class SparseDecode:
    """Softmax attention of every row over its selected keys.

    release: let the dependent grid start right behind the wait.
    pdl:     launch with the attribute that lets this grid start before its predecessor ends.
    splits:  CTAs that share the keys of a row, at most 16. More than 8 need a GPU with room for
             such a cluster.
    dcp:     runs every rank's heads over the local shard; this file has one form only.
    """

    release: bool = True
    pdl: bool = True
    splits: int = 8
    dcp: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.splits <= cluster.MAX_CTAS:
            raise ValueError(f"splits {self.splits} is not within 1..{cluster.MAX_CTAS}")
        self.slots  # noqa: B018  refuses rows of which shared memory holds too few
        if not self.dcp:
            raise ValueError("dcp=False: this kernel was generated for context parallelism")

    @property
    def groups(self) -> KeyGroups:
        """Who takes which keys."""
        return KeyGroups(self.splits)

    @property
    def slots(self) -> int:
        """Groups that a CTA's shared memory holds, or that it ever takes."""
        received = split_sums.received_bytes(WINDOWS, self.splits, TILE_HEADS)
        room = (SHARED_BYTES - RESERVE - received) // slot_bytes(ROWS.pitch)
        return ring_slots(room, self.groups.most(TOP_K), TEAMS)

    @cute.jit
    def __call__(
        self,
        latent_kv: cute.Tensor,
        selected: cute.Tensor,
        valid: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        q_mail: cute.Tensor,
        partial: cute.Tensor,
        partial_lse: cute.Tensor,
        stream,
    ):
        self.sparse_decode(
            latent_kv=latent_kv,
            selected=selected,
            valid=valid,
            q_scale=q_scale,
            k_scale=k_scale,
            query=q_mail,
            result=partial,
            result_lse=partial_lse,
        ).launch(
            grid=[self.splits, selected.shape[0], TILES],
            block=[THREADS, 1, 1],
            cluster=[self.splits, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def sparse_decode(
        self,
        latent_kv: cute.Tensor,
        selected: cute.Tensor,
        valid: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        query: cute.Tensor,
        result: cute.Tensor,
        result_lse: cute.Tensor,
    ):
        split, row, tile = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        thread = cute.arch.thread_idx()[0]
        first_head = tile * mma.TILE_M
        shared = SmemAllocator()
        slots = Slots.allocate(shared, self.slots, ROWS.pitch)
        sums = SplitSums.allocate(shared, WINDOWS, self.splits, TILE_HEADS)
        masses = memory.allocate(shared, Float32, SCORE_WARPS, mma.TILE_M, 2)
        if thread == 0:
            slots.initialise(GATHER_WARPS, VALUE_WARPS)
        if thread == THREADS - 1:
            sums.expect(split)
        cute.arch.sync_threads()
        cluster.announce()
        query_scale, key_scale = q_scale[0], k_scale[0]

        if warp < SCORE_WARPS:
            cute.arch.setmaxregister_increase(SCORE_REGISTERS)
            count = self._await_keys(valid, row)
            scale = query_scale * key_scale * Float32(SOFTMAX_SCALE * log2(e))
            heads = query[row, None, None]
            self._score(heads, first_head, count, split, scale, slots, masses, warp, lane)
            cluster.wait_for_all()
            sums.send_masses(masses, split, thread, SCORE_WARPS * reduce.WARP)
            self._merge(
                sums,
                count,
                key_scale,
                result[row, None, None],
                result_lse[row, None],
                first_head,
                split,
                thread,
            )
        elif warp < SCORE_WARPS + VALUE_WARPS:
            cute.arch.setmaxregister_decrease(VALUE_REGISTERS)
            count = self._await_keys(valid, row)
            value_warp = warp - SCORE_WARPS
            total = self._sum_values(count, split, slots, value_warp, lane)
            cluster.wait_for_all()
            value_sums.send(total, sums, split, value_warp, lane)
            self._merge(
                sums,
                count,
                key_scale,
                result[row, None, None],
                result_lse[row, None],
                first_head,
                split,
                thread,
            )
        else:
            cute.arch.setmaxregister_decrease(GATHER_REGISTERS)
            count = self._await_keys(valid, row)
            gather_warp = warp - SCORE_WARPS - VALUE_WARPS
            indices = selected[row, None]
            GATHER.fill(
                latent_kv.iterator, indices, count, self.groups, split, slots, gather_warp, lane
            )
            cluster.wait_for_all()

    def _await_keys(self, valid: cute.Tensor, row):
        """Waits for the predecessor; how many keys the row has."""
        pdl.wait()
        if self.release:
            pdl.release()
        return cutlass.min(valid[row], TOP_K)

    @cute.jit
    def _score(
        self,
        heads: cute.Tensor,
        first_head,
        count,
        split,
        scale: Float32,
        slots: Slots,
        masses: cute.Tensor,
        warp,
        lane,
    ):
        """P of this warp's keys of groups t, t + TEAMS, ... of this CTA, where t is its team, and
        the mass of all its P."""
        group, group_lane = mma.fragment_place(lane)
        # Heads past the end repeat the last one.
        places = [cutlass.min(first_head + group + side, HEADS - 1) for side in (0, mma.HALF_M)]
        sides = [heads[place, None] for place in places]
        fragments, factors = ROWS.query_fragments(*sides, group_lane)
        scales = [factor * scale for factor in factors]
        top = cute.make_rmem_tensor((softmax.SIDES,), Float32)
        mass = cute.make_rmem_tensor((softmax.SIDES,), Float32)
        top.fill(softmax.LOWEST)
        mass.fill(0.0)
        member = warp % TEAM
        first_octet = member * SCORE_OCTETS
        lane_keys = softmax.lane_keys(group_lane, first_octet, SCORE_OCTETS)
        for order in cutlass.range(warp // TEAM, self.groups.of(count, split), TEAMS, unroll=1):
            slots.wait_ready(order)
            slot = order % slots.count
            keys = slots.keys[slot, None, None]
            lane_rows = [keys[key, None] for key in lane_keys]
            octet_rows = [
                keys[(first_octet + octet) * softmax.OCTET + softmax.key_of_column(group), None]
                for octet in range(SCORE_OCTETS)
            ]
            scores = ROWS.scores(fragments, octet_rows, lane_rows, group_lane)
            left = count - self.groups.first_key(order, split)
            present = [key < left for key in lane_keys]
            weights = softmax.soften(scores, present, scales, top, mass)
            memory.store_words(slots.weights[slot, member, lane, None], weights)
            if group_lane == 0:
                for side in cutlass.range_constexpr(softmax.SIDES):
                    slots.maxima[slot, member, group + side * mma.HALF_M] = top[side]
            barrier.arrive_as_warp(slots.scored + slot)
        for side in cutlass.range_constexpr(softmax.SIDES):
            whole = reduce.lanes_sum(mass[side], mma.GROUP_LANES)
            if group_lane == 0:
                masses[warp, group + side * mma.HALF_M, 0] = top[side]
                masses[warp, group + side * mma.HALF_M, 1] = whole
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=SCORE_WARPS * reduce.WARP)

    @cute.jit
    def _sum_values(self, count, split, slots: Slots, warp, lane):
        """Sums of P times this warp's columns over all groups of this CTA: C fragments of tiles
        2w and 2w + 1, the even and the odd columns of window w."""
        # A shuffle keeps the lane in a register: else the loop asks for it every time.
        lane = cute.arch.shuffle_sync(lane, lane)
        group, group_lane = mma.fragment_place(lane)
        total = cute.make_rmem_tensor((2 * WARP_WINDOWS, 4), Float32)
        top = cute.make_rmem_tensor((softmax.SIDES,), Float32)
        highest = cute.make_rmem_tensor((softmax.SIDES,), Float32)
        total.fill(0.0)
        top.fill(softmax.LOWEST)
        highest.fill(softmax.LOWEST)
        first_column = warp * (WARP_WINDOWS * WINDOW)
        for order in cutlass.range(self.groups.of(count, split), unroll=1):
            # The values need not wait for their weights.
            slots.wait_ready(order)
            slot = order % slots.count
            keys = slots.keys[slot, None, None]
            values = value_sums.load_columns(keys, first_column, WARP_WINDOWS, lane)
            slots.wait_scored(order)
            vectors = [
                memory.load_words(slots.weights[slot, part, lane, None], 0)
                for part in range(softmax.FRAGMENTS)
            ]
            weights = [[vector[place] for place in range(4)] for vector in vectors]
            maxima = [
                [slots.maxima[slot, part, group + side] for side in (0, mma.HALF_M)]
                for part in range(softmax.FRAGMENTS)
            ]
            rows = [keys[key, None] for key in softmax.lane_keys(group_lane)]
            weights, references = ROWS.weigh(weights, maxima, rows, first_column)
            barrier.arrive_as_warp(slots.free + slot)
            for side in cutlass.range_constexpr(softmax.SIDES):
                for part in maxima:
                    highest[side] = cute.arch.fmax(highest[side], part[side])
            moved = [top[side] for side in range(softmax.SIDES)]
            for side in cutlass.range_constexpr(softmax.SIDES):
                for part in references:
                    moved[side] = cute.arch.fmax(moved[side], part[side])
            if cute.arch.vote_any_sync((moved[0] > top[0]) | (moved[1] > top[1])):
                # A shuffle keeps this a branch: else it becomes products that mostly do nothing.
                moved = [cute.arch.shuffle_sync(value, lane) for value in moved]
                softmax.move(total, top, moved)
            weights = softmax.refer(weights, references, top)
            for part in cutlass.range_constexpr(softmax.FRAGMENTS):
                value_sums.add_products(total, weights[part], values[part])
        softmax.move(total, top, [highest[side] for side in range(softmax.SIDES)])
        return total

    @cute.jit
    def _merge(
        self,
        sums: SplitSums,
        count,
        key_scale: Float32,
        target: cute.Tensor,
        target_lse: cute.Tensor,
        first_head,
        split,
        thread,
    ):
        """Merges the windows that this CTA owns, QUAD columns a thread, and stores them.

        The score and the value warps call it, whose threads are the first ones.

        A thread keeps to one head, whose shares it knows before the sums arrive.
        """
        lanes = TILE_HEADS * QUADS  # of a window
        teams = MERGING_WARPS * reduce.WARP // lanes
        quad, head = thread % QUADS, thread // QUADS % TILE_HEADS
        factors, mass, highest = sums.shares(head)
        factor = key_scale / mass
        sums.wait()
        if (thread < teams * lanes) & (first_head + head < HEADS):
            for window in cutlass.range(thread // lanes, sums.present(split), teams):
                scaled = sums.merge(window, head, quad, factors) * factor
                values = cute.make_rmem_tensor((QUAD,), Float32)
                for place in cutlass.range_constexpr(QUAD):
                    values[place] = scalar.select(count > 0, scaled[place], Float32(0.0))
                column = (split * sums.owned + window) * QUADS + quad
                place = memory.vector_at(target[first_head + head, None], column, QUAD)
                place.store(values.load().to(BFloat16))
                if column == 0:
                    lse = cute.math.log2(mass) + highest
                    target_lse[first_head + head] = scalar.select(count > 0, lse, -Float32.inf)
